"""Code that runs in a worker process: its limits, and the pickling of a task's answer or failure."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evoengine.errors import EvoengineError, MachineError, ToolDied
from evoengine.sandbox.machine import OWN_LIMITS, has_memory, limit_memory, machine_error

OUTPUT_TAIL_CHARS = 300
"""characters of an error, or of a dead worker's output, that go into the reason"""
MAX_PROCESSES = 256
"""limit of a worker's running processes; a compiler starts five"""
PROCESSES_OF_USER = 8192
"""processes that a worker's user may start in addition to those running at its start (RLIMIT_NPROC, not for root)"""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""libraries' own threads would compete with the other workers"""

TaskArguments = tuple[object, ...]


def no_warm_up() -> None:
    """Do nothing: the warm-up for tasks without slow imports."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker: time per task, memory, environment, and what it loads before its first task."""

    seconds: float = 180.0
    memory_bytes: int | None = 4 << 30
    """private writable memory (RLIMIT_DATA) of a worker, and of each process that it starts; their sum may be twice as
    much. None: no limit"""
    file_bytes: int = 256 << 20
    """largest file it may write; it also bounds the output of a task"""
    environment: Mapping[str, str] = field(default_factory=dict)
    niceness: int = 0
    """added to this process's own: a GPU's runner must not wait for compilers"""
    warm_up: Callable[[], object] = no_warm_up
    forked: bool = True
    """whether it is forked from a process with `evoengine.search.worker_imports` loaded; else it starts empty, since
    CUDA does not survive a fork"""
    spare: bool = False
    """whether a second, warmed-up process stands by to replace the first at once"""


DEFAULT_LIMITS = WorkerLimits()
COMPILER_LIMITS = WorkerLimits(environment={"CUDA_VISIBLE_DEVICES": ""}, niceness=10)
"""for workers that compile: without a visible GPU NVRTC does not start the driver; they must not delay a GPU's
runner"""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a task without an answer. `late`: it was stopped at its time limit."""

    reason: str
    late: bool = False
    death: str | None = None
    """how a process, the worker or a tool, died without reaching a limit: the signal's name or an exit code"""
    limit: str | None = None
    """the limit that was reached"""


def init_worker(limits: WorkerLimits, environment: Mapping[str, str]) -> None:
    """Initialise a worker: ignore Ctrl-C, which the coordinator handles, and set the environment and limits.

    The fork server has an older environment.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Pebble's handler makes an exit code of it
    folder = {"TMPDIR": os.environ["TMPDIR"]}
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(dict(environment) | ONE_THREAD | dict(limits.environment) | folder)
    os.nice(limits.niceness)
    if limits.memory_bytes:
        limit_memory(limits.memory_bytes)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    _limit_processes()


def _limit_processes() -> None:
    """Set RLIMIT_NPROC, which counts all threads of a user, to the allowed number plus what runs already."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = _threads_of_user() + PROCESSES_OF_USER
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _threads_of_user() -> int:
    found = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid == os.getuid():
                # after the name, which may contain anything, num_threads is the 18th field (proc(5): the 20th in all)
                found += int((folder / "stat").read_bytes().rpartition(b")")[2].split()[17])
        except OSError:  # it has ended
            continue
    return found


def ready(warm_up: Callable[[], object]) -> int:
    warm_up()
    return os.getpid()


def run_pickled(task: Callable[..., object], args: TaskArguments) -> bytes:
    """Pickle the answer here, so that one that cannot be pickled fails this task and not the channel of all tasks."""
    try:
        os.ftruncate(1, 0)
        return pickle.dumps(task(*args))
    except ToolDied as error:
        return pickle.dumps(Failure(str(error), death=error.how))
    except EvoengineError as error:
        return pickle.dumps(error)
    except BaseException as error:  # SystemExit, too, ends only the task
        return pickle.dumps(_failure(error))


def _failure(error: BaseException) -> Failure | MachineError:
    if not has_memory():
        return MachineError("this machine has no memory left")
    if isinstance(error, OSError) and error.errno not in (*OWN_LIMITS, errno.ENOMEM):
        return machine_error(error)
    limit = _limit_hit(error)
    reason = f"{type(error).__name__}: {error}"[:OUTPUT_TAIL_CHARS]
    return Failure(f"{reason} (the limit of a worker is {limit})" if limit else reason, limit=limit)


def _limit_hit(error: BaseException) -> str | None:
    kind, what = (
        (resource.RLIMIT_FSIZE, "in a file") if isinstance(error, OSError) else (resource.RLIMIT_DATA, "of memory")
    )
    limit, _ = resource.getrlimit(kind)
    if limit == resource.RLIM_INFINITY or not isinstance(error, MemoryError | OSError):
        return None
    return f"{limit / 2**30:.3g} GiB {what}"
