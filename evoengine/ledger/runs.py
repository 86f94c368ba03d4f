"""A search as the ledger knows it: what it was for, with what, and on what."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

RUNNING = "running"
KILLED = "killed"
"""no beat came from its process any more, and it never said how its search ended: `heartbeat.py`"""


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
