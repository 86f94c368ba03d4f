"""Count what a search has done so far, for a display, and say why its candidates fail."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
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


OnChange = Callable[[Progress], None]
"""receives the progress of a search after every event and about ten times a second"""
OnTrial = Callable[[Candidate], None]
"""receives each trial that ended"""


def ignore(_: object) -> None:
    """Ignore progress, or a trial."""


MAX_ALIKE = 20
"""a search stops when its first candidates, this many, all fail for one reason"""
SHOWN_REASONS = 3
REASON_CHARS = 300
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d[\d.,]*(?:[eE][+-]?\d+)?")
_CASE = re.compile(r"^(?:machine code: )?[^:]{1,60}: ")


class Failures:
    """The reasons for which a run's candidates failed, in the order in which they ended."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Outcome, str]] = Counter()
        self._examples: dict[tuple[Outcome, str], tuple[int, str]] = {}
        self._ended = 0

    def add(self, trial: int, outcome: Outcome, reason: str | None) -> None:
        """Count a trial that ended; one that passed counts as such."""
        self._ended += 1
        if outcome.has_figure or outcome.correct:
            return
        kind = outcome, _kind(outcome, reason or "")
        self._counts[kind] += 1
        self._examples.setdefault(kind, (trial, reason or str(outcome)))

    def stop_reason(self) -> str | None:
        """Return why the search should stop where the first ALIKE candidates failed for one reason; else None."""
        if self._ended < MAX_ALIKE or len(self._counts) != 1:
            return None
        ((kind, count),) = self._counts.items()
        if count != self._ended:
            return None
        return f"the first {count} candidates failed alike ({kind[0]})"

    def commonest(self) -> list[str]:
        """Return a line for each of the commonest reasons: count, outcome and the reason of one trial."""
        lines = []
        for kind, count in self._counts.most_common(SHOWN_REASONS):
            trial, reason = self._examples[kind]
            short = " ".join(reason.split())
            shown = short if len(short) <= REASON_CHARS else f"{short[:REASON_CHARS]} …"
            lines.append(f"{count} of {self._ended} {kind[0]}, as #{trial}: {shown}")
        if (more := len(self._counts) - SHOWN_REASONS) > 0:
            lines.append(f"and {more} other reasons")
        return lines


def _kind(outcome: Outcome, reason: str) -> str:
    """Return a reason without its numbers, and without the case of the gate where that names one."""
    first = reason.strip().split("\n", 1)[0]
    if outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG):
        first = _CASE.sub("", first)
    return _NUMBER.sub("#", first)
