"""The resources of a Ray cluster, and what runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from evoengine.tuning.detached import SEARCH_ACTOR, DetachedStatus
from evoengine.tuning.ray_cluster import GPU_ACTOR, NAMESPACE, Node, connected, import_ray, survey

ANSWER_SECONDS = 10.0
"""time limit of an actor's answer"""


@dataclass(frozen=True, slots=True)
class BusyGpu:
    """A GPU that a search holds."""

    kind: str
    host: str
    device: str
    uuid: str
    label: str
    task: str | None
    """None while it is idle"""
    seconds: float


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    nodes: Sequence[Node]
    cpus: float
    cpus_busy: float
    """held by any user of the cluster, by Ray's count"""
    gpus: float
    gpus_busy: float
    at_work: Sequence[BusyGpu]
    searches: Sequence[DetachedStatus]
    """detached searches"""


def cluster_status(address: str) -> ClusterStatus:
    """Return the state of a cluster. Raises UsageError, and MachineError if the cluster cannot be reached."""
    with connected(address):
        ray = import_ray()
        total, free = ray.cluster_resources(), ray.available_resources()
        cpus, gpus = total.get("CPU", 0.0), total.get("GPU", 0.0)
        busy = (cpus - free.get("CPU", 0.0), gpus - free.get("GPU", 0.0))
        searches = [answer for _, answer in _answers(SEARCH_ACTOR, "status")]
        return ClusterStatus(survey(), cpus, busy[0], gpus, busy[1], _busy_gpus(), searches)


def _busy_gpus() -> list[BusyGpu]:
    found = []
    for name, a in _answers(GPU_ACTOR, "activity"):
        if a is not None and a.ready.device is not None:
            device, kind = a.ready.device, name.split(":")[1]
            found.append(BusyGpu(kind, a.ready.host, device.name, device.uuid, a.label, a.task, a.seconds))
    return found


def _answers(kind: str, question: str) -> list[tuple[str, Any]]:
    """Return the answers of evoengine's actors of that kind by name, without those that do not answer in time."""
    ray = import_ray()
    named = ray.util.list_named_actors(all_namespaces=True)
    own = [n["name"] for n in named if n["namespace"] == NAMESPACE and n["name"].startswith(f"{kind}:")]
    asked = {getattr(ray.get_actor(name, namespace=NAMESPACE), question).remote(): name for name in own}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS) if asked else ([], [])
    found = []
    for reference in answered:
        with suppress(ray.exceptions.RayError):  # the actor has just ended
            found.append((asked[reference], ray.get(reference)))
    return found
