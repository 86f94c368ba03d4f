"""Finish the gate of candidates that are shown or shipped, and hold the finals of a search that times.

A search judges most candidates by the short cases alone. A displayed rank requires the whole gate of both judges: after
the last trial the candidates to be displayed are judged completely, and where one of them fails its successors are,
until the ranking is final. The same holds for exports. In finals the best candidates are timed against each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, field, replace

from evoengine.errors import MachineError
from evoengine.ledger.read import Trial
from evoengine.ledger.store import Ledger
from evoengine.records import (
    EMULATOR,
    EXECUTOR,
    GATE_VERSION,
    Candidate,
    CompiledCandidate,
    Finals,
    Judged,
    Kind,
    Outcome,
    Rejection,
    Verdict,
)
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool, Workers
from evoengine.search.compilers import with_machine_code
from evoengine.search.evaluators import CpuEvaluator, Evaluator, Job, make_plans, seed_for
from evoengine.search.first_build import build_judges
from evoengine.search.targets import spaces_of, target_of
from evoengine.space.space import SearchSpace
from evoengine.timing.statistics import SAME_WITHIN
from evoengine.workloads.base import Target

FINALISTS = 8


def submit_finals(ledger: Ledger, judge: Evaluator, problem: str, gpu: str) -> Future[Finals | Rejection] | None:
    """Return a future of the finals among the ledger's best measured candidates; None if the evaluator times none."""
    best = ledger.best(problem, gpu, top=FINALISTS)
    measured = [c.trial for c in best if c.ranked_by.kind is Kind.MEASURED]
    known = [with_machine_code(ledger, trial) for trial in measured]
    found = [candidate.contender for candidate in known if isinstance(candidate, Candidate)]
    return judge.finals(found) if found else None


def record_finals(ledger: Ledger, run: int, result: Finals | Rejection) -> list[str]:
    """Write the new figures with their places; return remarks for people.

    `Ledger.best` ranks by `place` among the finalists of the last run that held finals (`final_of_run`). Sustained
    figures have no place. A finalist whose output was wrong ends as incorrect.
    """
    if isinstance(result, Rejection):
        return [f"the best could not be timed against each other ({result.reason}); they are ranked by single timings"]
    said = []
    for trial, how in result.wrong.items():
        candidate = ledger.candidate(trial)
        reason = f"wrong while it was timed in finals, {how}"
        ledger.finish(trial, Outcome.INCORRECT, reason, candidate.occupancy, candidate.device)
        said.append(f"#{trial} was {reason}; it is out")
    for place, trial in enumerate(result.order, 1):
        if trial in result.sustained:
            ledger.record_measurement(trial, result.sustained[trial])
        figure = result.figures[trial]
        final = {"final_of_run": float(run), "place": float(place), "tied": float(trial in result.tied)}
        if place == 1 and result.lead:
            final |= dict(zip(("over_second", "over_second_low", "over_second_high"), result.lead, strict=True))
        ledger.record_measurement(trial, replace(figure, terms={**figure.terms, **final}))
    return said + _outcome(result)


def _outcome(result: Finals) -> list[str]:
    """Return sentences that compare the winner with the others."""
    said = []
    if result.lead:
        ratio, low, high = (100 * (value - 1) for value in result.lead)
        first, second = result.order[:2]
        interval = f"95 % interval {low:+.2f} to {high:+.2f} %"
        said.append(f"#{first} against #{second} in the same rounds: {ratio:+.2f} % of time ({interval})")
    if result.tied:
        first, *others = sorted(result.tied, key=result.order.index)
        within = f"within {100 * SAME_WITHIN:g} %"
        said.append(f"#{first} is the same as {_listed(others)} {within}; of these it has the fewest registers")
    if result.open:
        said.append(f"the fastest was not distinguished from {_listed(result.open)} in the time of the finals")
    return said


def _listed(trials: Iterable[int]) -> str:
    return ", ".join(f"#{trial}" for trial in trials)


