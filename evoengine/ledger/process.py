"""Whether a process of this machine still lives, not another one that had its number since.

A number alone means nothing in containers, where several processes are number 1. With it go the boot of the machine,
the namespace that the number is of, and the time at which the process started (proc(5)).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

PROC = Path("/proc")
DEAD = ("Z", "X")
"""states of a process that has ended, and that its parent has not asked about yet"""


@cache
def _here() -> str | None:
    """This boot of the machine and this namespace of process numbers; None where the system does not say."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return None


def this_process() -> str | None:
    """What `is_gone` takes, of the process that calls this; None where the system does not say enough."""
    here, pid = _here(), os.getpid()
    stated = _state_and_start(pid)
    return f"{here} {pid} {stated[1]}" if here and stated else None


def is_gone(process: str | None) -> bool:
    """Whether it was a process of this machine and has ended. False of all that cannot be known from here."""
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
    """The process' state and its start in clock ticks since the boot; None where it is not to be seen."""
    try:
        stat = (PROC / str(pid) / "stat").read_text("utf-8")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]
