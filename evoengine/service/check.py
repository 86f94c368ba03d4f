"""`evoengine serve --check`: whether the server could start here, and what it would run jobs on."""

from __future__ import annotations

from collections.abc import Iterator

from evoengine.devices.driver import find_driver
from evoengine.errors import MachineError
from evoengine.service.database import open_service
from evoengine.service.executors import slots_here
from evoengine.service.server import address, listen, prepare
from evoengine.service.settings import Settings
from evoengine.service.tokens import Tokens
from evoengine.stages.toolchain import compiler_version
from evoengine.tuning.ray_cluster import connected, require_fit, survey


def check(settings: Settings, db: str | None) -> Iterator[str]:
    """Yield a line for each thing that is in order. Raises UsageError or MachineError at the first that is not."""
    with open_service(db, create=True) as database:
        yield f"ledger    {database.place}"
        prepare(settings, database)
        asked = "every request" if settings.tokens_required else "requests that come through a proxy"
        yield f"tokens    {len(Tokens(database).all())}, asked for of {asked}"
    with listen(settings) as listening:
        yield f"address   {address(settings, listening)} is free"
    slots = slots_here(settings)
    if settings.cluster:
        yield f"cluster   {_nodes_of(settings.cluster)}, GPUs: {', '.join(settings.cluster_gpus) or 'none'}"
    for slot in slots:
        if slot.device:
            yield f"GPU       {slot.device.name}, for {', '.join(slot.gpus) or 'none that evoengine knows'}"
    if not settings.cluster and not any(slot.device for slot in slots):
        found = find_driver()
        yield f"GPU       none: {found}" if isinstance(found, str) else "GPU       none"
    yield f"{'jobs' if settings.cluster else 'CPU':<10}{settings.cpu_jobs} at once"
    for name, known in (("kernels", settings.kernel_folders), ("recorded", settings.recorded_files)):
        if known:
            yield f"{name:<10}{', '.join(known)}"
    if slots:
        yield f"compiler  {_compiler()}"


def _nodes_of(cluster: str) -> str:
    with connected(cluster):
        nodes = survey()
        require_fit(nodes)
    return f"{cluster}, {len(nodes)} nodes with {sum(node.cpus for node in nodes)} CPUs"


def _compiler() -> str:
    try:
        return compiler_version()
    except MachineError as error:
        return f"none: {error}"