DISPLAYED_RANKS = 10
"""number of displayed ranks, in addition to the best of each family that is not among them"""
MIN_TRIALS_BEHIND = 6
"""trials that must end behind a leader before its gate is finished: most leaders are overtaken sooner, and the gate
costs as much as a dozen other candidates"""
POLL_SECONDS = 0.1
BUILD_SECONDS = 2.0
"""duration of the emulator's build of a candidate, which no verdict's time includes"""
WHOLE_OVER_SHORT = 12
"""time of the whole gate by both judges over that of the short cases by machine code"""


def is_whole(verdicts: Sequence[Verdict]) -> bool:
    """Return whether both judges, of this gate's version, have judged a candidate to the end and none abstained."""
    return len(_current_verdicts(verdicts)) == 2


def is_judged(verdicts: Sequence[Verdict]) -> bool:
    """Return whether both judges, of any version, have judged a candidate to the end as far as they could."""
    last = {v.device: v for v in verdicts if v.device in (EXECUTOR, EMULATOR)}
    judged = Judged(tuple(last.values()))
    return judged.whole and judged.correct and any(not v.abstained for v in judged.verdicts)


def _current_verdicts(verdicts: Sequence[Verdict]) -> dict[str, Verdict]:
    """Map each judge without a GPU to its last whole verdict."""
    own = (v for v in verdicts if v.device in (EXECUTOR, EMULATOR) and v.gate_version == GATE_VERSION)
    return {v.device: v for v in own if v.whole and not v.abstained}


def judge_all_checks(
    judge: Evaluator,
    workers: Workers,
    target: Target,
    space: SearchSpace,
    contender: CompiledCandidate,
    known: Sequence[Verdict],
    seed: int,
) -> Future[Judged | Rejection]:
    """Submit what the verdicts `known` of a candidate leave open. Those of another version of the gate do not count."""
    judges = (EXECUTOR, EMULATOR)
    own = tuple(v for v in known if v.device in judges and v.gate_version == GATE_VERSION and not v.abstained)
    job = Job(contender, make_plans(space, target, contender.config), {}, seed)
    return judge.finish(target, job, own, workers)


def record_verdicts(ledger: Ledger, candidate: Candidate, result: Judged | Rejection) -> Outcome:
    """Record what the judges found, and return the outcome that the candidate has then.

    A candidate that they refute, or cannot judge, leaves the ranking; one whose judge others killed stays as it was.
    """
    if isinstance(result, Rejection) and not result.outcome.judged:
        assert candidate.outcome is not None  # it has a prediction
        return candidate.outcome
    if isinstance(result, Rejection):
        ledger.finish(candidate.trial, result.outcome, result.reason, candidate.occupancy, candidate.device)
        return result.outcome
    new = tuple(v for v in result.verdicts if v.taken_at is None)  # the others are the ledger's own
    wrong = result.wrong
    if wrong is not None:
        assert wrong.outcome is not None  # it refutes
        ledger.finish(candidate.trial, wrong.outcome, result.why_wrong, candidate.occupancy, wrong.device, new)
        return wrong.outcome
    if candidate.outcome is Outcome.UNFINISHED:
        device = result.verdicts[-1].device
        ledger.finish(candidate.trial, Outcome.ESTIMATED, result.alone, candidate.occupancy, device, new)
        return Outcome.ESTIMATED
    for verdict in new:
        ledger.record_verdict(candidate.trial, verdict)
    assert candidate.outcome is not None  # it was ranked
    return candidate.outcome


@dataclass(slots=True)
class Lead:
    """The leader of a search without a GPU: the best prediction so far."""

    trial: int | None = None
    rank_key: tuple[bool, float] = (True, math.inf)
    """of its figure; initially worse than any prediction"""
    finished: bool = False
    """whether its gate is finished or being finished"""
    trials_behind: int = 0
    """trials that have ended since it took the lead"""

    @property
    def due(self) -> bool:
        """Return whether its gate should be finished now."""
        return self.trial is not None and not self.finished and self.trials_behind >= MIN_TRIALS_BEHIND


