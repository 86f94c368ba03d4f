"""Searches that outlive their command: their coordinator is an actor of the Ray cluster.

Ray restarts a lost actor on any node; it then submits the same search, which resumes from the ledger. No database's URL
is sent: every node has its own EVOENGINE_DB.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from evoengine.errors import EvoengineError, MachineError, UsageError
from evoengine.search.progress import Progress
from evoengine.tuning.fleet import FleetSearch, GpuFinder
from evoengine.tuning.ray_cluster import (
    AUTO,
    GPU_ACTOR,
    LOCAL,
    NAMESPACE,
    BusyGpu,
    ClusterStatus,
    DetachedStatus,
    connected,
    import_ray,
    survey,
)
from evoengine.tuning.search import SearchOptions, SearchResult
from evoengine.tuning.setup import Echo, drawn_seed

SEARCH_ACTOR = "search"
"""prefix of the name of a coordinator"""
DATABASES = ("EVOENGINE_DB", "EVOENGINE_DB_FILE")


class DetachedSearch:
    """The coordinator's actor. It ends with its searches."""

    def __init__(
        self, name: str, options: Sequence[SearchOptions], argv: Sequence[str], finder: GpuFinder | None
    ) -> None:
        self._name, self._options, self._finder = name, options, finder
        sys.argv = list(argv)  # stored in the ledger as the command
        self._begun = threading.Event()
        self._error: EvoengineError | None = None
        self._search: FleetSearch | None = None
        self._progress: Progress | None = None
        self._last = ""
        threading.Thread(target=self._run, daemon=True).start()

    def begun(self) -> EvoengineError | None:
        """Wait until the search has begun; return the error that prevented it, if any."""
        self._begun.wait()
        return self._error

    def status(self) -> DetachedStatus:
        done, total = (self._progress.done, self._progress.total) if self._progress else (0, 0)
        gpus = tuple(each.gpu for each in self._options)
        return DetachedStatus(
            self._name, platform.node(), self._options[0].problem or "", gpus, done, total, self._last
        )

    def stop(self) -> None:
        """Stop after the current events; the ledger keeps the results."""
        if self._search:
            self._search.stop()

    def _run(self) -> None:
        try:
            if not any(os.environ.get(name) for name in DATABASES):
                raise MachineError(
                    f"the node {platform.node()} has no EVOENGINE_DB, the ledger of a detached search: set it in the "
                    "environment of ray start"
                )
            self._search = FleetSearch(self._options, self._report_line, finder=self._finder)
            for result in self._search.run_all(self._change):
                self._report_line(_ended(result))
        except EvoengineError as error:
            self._error = error
            self._begun.set()
        if self._error is None:
            ray = import_ray()
            ray.kill(ray.get_actor(self._name, namespace=NAMESPACE))

    def _report_line(self, line: str) -> None:
        self._last = line
        print(line, flush=True)  # into Ray's log of the actor

    def _change(self, progress: Progress) -> None:
        self._progress = progress
        self._begun.set()


def _ended(result: SearchResult | EvoengineError) -> str:
    return str(result) if isinstance(result, EvoengineError) else f"run {result.run}: {result.progress.ended}"


def detach(options: Sequence[SearchOptions], echo: Echo, finder: GpuFinder | None = None) -> str:
    """Start searches that continue without this process; return the name by which they are found and stopped.

    Raises UsageError, and MachineError if they cannot start.
    """
    first = options[0]
    if first.cluster in (None, LOCAL):
        raise UsageError("--detach requires --cluster with a cluster that outlives this command")
    assert first.cluster is not None
    if first.db is not None:
        raise UsageError("--detach contradicts --db: the ledger is that of EVOENGINE_DB on the nodes")
    name = f"{SEARCH_ACTOR}:{secrets.token_hex(3)}"
    # the seed is drawn here, so that the search stays the same when its actor restarts
    own = [replace(each, cluster=AUTO, seed=drawn_seed(each.seed)) for each in options]
    with connected(first.cluster):
        ray = import_ray()
        made = ray.remote(DetachedSearch).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=4,
        )
        actor = made.remote(name, own, sys.argv, finder)
        echo("starting on the cluster")
        if error := _begun(actor):
            ray.kill(actor)
            raise error
    return name


def _begun(actor: Any) -> EvoengineError | None:
    ray = import_ray()
    try:
        found = ray.get(actor.begun.remote())
    except ray.exceptions.RayError as error:
        return MachineError(f"the search cannot begin on the cluster: {str(error).strip().splitlines()[-1]}")
    return found if isinstance(found, EvoengineError) else None


def stop(address: str, name: str) -> None:
    """Stop a detached search; its results are kept. Raises UsageError if there is none of that name."""
    with connected(address):
        ray = import_ray()
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError as error:
            raise UsageError(f"the cluster runs no search {name!r}; evoengine cluster status lists them") from error
        ray.get(actor.stop.remote())


# ── status of a cluster ─────────────────────────────────────────────────────────────────────────────────────────────

ANSWER_SECONDS = 10.0
"""time limit of an actor's answer"""


def cluster_status(address: str) -> ClusterStatus:
    """Return the state of a cluster. Raises UsageError, and MachineError if the cluster cannot be reached."""
    with connected(address):
        ray = import_ray()
        total, free = ray.cluster_resources(), ray.available_resources()
        cpus, gpus = total.get("CPU", 0.0), total.get("GPU", 0.0)
        searches = [answer for _, answer in _answers(SEARCH_ACTOR, "status")]
        return {
            "nodes": survey(),
            "cpus": cpus,
            "cpus_busy": cpus - free.get("CPU", 0.0),
            "gpus": gpus,
            "gpus_busy": gpus - free.get("GPU", 0.0),
            "at_work": _busy_gpus(),
            "searches": searches,
        }


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
