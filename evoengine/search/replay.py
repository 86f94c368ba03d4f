"""A search on a recorded space, for benchmarks and demonstrations.

What would have been compiled and timed is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from evoengine.ledger.store import Ledger
from evoengine.objectives import OBJECTIVES, objective_values
from evoengine.records import Candidate, Config, Kind, Measurement, Outcome
from evoengine.search.past import run_past
from evoengine.search.progress import Progress
from evoengine.search.proposer import Proposer
from evoengine.search.recorded import RecordedSpace

RECORDED = "recorded:"
"""prefix of the device and the problem of a recorded space"""
REPLAY_OBJECTIVE = OBJECTIVES["speed"]
"""a recorded file has times, and seldom states the number of operations"""


class Replay:
    """A coordinator for which nothing has to be computed; the ledger and the display see no difference."""

    def __init__(
        self,
        space: RecordedSpace,
        sampler: str,
        seed: int,
        trials: int,
        seconds: float | None,
        ledger: Ledger,
        run: int,
        on_change: Callable[[Progress], None],
        on_finish: Callable[[int], None],
        spent: float = 0.0,
    ) -> None:
        """Create a replay. A `run` with trials continues; `spent` are the seconds that it took before."""
        past = run_past(ledger, run, (REPLAY_OBJECTIVE,))
        self.progress = Progress(trials, outcomes=past.outcomes, spent=spent)
        self._space, self._ledger, self._run = space, ledger, run
        self._seconds, self._on_change, self._on_finish = seconds, on_change, on_finish
        self._proposer = Proposer(space, sampler, seed, objectives=(REPLAY_OBJECTIVE,), past=past.trials)
        self._stop = False

    @property
    def invalid_proposals(self) -> int:
        return self._proposer.invalid

    @property
    def repeated_proposals(self) -> int:
        return self._proposer.repeated

    def stop(self) -> None:
        """Stop after the current trial."""
        self._stop = True

    def search(self) -> Progress:
        target = problem_of(self._space), device_of(self._space)
        self.progress.best = next(iter(self._ledger.best(*target, top=1, run=self._run)), None)
        while not self._stop and self.progress.done < self.progress.total:
            if self._seconds is not None and self.progress.spent + self.progress.elapsed > self._seconds:
                self.progress.ended = "time is up"
                return self.progress
            proposal = self._proposer.propose()
            if proposal is None:
                self.progress.ended = "every valid configuration was tried"
                return self.progress
            candidate = entry(self._space, proposal.config, self._run)
            trial = self._record(candidate, proposal.parents, proposal.operator)
            self._proposer.started(proposal, trial)
            self._proposer.tell(proposal, objective_values(candidate, (REPLAY_OBJECTIVE,)))
            self._on_finish(trial)
            self._on_change(self.progress)
        if self._stop:
            self.progress.ended = "interrupted"
        return self.progress

    def _record(self, c: Candidate, parents: tuple[int, ...], operator: str | None) -> int:
        assert c.outcome is not None  # the file says how each ended
        trial = self._ledger.add_ended(replace(c, parents=parents, operator=operator))
        self.progress.outcomes[c.outcome] += 1
        best = self.progress.best
        if c.measurement and (best is None or c.measurement.median_us < best.ranked_by.median_us):
            self.progress.best = self._ledger.candidate(trial)
        return trial


def entry(space: RecordedSpace, config: Config, run: int, trial: int = 0) -> Candidate:
    """Return a recorded configuration as a candidate."""
    milliseconds, device = space.time(config), device_of(space)
    figure = None
    if milliseconds is not None:
        samples = tuple((space.samples_of(config) * 1e3).tolist())
        figure = Measurement(Kind.RECORDED, device, None, milliseconds * 1e3, samples)
    reason = space.reason(config)
    outcome = Outcome.RECORDED if figure else failure(reason or "")
    return Candidate(trial, run, problem_of(space), device, dict(config), outcome, reason, device, measurement=figure)


def entries(space: RecordedSpace, run: int) -> Iterator[Candidate]:
    """Yield all recorded configurations as candidates."""
    return (entry(space, config, run, trial) for trial, config in enumerate(space.enumerate(), 1))


def failure(reason: str) -> Outcome:
    """Return the outcome for a recorded failure, by the terms of Kernel Tuner and T4."""
    word = reason.lower()
    if "compil" in word:
        return Outcome.UNCOMPILABLE
    if "timeout" in word:
        return Outcome.HUNG
    if "correct" in word:
        return Outcome.INCORRECT
    return Outcome.SCREENED if "constraint" in word or "invalid" in word else Outcome.CRASHED


def device_of(space: RecordedSpace) -> str:
    return space.device or "unknown"


def problem_of(space: RecordedSpace) -> str:
    return f"{RECORDED}{space.name}"
