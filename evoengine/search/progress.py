"""What a search has done so far, for a display."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from evoengine.records import Candidate, Outcome
from evoengine.search.evaluators import Usage


@dataclass(slots=True)
class Progress:
    """The progress of a search, updated by the coordinator."""

    total: int
    started: float = field(default_factory=time.monotonic)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    best: Candidate | None = None
    stage: str = ""
    """the current stage before the first trial has ended, and after the last"""
    compiled: int = 0
    """binaries compiled in this run, without those that the ledger had"""
    taken_over: int = 0
    """trials whose result an earlier trial of the ledger supplied without an evaluation"""
    spent: float = 0.0
    """seconds that earlier processes of the run took"""
    predicted: int = 0
    """configurations that were predicted before they were proposed"""
    ended: str = "all trials done"
    notes: list[str] = field(default_factory=list)
    """remarks on the result for the user"""
    usage: Usage | None = None
    """where the GPU's time went"""

    @property
    def done(self) -> int:
        """Return the number of trials that have ended. Duplicates do not count."""
        return sum(self.outcomes.values()) - self.outcomes[Outcome.DUPLICATE]

    @property
    def correct(self) -> int:
        return sum(n for outcome, n in self.outcomes.items() if outcome.correct)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started
