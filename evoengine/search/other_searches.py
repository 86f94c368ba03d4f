"""Wait for candidates that another search on this ledger evaluates, as for one's own of the same source."""

from __future__ import annotations

import time
from concurrent.futures import Future

from evoengine.ledger.store import Ledger

POLL_SECONDS = 0.5
"""interval at which the ledger is polled for them"""


class OtherSearches:
    """Futures for trials of other searches.

    A future completes when its trial is no longer in flight, because it ended or its search was killed.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._awaited: list[tuple[int, Future[None]]] = []
        self._polled = 0.0

    def wait_for(self, trial: int) -> Future[None]:
        future: Future[None] = Future()
        self._awaited.append((trial, future))
        return future

    def poll(self) -> None:
        """Poll the ledger from time to time for claims that other searches hold."""
        if not self._awaited or time.monotonic() - self._polled < POLL_SECONDS:
            return
        self._polled = time.monotonic()
        self._ledger.look_for_killed()
        decided = self._ledger.claims.decided([trial for trial, _ in self._awaited])
        waiting, self._awaited = self._awaited, []
        for trial, future in waiting:
            if trial in decided:
                future.set_result(None)
            else:
                self._awaited.append((trial, future))
