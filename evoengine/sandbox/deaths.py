"""Decide when the death of a worker process is a verdict on the kernel: only if it died twice while running alone.

Anything may end a process: an administrator, earlyoom, a cgroup, the death of its keeper. So a task whose worker died
without reaching a limit runs again, and from then on alone. A task whose worker died twice alone is the cause, unless
it died by a signal that only another process sends (SENT): such deaths are never a verdict, and only bounded in number.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from evoengine.records import DEATHS, Outcome, Rejection

EXCLUSIVE_DEATHS = 2
"""deaths with no other task running that make a verdict"""
MOST_DEATHS = 6
"""deaths after which a task ends without a verdict"""
STOPPED = "stopped by a signal"
SENT = frozenset(
    {*(number.name for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)), STOPPED}
)
"""ways to die that a kernel cannot cause by its computation. SIGKILL by the OOM killer does not count as a death: it
ends the search (workers.py); and a keeper that enforces a limit by SIGKILL reports the limit
"""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker process, or of its actor, that none of its limits explains."""

    how: str
    """the signal's name, `exit code N`, or how else it was lost"""
    reason: str
    """a sentence, with the end of what the process printed"""
    seconds: float
    """since the task began"""
    oom_kills: int = 0
    """processes that the kernel's OOM killer ended meanwhile, on the machine or in the process's own cgroup"""
    counts: bool = True
    """False if the machine is at fault: the task runs again, and the death is not counted"""

    @property
    def own(self) -> bool:
        """Return whether the task may have caused it."""
        return self.how not in SENT


class TaskLock:
    """A shared or exclusive lock. A task that waits for exclusive access precedes those that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._waiting_exclusive = 0
        self._is_exclusive = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive and not self._waiting_exclusive)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._waiting_exclusive += 1
            try:
                self._changed.wait_for(lambda: not self._is_exclusive and not self._running)
            finally:
                self._waiting_exclusive -= 1
            self._is_exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()


TASK_LOCK = TaskLock()
"""held by every task that this process submits, on this machine or on a cluster"""


def retry_deaths(attempt: Callable[[AbstractContextManager[None]], Answer | Rejection | Death]) -> Answer | Rejection:
    """Return the task's answer, or a Rejection once its worker has died too often.

    The Rejection is `crashed` after EXCLUSIVE_DEATHS deaths of its own while running alone, and `killed`, which is no
    verdict, after MOST_DEATHS in all. `attempt` runs the task once while it holds the lock that it is given.
    """
    deaths: list[tuple[Death, bool]] = []
    while True:
        alone = bool(deaths)
        answer = attempt(TASK_LOCK.exclusive() if alone else TASK_LOCK.shared())
        if not isinstance(answer, Death):
            return answer
        if answer.counts:
            deaths.append((answer, alone))
        if sum(alone and death.own for death, alone in deaths) == EXCLUSIVE_DEATHS:
            said = f"the task's worker died {len(deaths)} times, {EXCLUSIVE_DEATHS} of them while it ran alone"
            return _end(Outcome.CRASHED, deaths, said)
        if len(deaths) == MOST_DEATHS:
            said = f"the task's worker died {len(deaths)} times, by signals that other processes send: no verdict"
            return _end(Outcome.KILLED, deaths, said)


def _end(outcome: Outcome, deaths: list[tuple[Death, bool]], said: str) -> Rejection:
    evidence = [
        {name: value for name, value in asdict(death).items() if name not in ("reason", "counts")} | {"alone": alone}
        for death, alone in deaths
    ]
    last, _ = deaths[-1]
    return Rejection(outcome, f"{last.reason}; {said}", evidence={DEATHS: evidence})
