"""When a worker process that died is a verdict on the kernel: only after it died twice with nothing beside it.

Anything may end a process: an administrator, earlyoom, a cgroup, the death of its keeper. So a task whose worker died,
and that reached none of its limits, runs again, and from then on with no other task of this process beside it. A task
whose worker died twice alone is the cause itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from evoengine.records import DEATHS, Outcome, Rejection

ALONE = 2
"""deaths with nothing beside them that make a verdict"""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker process, or of the actor that had it, that none of its limits explains."""

    how: str
    """the signal's name, `exit code N`, or how else it was lost"""
    reason: str
    """a sentence, with the end of what the process printed"""
    seconds: float
    """since the task began"""
    oom_kills: int = 0
    """processes that the kernel ended meanwhile for want of memory, on the machine or in the process's own cgroup"""
    counts: bool = True
    """False of a loss that is the machine's: the task runs again as if nothing had happened"""


class Turns:
    """Tasks run beside each other, or one of them alone. Who waits to be alone goes before those who come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._waiting_alone = 0
        self._is_alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone and not self._waiting_alone)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._waiting_alone += 1
            try:
                self._changed.wait_for(lambda: not self._is_alone and not self._running)
            finally:
                self._waiting_alone -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()


TURNS = Turns()
"""of all tasks that this process has others do, on this machine or on a cluster"""


def judged(
    attempt: Callable[[AbstractContextManager[None]], Answer | Rejection | Death],
) -> Answer | Rejection:
    """Return the task's answer, or a Rejection once its worker has died ALONE times with nothing beside it.

    The Rejection is `crashed`. `attempt` runs the task once within the turn that it is given.
    """
    deaths: list[tuple[Death, bool]] = []
    while True:
        alone = bool(deaths)
        answer = attempt(TURNS.alone() if alone else TURNS.shared())
        if not isinstance(answer, Death):
            return answer
        if answer.counts:
            deaths.append((answer, alone))
        if len(deaths) == 1 + ALONE:
            return _verdict(deaths)


def _verdict(deaths: list[tuple[Death, bool]]) -> Rejection:
    evidence = [
        {name: value for name, value in asdict(death).items() if name not in ("reason", "counts")} | {"alone": alone}
        for death, alone in deaths
    ]
    last, _ = deaths[-1]
    reason = f"{last.reason}; the task's worker died {len(deaths)} times, {ALONE} of them with nothing beside it"
    return Rejection(Outcome.CRASHED, reason, evidence={DEATHS: evidence})
