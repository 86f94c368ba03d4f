"""Detect failures of this machine that are not a candidate's fault, such as a full disk, and ended processes."""

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
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from evoengine.cuda_files import broken_compiler
from evoengine.errors import MachineError, ToolDied

PROBE_BYTES = 1 << 20
"""written to check whether a disk has space left"""
MEMORY_RESERVE = 64 << 20
"""between the soft and the hard limit of a worker, to distinguish its own limit from exhausted memory"""
FILES_OF_A_LEDGER = 4
"""SQLite's file, its log and the log's index; a lock"""
OWN_LIMITS = (errno.EFBIG,)
"""errors that a worker's limits cause; a task's own files are below them unless a candidate floods its output"""

_MACHINE_ERRNOS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EAGAIN,
)  # fmt: skip # a table
_SIGNALS_OF_LIMITS = (signal.SIGXCPU, signal.SIGXFSZ)
_PART_KILLED = re.compile(r"(Killed|Terminated) signal terminated program.*")
"""how a compiler's driver reports that one of its programs was killed"""


def names_machine_fault(message: str) -> bool:
    """Return whether a tool's message, in English, reports a fault that no input can cause."""
    return any(cause in message for cause in map(os.strerror, _MACHINE_ERRNOS))


def how_ended(code: int) -> str:
    """Return the name of the signal, or the exit code, from Python's exit code of a process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # one of the real-time signals, which have no names
        return f"signal {-code}"


def require_own_end(tool: str, code: int, said: str = "") -> None:
    """Raise ToolDied if the tool, or a part of it, was ended by a signal other than a limit's.

    The end of a part is read from the output `said`.
    """
    if code < 0 and -code not in _SIGNALS_OF_LIMITS:
        how = how_ended(code)
        raise ToolDied(f"{tool} was ended by {how}", how)
    if part := _PART_KILLED.search(said):
        raise ToolDied(f"{tool}: {part[0]}", "SIGKILL" if part[1] == "Killed" else "SIGTERM")


def is_machine_fault(error: OSError) -> bool:
    """Return whether the error is one that no input can cause: a full disk, too many open files."""
    return error.errno in _MACHINE_ERRNOS


def machine_error(error: OSError) -> MachineError:
    """Return the error with its file as one that every candidate would meet."""
    where = f": {error.filename}" if error.filename else ""
    return MachineError(f"this machine failed: {error.strerror or error}{where}")


def require_files() -> None:
    """Raise MachineError if this process cannot open as many further files as a ledger needs."""
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
    """Return how many processes the kernel has killed for lack of memory in any cgroup (/proc/vmstat, Linux 4.13)."""
    try:
        lines = Path("/proc/vmstat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def why_unfit() -> str | None:
    """Return what keeps this machine from running any task, or None.

    It may be files that cannot be written, processes that cannot be started, or a damaged compiler.
    """
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
    """Limit the private writable memory (RLIMIT_DATA) of this process, and of each that it starts."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit + MEMORY_RESERVE))


def has_memory() -> bool:
    """Return whether the machine could allocate more memory, apart from this process's own limit."""
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
    """Raise the memory limit of this process and its children by so many bytes, unless the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = data_bytes() + more
    lower = wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def data_bytes() -> int:
    """Return what RLIMIT_DATA counts of this process (VmData in proc(5))."""
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[5])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ── whether a process lives ───────────────────────────────────────────────────────────────────────────────────────────


PROC = Path("/proc")
DEAD = ("Z", "X")
"""states of a process that has ended and that its parent has not waited for"""


@cache
def _here() -> str | None:
    """Return the machine's boot ID and this PID namespace; None if the system does not tell."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return None


def this_process() -> str | None:
    """Return the identity of this process for `is_gone`; None if the system does not tell it."""
    here, pid = _here(), os.getpid()
    stated = _state_and_start(pid)
    return f"{here} {pid} {stated[1]}" if here and stated else None


def is_gone(process: str | None) -> bool:
    """Return whether a process of this machine has ended; False for processes that cannot be seen from here."""
    here = _here()
    if process is None or here is None or not process.startswith(f"{here} "):
        return False
    pid, start = process.removeprefix(f"{here} ").split()
    stated = _state_and_start(int(pid))
    if stated is not None:
        return stated[0] in DEAD or stated[1] != start
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # another user's, whose processes this system hides
    return False


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """Return the process's state and its start in clock ticks since the boot; None if it is not visible."""
    try:
        stat = (PROC / str(pid) / "stat").read_text("utf-8")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]