@dataclass(slots=True)
class GateTime:
    """Durations of the gate in seconds, from which the time to finish it is estimated."""

    _whole: list[float] = field(default_factory=list)
    _short: list[float] = field(default_factory=list)

    def add(self, verdicts: Sequence[Verdict], whole: bool) -> None:
        seconds = sum(v.wall_ms for v in verdicts) / 1e3
        if whole:
            self._whole.append(BUILD_SECONDS + seconds)
        else:
            self._short.append(seconds)

    def to_finish(self, unfinished: int, jobs: int) -> float:
        """Return the seconds that finishing the gate for the displayed ones of `unfinished` candidates may take.

        They are estimated from candidates that were judged completely, or from the short cases before there are any.
        """
        short = WHOLE_OVER_SHORT * statistics.mean(self._short) if self._short else 0.0
        each = statistics.mean(self._whole) if self._whole else short
        return each * min(DISPLAYED_RANKS, unfinished) / jobs


@dataclass(slots=True)
class Finisher:
    """Finishes the gate of what a run's ranking displays."""

    ledger: Ledger
    run: int
    target: Target
    seed: int
    judge: Evaluator
    workers: Workers
    may_continue: Callable[[], bool]
    """whether more may be started: the search was not stopped and has time left"""
    on_change: Callable[[str], None]
    """receives the current stage every POLL_SECONDS and whenever something ends"""
    on_judged: Callable[[Candidate, Outcome], None]
    """receives each candidate in its previous state, and its new outcome"""
    spaces: dict[int, SearchSpace]
    """by run; missing ones are read from the ledger"""

    def finish_ranking(self) -> list[str]:
        """Judge the displayed ranking of predictions until all of it has passed; return remarks for the user."""
        judged, unjudged = self._finish(self._displayed)
        said = _failures(judged)
        alone = (j.alone for j in judged.values() if isinstance(j, Judged) and j.correct)
        said += dict.fromkeys(f"only one judge could run: {why}" for why in alone if why)
        if unjudged:
            who = "1 candidate is" if unjudged == 1 else f"{unjudged} candidates are"
            said.append(f"{who} not ranked, as the gate was not finished in time")
        return said

    def finish_finalists(self, count: int) -> list[str]:
        """Judge the `count` best measured candidates until all of them have passed; return remarks for the user."""
        problem, gpu = str(self.target.problem), self.target.gpu.key
        judged, _ = self._finish(lambda: [c.trial for c in self.ledger.best(problem, gpu, top=count)])
        return _failures(judged)

    def _finish(self, wanted: Callable[[], Iterable[int]]) -> tuple[dict[int, Judged | Rejection], int]:
        """Judge the trials of `wanted`, called again after each result; return results, and how many are left over."""
        judged: dict[int, Judged | Rejection] = {}
        in_flight: dict[Future[Judged | Rejection], Candidate] = {}
        asked_after, left = -1, list[int]()
        while True:
            if asked_after != len(judged):  # reading the ledger takes as much as a poll's tenth of a second
                begun = {candidate.trial for candidate in in_flight.values()}
                asked_after, left = len(judged), [t for t in wanted() if self._is_open(t, judged, begun)]
            while left and len(in_flight) < self.workers.size and self.may_continue():
                trial = left.pop(0)
                begun_now = self.begin(trial)
                if isinstance(begun_now, Rejection):
                    judged[trial] = begun_now
                else:
                    future, candidate = begun_now
                    in_flight[future] = candidate
            if not in_flight:
                return judged, len(left)
            self.on_change(f"finishing the gate of the best: {len(judged)} done, {len(in_flight) + len(left)} to go")
            for future in wait(in_flight, POLL_SECONDS, FIRST_COMPLETED).done:
                candidate = in_flight.pop(future)
                judged[candidate.trial] = future.result()
                self.end(candidate, judged[candidate.trial])

    def _is_open(self, trial: int, judged: Container[int], begun: Container[int]) -> bool:
        return trial not in judged and trial not in begun and not is_whole(self.ledger.verdicts(trial))

    def begin(self, trial: int) -> tuple[Future[Judged | Rejection], Candidate] | Rejection:
        """Submit what earlier verdicts leave open of a trial; a Rejection where there is no kernel to judge."""
        found = with_machine_code(self.ledger, trial)
        if isinstance(found, Rejection):  # imported, and its source does not compile here
            return found
        if found.source is None or found.binary is None:
            return Rejection(Outcome.UNRANKED, "the ledger has no kernel of it")
        return self._submit(found), found

    def end(self, candidate: Candidate, result: Judged | Rejection) -> None:
        """Record the result of a candidate that `begin` submitted."""
        self.on_judged(candidate, record_verdicts(self.ledger, candidate, result))

    def _submit(self, candidate: Candidate) -> Future[Judged | Rejection]:
        seed = seed_for(self.seed, self.run, candidate.trial)
        known = self.ledger.verdicts(candidate.trial)
        space = self.spaces.get(candidate.run)
        if space is None:
            self.spaces |= spaces_of(self.ledger, [candidate], self.target)
            space = self.spaces[candidate.run]
        return judge_all_checks(self.judge, self.workers, self.target, space, candidate.contender, known, seed)

    def _displayed(self) -> list[int]:
        """Return the trials that a ranking would show if nothing more failed, best first."""
        trials = self.ranked_predictions()
        firsts = {t.config.get("family"): t.trial for t in reversed(trials)}
        return list(dict.fromkeys([*(t.trial for t in trials[:DISPLAYED_RANKS]), *firsts.values()]))

    def ranked_predictions(self) -> list[Trial]:
        """Return the run's trials with a prediction that no judge has refuted, best first."""
        outcomes = (Outcome.ESTIMATED, Outcome.UNFINISHED)
        figures = [(t.measurement, t) for t in self.ledger.trials(run=self.run, outcomes=outcomes)]
        ordered = sorted(((m, t) for m, t in figures if m is not None), key=lambda pair: pair[0].rank_key)
        return [t for _, t in ordered]


