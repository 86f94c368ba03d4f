"""Whether this machine has failed: what a full disk does to a candidate is not the fault of the candidate."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from evoengine.cuda_files import broken_compiler
from evoengine.errors import MachineError, ToolDied

PROBE_BYTES = 1 << 20
"""written to see whether a disk still takes anything"""
MEMORY_RESERVE = 64 << 20
"""between the soft and the hard limit of a worker: to tell its own limit from a machine without memory"""
FILES_OF_A_LEDGER = 4
"""SQLite's file, its log and the log's index; a lock"""
OWN_LIMITS = (errno.EFBIG,)
"""errors that a worker's limits cause; whatever a task writes is below them unless a candidate floods it"""

_MACHINE_ERRNOS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EAGAIN,
)  # fmt: skip
_SIGNALS_OF_LIMITS = (signal.SIGXCPU, signal.SIGXFSZ)
_PART_KILLED = re.compile(r"(Killed|Terminated) signal terminated program.*")
"""what the driver of a compiler says of one of its programs that somebody ended"""


def names_machine_fault(message: str) -> bool:
    """Whether a tool's message, in English, says what no input of its own can cause."""
    return any(cause in message for cause in map(os.strerror, _MACHINE_ERRNOS))


def how_ended(code: int) -> str:
    """The name of the signal, or the exit code, by a process's exit code as Python has it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # one of the real-time signals, which have no names
        return f"signal {-code}"


def require_own_end(tool: str, code: int, said: str = "") -> None:
    """Raises ToolDied where the tool, or a part of it by what it `said`, was ended by a signal and no limit of ours."""
    if code < 0 and -code not in _SIGNALS_OF_LIMITS:
        how = how_ended(code)
        raise ToolDied(f"{tool} was ended by {how}", how)
    if part := _PART_KILLED.search(said):
        raise ToolDied(f"{tool}: {part[0]}", "SIGKILL" if part[1] == "Killed" else "SIGTERM")


def is_machine_fault(error: OSError) -> bool:
    """Whether no input can cause it: a full disk, too many open files."""
    return error.errno in _MACHINE_ERRNOS


def machine_error(error: OSError) -> MachineError:
    """The error with its file, as something that every candidate would meet."""
    where = f": {error.filename}" if error.filename else ""
    return MachineError(f"this machine failed: {error.strerror or error}{where}")


def require_files() -> None:
    """Raises MachineError where this process can open no more files, as many as a ledger needs."""
    opened: list[int] = []
    try:
        for _ in range(FILES_OF_A_LEDGER):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise MachineError(f"this machine failed: {error.strerror}") from error
    finally:
        for file in opened:
            os.close(file)


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory, in any cgroup (/proc/vmstat, Linux 4.13)."""
    try:
        lines = Path("/proc/vmstat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def why_unfit() -> str | None:
    """What keeps this machine from running any task: files it cannot write, processes it cannot start, a compiler that
    is damaged."""
    if why := broken_compiler():
        return f"this machine failed: {why}"
    cache = user_cache_path("evoengine")
    folders = [Path(tempfile.gettempdir()), *([cache] if cache.exists() else [])]
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(PROBE_BYTES))
        except OSError as error:
            return f"this machine failed: a file cannot be written in {folder}: {error.strerror}"
    try:
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=False, capture_output=True)
    except OSError as error:
        return f"this machine failed: a process cannot be started: {error.strerror}"
    return None


def limit_memory(limit: int) -> None:
    """Private writable memory (RLIMIT_DATA) of this process and, each, of those it starts."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit + MEMORY_RESERVE))


def has_memory() -> bool:
    """Whether the machine would give more memory, were it not for this process's own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        mmap.mmap(-1, MEMORY_RESERVE // 2, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return True


@contextmanager
def memory_for(more: int) -> Iterator[None]:
    """Lets this process, and each that it starts, take so many bytes more, where its limit is not lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = data_bytes() + more
    lower = wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def data_bytes() -> int:
    """What RLIMIT_DATA counts of this process (VmData in proc(5))."""
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[5])
    return pages * os.sysconf("SC_PAGE_SIZE")
