"""A search as the ledger knows it: what it was for, with what, on what, and whether its process still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

RUNNING = "running"
KILLED = "killed"
"""the process is gone and never said how its search ended"""


@dataclass(frozen=True, slots=True)
class Device:
    """What judges the candidates of a run: a GPU, or the emulator."""

    name: str
    uuid: str | None = None
    arch: str | None = None
    driver: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """library → version, and what of the GPU's settings a figure depends on: its power limit, whether MIG is on"""


@dataclass(frozen=True, slots=True)
class Run:
    id: int
    started_at: datetime
    finished_at: datetime | None
    status: str
    """`RUNNING`, `KILLED`, or how the search said it ended"""
    gpu: str
    problem: str
    device: Device
    space_name: str
    space_sha256: str
    space_text: str
    sampler: str
    objectives: str
    """what it aimed at, comma-separated"""
    seed: int
    version: str
    """of evoengine"""
    host: str
    pid: int
    command: str
    definition: str | None = None
    """of a kernel that somebody brought: its problem.json"""
    imported_from: str | None = None
    """None of a run of this ledger's own; else where it came from, as text that can be shown"""


def this_host() -> str:
    return socket.gethostname()


def may_live(host: str, pid: int, started_at: datetime) -> bool:
    """Whether the process that started a run may still be at it.

    A process on another host cannot be asked, so it may. One that began after the run did has only inherited its pid.
    """
    if host != this_host():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return True
    state, *fields = stat.read_text().rpartition(")")[2].split()
    return state not in "ZX" and _began(fields) <= started_at.timestamp() + 1


def _began(fields: list[str]) -> float:
    """Seconds since the epoch. proc(5): field 22 of stat is the start in clock ticks since boot, `btime` the boot."""
    ticks = int(fields[22 - 4])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