def _failures(judged: Mapping[int, Judged | Rejection]) -> list[str]:
    failed = {t: j.reason if isinstance(j, Rejection) else str(j) for t, j in judged.items() if not _passed(j)}
    return [f"#{trial}: {why}" for trial, why in failed.items()]


def _passed(found: Judged | Rejection) -> bool:
    return isinstance(found, Judged) and found.correct


def judge_once(target: Target, space: SearchSpace, contender: CompiledCandidate, seed: int) -> Judged | Rejection:
    """Judge one candidate to the end, in a process that may die."""
    build_judges()  # before the judges' time limit starts
    with closing(WorkerPool(1, COMPILER_LIMITS)) as workers:
        return judge_all_checks(CpuEvaluator(target), workers, target, space, contender, (), seed).result()


# ── exports ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def judge_export(ledger: Ledger, candidate: Candidate, seed: int) -> Judged:
    """Judge a candidate to be exported completely, by the space of its run; `candidate` has its cubin.

    Earlier verdicts do not count: what is shipped is the binary that is in the ledger now. Raises UsageError if its
    space cannot be read, MachineError if neither judge can judge it here.
    """
    target = target_of(ledger, candidate)
    space = spaces_of(ledger, [candidate], target)[candidate.run]
    result = judge_once(target, space, candidate.contender, seed)
    if isinstance(result, Rejection):
        raise MachineError(f"trial {candidate.trial} cannot be judged here: {result.reason}")
    if candidate.imported_from is None or not result.correct:
        record_verdicts(ledger, candidate, result)
    return result
