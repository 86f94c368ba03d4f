"""A search as the ledger knows it: what it was for, with what, and on what."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

RUNNING = "running"
KILLED = "killed"
"""no beat came from its process any more, and it never said how its search ended: `heartbeat.py`"""
PENDING = "pending"
"""what a trial without an outcome is called: its search is still running, or was lost"""


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
    trials: int | None = None
    """how many it was asked for; None of what is no search"""
    seconds: float | None = None
    """how long it may take; None where that is open"""
    conditions: Mapping[str, Any] | None = None
    """what has to be the same for it to go on, beside what stands here"""
    imported_from: str | None = None
    """None of a run of this ledger's own; else where it came from, as text that can be shown"""
    gpu_definition: dict[str, str | int | float] | None = None
    """of a GPU that a file described: its fields"""
    kernel: str | None = None
    """sha256 of the reference, definition and text of a kernel that somebody brought; None of workloads that come with
    evoengine. Runs with unlike ones are ranked apart"""


def this_host() -> str:
    return socket.gethostname()
