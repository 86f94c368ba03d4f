"""Connect to a Ray cluster, list its nodes, and check whether they can run this evoengine's tasks.

All uses of Ray's private names are in this module.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import struct
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2
from typing_extensions import TypedDict

from evoengine import __version__
from evoengine.devices.driver import find_driver
from evoengine.errors import EvoengineError, MachineError, UsageError
from evoengine.gpu import known_gpus
from evoengine.stages.toolchain import compiler_version
from evoengine.text import command_line

LOCAL = "local"
"""a cluster of this machine alone, for the duration of the command"""
AUTO = "auto"
"""the cluster of which `ray start` made this machine a node"""
GPU = "gpu:"
"""prefix of the resource for a kind of GPU: gpu:h100"""
NAMESPACE = "evoengine"
"""namespace of the actors' names"""
GPU_ACTOR = "gpu"
"""prefix of the name of an actor that has a GPU"""
REACH_SECONDS = 5.0
SURVEY_SECONDS = 120.0
"""time limit of the survey, which starts a process on each node"""
OBJECT_STORE_BYTES = 200 << 20
"""for a local cluster; a binary takes about 1 MB"""
ADDRESS = re.compile(r"(?:ray://)?(?P<host>[\w.-]+|\[[\da-fA-F:]+\]):(?P<port>\d{1,5})\Z")
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_enable_metrics_collection": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # otherwise Ray retries an address without a cluster for minutes
}
"""of this process, read when Ray is imported"""
RAYLET_DIED = (
    "the raylet of this machine died, the process through which a search reaches the Ray cluster (its log: raylet.out "
    "in Ray's session folder): start Ray again, and give the same command"
)
DEATH_SIGNAL = signal.SIGUSR2
"""interrupts whatever the main thread waits for"""
UNWIND_SECONDS = 20.0
"""time for a search to end after its raylet died; Ray ends the process after about 60 s, with exit code 1"""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's setting for systems without multi-node clusters, by which it listens only on 127.0.0.1"""


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    """Ray's"""
    host: str
    address: str
    cpus: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    """kind → number, as the node states it"""
    python: str = ""
    evoengine: str | None = None
    """its version; None if it is not installed"""
    compiler: str | None = None
    why_unfit: str | None = None
    """why no task of a search can run on it"""


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
class DetachedStatus:
    """The state of a detached search."""

    name: str
    host: str
    problem: str
    gpus: tuple[str, ...]
    done: int
    total: int
    last: str
    """its last message"""


class ClusterStatus(TypedDict):
    """Resources as Ray counts them; `cpus_busy` and `gpus_busy` are those in use by any program."""

    nodes: Sequence[Node]
    cpus: float
    cpus_busy: float
    gpus: float
    gpus_busy: float
    at_work: Sequence[BusyGpu]
    searches: Sequence[DetachedStatus]


def check_address(address: str, given_by: str = "--cluster") -> str:
    """Return the address. Raises UsageError if it is invalid."""
    found = ADDRESS.match(address)
    if address in (LOCAL, AUTO) or (found and 0 < int(found["port"]) < 1 << 16):
        return address
    raise UsageError(
        f"{given_by} {address!r} is not the address of a cluster: write {LOCAL} (this machine), {AUTO} (the cluster of "
        "which this machine is a node), ray://HOST:10001, or on a node HOST:6379"
    )


