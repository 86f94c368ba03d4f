"""Ray clusters of several nodes on this machine, with GPUs that are not there."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from evoengine.devices.driver import GpuDevice
from evoengine.records import Device
from evoengine.tuning.fleet import GpuFinder
from evoengine.tuning.ray_cluster import ENVIRONMENT, LOOPBACK
from tests.support.numbered_search import DEVICE

OPEN = {"RAY_AUTH_MODE": "disabled"}
"""no token is made for this user, and none is needed on the loopback"""
for _name, _value in {**ENVIRONMENT, **LOOPBACK, **OPEN}.items():
    os.environ.setdefault(_name, _value)

STORE_BYTES = 80 << 20
"""what Ray takes at least is 75 MB"""
START_SECONDS = 120.0
"""in which a node comes up on a loaded machine"""


class Nodes:
    """A cluster whose head runs nothing; nodes come and are killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args=self._arguments(0))
        self.address: str = self._cluster.address

    def _arguments(self, cpus: int, **gpus: int) -> dict[str, object]:
        kinds = {f"gpu:{kind}": float(count) for kind, count in gpus.items()}
        return dict(
            num_cpus=cpus, num_gpus=sum(gpus.values()), resources=kinds, object_store_memory=STORE_BYTES,
            include_dashboard=False,
        )  # fmt: skip

    def add(self, cpus: int, **gpus: int) -> object:
        return self._cluster.add_node(**self._arguments(cpus, **gpus))

    def kill(self, node: object) -> None:
        """As where a machine loses power: nothing of it says goodbye."""
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_raylets(self) -> None:
        """Kill them alone; what keeps the cluster's state lives on."""
        for node in self._cluster.list_all_nodes():
            for started in node.all_processes["raylet"]:
                os.kill(started.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def nodes(*cpus: int, **gpus: int) -> Iterator[tuple[Nodes, list[object]]]:
    """A cluster with a node for each of `cpus`, each with those GPUs."""
    cluster = Nodes()
    try:
        yield cluster, [cluster.add(count, **gpus) for count in cpus]
    finally:
        cluster.close()


def find_fake(gpu) -> GpuDevice:
    """A GPU like no other: Ray numbers those of a node."""
    import ray

    context = ray.get_runtime_context()
    (number,) = context.get_accelerator_ids()["GPU"]
    uuid = f"GPU-{context.get_node_id()[:8]}-0000-0000-0000-{int(number):012d}"
    return GpuDevice(int(number), DEVICE.name, uuid, gpu.capability, DEVICE.memory_bytes)


def describe_fake(find):
    device = find()
    return device, Device(device.name, device.uuid, "sm_90", f"of {platform.node()}")


FAKE = GpuFinder(find_fake, describe_fake)
