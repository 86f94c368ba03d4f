"""What a search has done so far, for a display."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from evoengine.records import Candidate, Outcome
from evoengine.search.evaluators import Usage


@dataclass(slots=True)
class Progress:
    """Kept up to date by the coordinator."""

    total: int
    started: float = field(default_factory=time.monotonic)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    best: Candidate | None = None
    stage: str = ""
    """what is being done where no trial has ended yet, or all have"""
    compiled: int = 0
    """binaries made in this run; those that the ledger had are not among them"""
    taken_over: int = 0
    """trials whose end an earlier trial of the ledger had; nothing was evaluated for them"""
    spent: float = 0.0
    """seconds that earlier processes of the run took"""
    predicted: int = 0
    """configurations that the model gave a time for before they were proposed"""
    ended: str = "all trials done"
    notes: list[str] = field(default_factory=list)
    """what a person should know of the result"""
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
