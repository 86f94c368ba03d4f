"""What the parts of a server share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastapi import Request

from evoengine.ledger.store import Ledger
from evoengine.service.access import Tokens
from evoengine.service.answers import Answers, Reports
from evoengine.service.executors import Executors
from evoengine.service.jobs import Jobs
from evoengine.service.limits import LANES, POLLS, Lane, Threads
from evoengine.service.settings import Settings


@dataclass(slots=True)
class State:
    settings: Settings
    ledger: Ledger
    jobs: Jobs
    tokens: Tokens
    answers: Answers
    executors: Executors
    dispatches: Callable[[], bool]
    """whether this server's dispatcher works"""
    reports: Reports
    quick: Threads
    """of what everybody needs at once: health, tokens, the best kernel; they use connections of their own"""
    polls: Threads = field(default_factory=lambda: Threads(POLLS))
    """of requests that wait for jobs"""
    lanes: Mapping[str, Lane] = field(default_factory=lambda: {name: Lane(*sizes) for name, sizes in LANES.items()})
    stopping: threading.Event = field(default_factory=threading.Event)
    streams: int = 0
    """requests that wait for events now"""


def state_of(request: Request) -> State:
    found: State = request.app.state.service
    return found