def import_ray() -> Any:
    """Import Ray. Raises MachineError if it is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("ray")
    except ImportError as error:
        raise MachineError(
            f"a cluster needs Ray, which is not installed: pip install 'evoengine[ray]' ({error})"
        ) from None


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster at an address, or to one on this machine that ends with the context.

    Raises UsageError, and MachineError if the cluster cannot be reached or has other versions.
    """
    check_address(address)
    if "ray" in sys.modules and import_ray().is_initialized():  # this process is an actor of the cluster
        yield
        return
    if command_line() != " ".join(sys.argv):
        raise UsageError(
            "Ray stores the command lines of its clients, so --db must not hold a password: set EVOENGINE_DB instead"
        )
    if found := ADDRESS.match(address):
        _require_listener(address, found["host"].strip("[]"), int(found["port"]))
    if address == LOCAL:
        os.environ.update(LOOPBACK)
    elif _has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray does this by itself only for `auto`
    ray = import_ray()
    given: dict[str, Any] = dict(
        namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=None
    )
    if address == LOCAL:
        given |= dict(
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            resources=gpu_resources(),
            num_cpus=len(os.sched_getaffinity(0)),
            num_gpus=sum(gpu_resources().values()),
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # failures are reported below
            ray.init(address, **given)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise MachineError(_why_not_connected(address, error)) from error
    _silence_ray()
    try:
        with _watched_raylet():
            yield
    finally:
        ray.shutdown()


@contextmanager
def _watched_raylet() -> Iterator[None]:
    """Raise MachineError in the main thread when this machine's raylet dies.

    If that has no effect within UNWIND_SECONDS, end the process with the exit code of MachineError. Ray itself reports
    nothing, and calls into it block.
    """
    process = _raylet()
    if process is None:
        yield
        return
    left, leave = os.pipe()
    in_main = threading.current_thread() is threading.main_thread()  # only it can set a handler
    watching = threading.Thread(target=_watch, args=(process, left, in_main), name="raylet-watch", daemon=True)
    before = signal.signal(DEATH_SIGNAL, _raise_raylet_died) if in_main else None
    watching.start()
    try:
        yield
    finally:
        os.close(leave)
        watching.join()
        if in_main:
            signal.signal(DEATH_SIGNAL, before)
        os.close(left)
        os.close(process)


def _raylet() -> int | None:
    """Return a descriptor (pidfd_open(2)) of the raylet to which this process is connected.

    None for Ray's client (ray://), which connects without one.
    """
    node = import_module("ray._private.worker").global_worker.node
    if node is None:
        return None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(node.raylet_socket_name)
        size = struct.calcsize("3i")  # struct ucred, unix(7)
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return os.pidfd_open(pid)


def _watch(process: int, left: int, handled: bool) -> None:
    """Watch the raylet behind the descriptor `process`.

    If it dies, signal the main thread if `handled`, and end the process after UNWIND_SECONDS. Return when `left`
    becomes readable, that is, when the cluster is left.
    """
    if left in select.select([process, left], [], [])[0]:
        return
    if handled:
        signal.pthread_kill(threading.main_thread().ident or 0, DEATH_SIGNAL)
    if not select.select([left], [], [], UNWIND_SECONDS if handled else 0.0)[0]:
        print(f"evoengine: {RAYLET_DIED}", file=sys.stderr, flush=True)
        os._exit(MachineError.exit_code)


def _raise_raylet_died(number: int, frame: object) -> None:
    raise MachineError(RAYLET_DIED)


def _has_token() -> bool:
    """Return whether this user has a token for Ray clusters in one of the places where Ray looks for it."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    return "RAY_AUTH_TOKEN" in os.environ or os.path.exists(os.path.expanduser(path))


def _require_listener(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        raise MachineError(f"the Ray cluster at {address} cannot be reached: {why}") from error


def _why_not_connected(address: str, error: Exception) -> str:
    said = " ".join(str(error).split())
    if "ersion" in said and "ython" in said:
        return f"the Ray cluster at {address} and this machine have different versions: {said}"
    if "Failed to connect" in said or "uthenticat" in said:  # the port is open, but Ray refuses this client
        have = "the token here may be another" if _has_token() else "there is no token here"
        return (
            f"the Ray cluster at {address} refuses this machine: if it asks for a token (RAY_AUTH_MODE=token), {have}; "
            "copy ~/.ray/auth_token of its first node to the same place here, or set RAY_AUTH_TOKEN"
        )
    if address == AUTO:
        return f"this machine is not a node of a Ray cluster; run ray start, or name a cluster with --cluster ({said})"
    return f"the Ray cluster at {address} cannot be reached: {said}"


def _silence_ray() -> None:
    """Suppress Ray's messages on nodes and actors.

    They go to stdout, which is for results; a search reports them itself.
    """
    worker = import_module("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        vars(worker)["print_to_stdstream"] = lambda data, ignore_prefix: None


def gpu_resources() -> dict[str, float]:
    """Return the argument of `ray start --resources` for this machine: the number of GPUs of each known kind."""
    found = find_driver()
    if isinstance(found, str):
        return {}
    kinds = {gpu.name: gpu.key for gpu in known_gpus().values()}
    return dict(Counter(f"{GPU}{kinds[d.name]}" for d in found[1] if d.name in kinds))


def gpus_of(resources: Mapping[str, float]) -> dict[str, int]:
    """Return the number of GPUs by kind from a node's resources.

    Ray must know of the GPUs too, because it assigns them.
    """
    own = {name.removeprefix(GPU): int(n) for name, n in resources.items() if name.startswith(GPU) and n >= 1}
    return own if sum(own.values()) <= resources.get("GPU", 0) else {}


def living_nodes() -> list[Node]:
    """Return the nodes that Ray lists as alive."""
    ray = import_ray()
    return [
        Node(
            n["NodeID"],
            n["NodeManagerHostname"],
            n["NodeManagerAddress"],
            int(n["Resources"].get("CPU", 0)),
            gpus_of(n["Resources"]),
        )
        for n in ray.nodes()
        if n["Alive"]
    ]


def survey() -> list[Node]:
    """Return every living node that can take work, with what it has.

    Raises MachineError if a node does not answer in time.
    """
    ray = import_ray()
    strategy = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    nodes = [node for node in living_nodes() if node.cpus or node.gpus]
    inspect_node = ray.remote(num_cpus=0, max_retries=3)(_node_inspection())
    asked = [inspect_node.options(scheduling_strategy=strategy(node.id, soft=False)).remote() for node in nodes]
    try:
        answers = ray.get(asked, timeout=SURVEY_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise MachineError(f"the nodes of the cluster did not answer within {SURVEY_SECONDS:g} s") from error
    except ray.exceptions.RayError as error:
        raise MachineError(f"a node of the cluster does not answer: {str(error).strip().splitlines()[-1]}") from error
    return [_described(node, found) for node, found in zip(nodes, answers, strict=True)]


def _node_inspection() -> Any:
    """Return a nested function, which Ray serialises by value: evoengine may not be installed on the node."""

    def inspect_node() -> dict[str, str | None]:
        import platform

        found: dict[str, str | None] = {"python": platform.python_version(), "evoengine": None, "compiler": None}
        try:
            import evoengine

            found["evoengine"] = evoengine.__version__
            from evoengine.stages.toolchain import compiler_version

            found["compiler"] = compiler_version()
        except Exception as error:
            found["why"] = f"{type(error).__name__}: {error}"
        return found

    return inspect_node


def _described(node: Node, found: Mapping[str, str | None]) -> Node:
    python, own = str(found["python"]), sys.version.split()[0]
    why = None
    if python.split(".")[:2] != own.split(".")[:2]:
        why = f"Python {python} (here {own})"
    elif found["evoengine"] is None:
        why = f"no evoengine: {found.get('why')} (here {__version__})"
    elif found["evoengine"] != __version__:
        why = f"evoengine {found['evoengine']} (here {__version__})"
    elif found["compiler"] != _own_compiler():
        why = f"{found['compiler'] or 'no CUDA compiler'} (here {_own_compiler()})"
    return Node(
        node.id, node.host, node.address, node.cpus, node.gpus, python, found["evoengine"], found["compiler"], why
    )


def _own_compiler() -> str | None:
    try:
        return compiler_version()
    except EvoengineError:
        return None


def require_fit(nodes: list[Node]) -> None:
    """Raise MachineError if a node has other versions than this machine, or if there is no node."""
    for node in nodes:
        if node.why_unfit:
            raise MachineError(f"the node {node.host} ({node.address}) of the cluster has {node.why_unfit}")
    if not any(node.cpus for node in nodes):
        raise MachineError("the cluster has no node with CPUs to compile on")


# Write files that start a Ray cluster for searches: a Slurm job, or Kubernetes objects for KubeRay.

TEMPLATES = Path(__file__).with_name("cluster_files")
SLURM, KUBERNETES = ("search.sh",), ("access.yaml", "cluster.yaml", "job.yaml")
RAY = "2.60.0"
"""version in the container file; every node and every client of the cluster has the same"""
IMAGE = re.compile(r"[a-z0-9][\w.-]*(:\d+)?(/[a-z0-9][\w.-]*)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?\Z")
"""a container image, as Kubernetes takes it"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical nodes of a cluster, as the files request them."""

    gpu: str
    """kind of GPU, a key of gpus.toml"""
    nodes: int
    gpus: int
    """per node; with 0 the cluster compiles, gates and predicts"""
    cpus: int
    """per node"""
    image: str | None = None
    """of Kubernetes' pods: one with evoengine and Ray (deploy/Containerfile, target ray-node)"""


def write_files(folder: Path, names: tuple[str, ...], cluster: Cluster) -> list[Path]:
    """Write the files of these names and return their paths.

    Raises UsageError, with nothing written, if a file exists already or cannot be written, or if the image is
    malformed.
    """
    if cluster.image is not None and not IMAGE.match(cluster.image):
        raise UsageError(f"--image {cluster.image!r} is not a container image: write REGISTRY/evoengine:TAG")
    texts = {folder / name: text_of(name, cluster) for name in names}
    for path in texts:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} already exists: name another folder, or move it away")
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
            if path.suffix == ".sh":
                path.chmod(0o755)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
    return written


def text_of(name: str, cluster: Cluster) -> str:
    """Return the text of one file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",
        comment_end_string="#>",  # a shell has `${#array}`
    )
    text = environment.get_template(f"{name}.j2").render(
        version=__version__,
        ray=RAY,
        gpu=cluster.gpu,
        nodes=cluster.nodes,
        gpus=cluster.gpus,
        cpus=cluster.cpus,
        image=cluster.image,
        least=0 if cluster.gpus else 1,
        accelerators=f", nvidia.com/gpu: {cluster.gpus}" if cluster.gpus else "",
    )
    return re.sub(r"\n{2,}(?=\s)|\n{3,}", "\n", text) if name.endswith(".yaml") else text
