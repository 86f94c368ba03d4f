"""The search: ask for configurations, keep the compilers and the GPU busy, tell what came out, record every stage.

One process owns the ledger and the sampler; workers only compute. A candidate goes down the pipeline and stops at the
first stage that rejects it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from evoengine.ledger.store import Ledger
from evoengine.objectives import told
from evoengine.records import (
    Baseline,
    Binary,
    Candidate,
    Config,
    Outcome,
    Rejection,
    Source,
    config_key,
)
from evoengine.search.compilers import Compilers
from evoengine.search.evaluators import Evaluator, Usage, record_evaluation, seed_for, timed_baselines
from evoengine.search.finals import hold_finals, record_finals
from evoengine.search.lookahead import Lookahead
from evoengine.search.pipeline import Compiled, Pipeline, Proposed, Rendered
from evoengine.search.proposer import Proposal, Proposer
from evoengine.search.samplers import LED
from evoengine.search.setting import Setting
from evoengine.search.siblings import sibling_prior
from evoengine.search.worker_process import COMPILER_LIMITS, WorkerLimits
from evoengine.stages.predict import Estimated
from evoengine.stages.tasks import Evaluation, compile_task, predict_task

POLL_SECONDS = 0.1
"""how often the display is refreshed and a request to stop is seen while nothing finishes"""

NEIGHBOURS = 4
"""problems and GPUs of earlier runs whose best kernels are tried"""
RANKS = 100
"""how far down the ranking of each the best that is valid here is looked for"""


def neighbouring_bests(ledger: Ledger, setting: Setting) -> list[Config]:
    """The best that is valid here of each other problem and GPU, latest first, but for start points."""
    here = (setting.target.gpu.key, str(setting.target.problem))
    kernel = here[1].partition(":")[0]
    targets = dict.fromkeys((r.gpu, r.problem) for r in reversed(ledger.runs()) if r.problem.startswith(f"{kernel}:"))
    found: dict[str, Config] = {}
    for gpu, problem in [t for t in targets if t != here][:NEIGHBOURS]:
        ranked = (c.config for c in ledger.best(problem, gpu, top=RANKS))
        config = next((c for c in ranked if setting.space.contains(c)), None)
        if config is not None and config not in setting.space.starts:
            found[config_key(config)] = config
    return list(found.values())


@dataclass(slots=True)
class Progress:
    """What a display shows; kept up to date by the coordinator."""

    total: int
    started: float = field(default_factory=time.monotonic)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    best: Candidate | None = None
    stage: str = ""
    """what is being done where no trial has ended yet, or all have"""
    compiled: int = 0
    """binaries made in this run; those that the ledger had are not among them"""
    predicted: int = 0
    """configurations that the model gave a time for before they were proposed"""
    ended: str = "all trials done"
    notes: list[str] = field(default_factory=list)
    """what a person should know of the result"""
    usage: Usage | None = None
    """where the GPU's time went"""

    @property
    def done(self) -> int:
        """Trials of the total that have ended; a duplicate costs none."""
        return sum(self.outcomes.values()) - self.outcomes[Outcome.DUPLICATE]

    @property
    def correct(self) -> int:
        return sum(n for outcome, n in self.outcomes.items() if outcome.correct)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started


Reached = TypeVar("Reached", bound=Proposed, covariant=True)


@dataclass(frozen=True, slots=True)
class InFlight(Generic[Reached]):
    """One candidate on its way down the pipeline, as far as it came."""

    proposal: Proposal
    candidate: Reached

    @property
    def trial(self) -> int:
        return self.candidate.trial

    @property
    def occupancy(self) -> float | None:
        return self.candidate.occupancy if isinstance(self.candidate, Compiled) else None


class Coordinator:
    """Runs one search to its end.

    `on_change` is called after every event and at least every POLL_SECONDS, `on_finish` with each trial that ended.
    `compiler` and `predictor` run in a worker under `terms`. The judge is closed with the search.
    """

    def __init__(
        self, setting: Setting, ledger: Ledger, run: int, judge: Evaluator,
        on_change: Callable[[Progress], None], on_finish: Callable[[int], None],
        compiler: Callable[[Source, str], Binary | Rejection] = compile_task, terms: WorkerLimits = COMPILER_LIMITS,
        predictor: Callable[..., Estimated] = predict_task,
    ) -> None:  # fmt: skip
        self.setting, self.ledger, self.run = setting, ledger, run
        self._on_finish = on_finish
        self.progress = Progress(setting.trials)
        self._on_change = on_change
        self._adopted = self._adopt()
        left = [config for config, _ in self._adopted.values()]
        known_good = neighbouring_bests(ledger, setting)
        s = setting
        self._prior = sibling_prior(ledger, s.space, str(s.target.problem), s.target.gpu) if s.timed else None
        self._proposer = Proposer(s.space, s.sampler, s.seed, left, known_good, s.objectives, self._prior)
        self._comparing: set[Future[list[Baseline] | Rejection]] = set()
        self._compiling: dict[Future[Binary | Rejection], InFlight[Rendered]] = {}
        self._judging: dict[Future[Evaluation | Rejection], InFlight[Compiled]] = {}
        self._predicting: dict[Future[Estimated | Rejection], InFlight[Compiled]] = {}
        """of candidates that a GPU timed"""
        self._first_with: dict[str, int] = {}
        """source sha256 → the trial that rendered it first"""
        self._values: dict[int, tuple[float, ...] | None] = {}
        self._duplicates: dict[int, list[Proposal]] = {}
        """proposals whose source another trial, still under way, rendered first"""
        self._started = 0
        self._exhausted = False
        self._stop = False
        self._judge = judge
        self._pipeline = Pipeline(s.target, s.space, s.templates, judge, s.timed, s.fill)
        self._compilers = Compilers(s, ledger, compiler, predictor, terms)
        self._ahead: Lookahead | None = None
        if self._prior is not None and s.sampler in LED:
            self._ahead = Lookahead(s, self._prior, self._compilers)

    @property
    def invalid_proposals(self) -> int:
        return self._proposer.invalid

    @property
    def repeated_proposals(self) -> int:
        return self._proposer.repeated

    def stop(self) -> None:
        """Ends the search after the event under way; what is unfinished stays in the ledger for the next run."""
        self._stop = True

    def search(self) -> Progress:
        try:
            # while the device comes up and times these, the first candidates are compiled
            if baselines := self._judge.baselines():
                self._comparing.add(baselines)
            while not self._stop and (self._fill() or self._under_way()):
                self._look_ahead()
                awaited = self._under_way() | (self._ahead.under_way if self._ahead else set())
                finished, _ = wait(awaited, POLL_SECONDS, FIRST_COMPLETED)
                for future in finished:
                    self._advance(future)
                self.progress.stage = "" if self.progress.done else self._opening()
                self._on_change(self.progress)
            if not self._stop:
                self._hold_finals()
        finally:
            self.progress.usage = self._judge.usage(self.progress.elapsed)
            self._compilers.close()
            self._judge.close()
        if self._stop:
            self.progress.ended = "interrupted"
        elif self._exhausted:
            self.progress.ended = "every valid configuration was tried"
        return self.progress

    def _opening(self) -> str:
        return self._judge.opening() if self._judging or self._comparing else "compiling the first candidates"

    def _under_way(self) -> set[Future[Any]]:
        return {*self._comparing, *self._compiling, *self._judging, *self._predicting}

    def _advance(self, future: Future[Any]) -> None:
        if self._ahead and future in self._ahead.under_way:
            self._ahead.advance(future)
            self.progress.predicted = self._ahead.predicted
        if future in self._comparing:
            self._comparing.remove(future)
            for baseline in timed_baselines(future):
                self.ledger.record_baseline(self.run, baseline)
        elif future in self._compiling:
            self._on_compiled(self._compiling.pop(future), future.result())
        elif future in self._predicting:
            self._on_predicted(self._predicting.pop(future), future.result())
        elif future in self._judging:
            self._on_judged(self._judging.pop(future), future.result())

    def _adopt(self) -> dict[str, tuple[Config, int]]:
        """Takes over the trials that a killed run left unfinished; their configurations are proposed first."""
        s = self.setting
        left = self.ledger.unfinished(s.target.gpu.key, str(s.target.problem))
        fit = [c for c in left if s.space.contains(c.config)]
        got = set(self.ledger.adopt([c.trial for c in fit], self.run))
        return {config_key(c.config): (c.config, c.trial) for c in fit if c.trial in got}

    def _goes_on(self) -> bool:
        """Whether more candidates are wanted, now or later."""
        s = self.setting
        if self._exhausted or self._started >= s.trials or self._stop:
            return False
        if s.seconds is not None and self.progress.elapsed > s.seconds:
            self.progress.ended = "time is up"
            return False
        return True

    def _may_start(self) -> bool:
        if not self._goes_on():
            return False
        s = self.setting
        # one more than there are workers, so that none waits for the coordinator
        under_way = len(self._compiling) + len(self._judging)
        return len(self._compiling) <= s.jobs and under_way <= s.jobs + self._judge.ahead

    def _fill(self) -> bool:
        """Starts candidates while workers are free; whether any may still be started."""
        while self._may_start() and not self._must_predict_first():
            proposal = self._proposer.propose()
            if proposal is None:
                self._exhausted = True
                return False
            self._started += 1
            self._begin(proposal)
        return self._may_start()

    def _must_predict_first(self) -> bool:
        """Whether the sampler would choose blindly, while predictions are soon to be had; it waits but once."""
        return self._ahead is not None and not self._proposer.queued and self._ahead.opening()

    def _look_ahead(self) -> None:
        """Keeps workers busy that candidates leave idle."""
        if self._ahead is None or not self._goes_on():
            return
        best = self.progress.best.config if self.progress.best else None
        for_candidates = {*self._compiling, *self._predicting}
        while len(for_candidates | self._ahead.under_way) < self.setting.jobs and self._ahead.start(best):
            pass

    # ── the pipeline ────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, proposal: Proposal) -> None:
        s = self.setting
        _, trial = self._adopted.pop(proposal.key, (None, None))
        if trial is None:
            trial = self.ledger.add_candidate(
                self.run, str(s.target.problem), s.target.gpu.key, proposal.config, proposal.parents, proposal.operator
            )
        self._proposer.started(proposal, trial)
        if self._ahead:
            self._ahead.leave(proposal.config)
        proposed = Proposed(trial, proposal.config)
        rendered = self._pipeline.render(proposed)
        if isinstance(rendered, Rejection):
            self._reject(InFlight(proposal, proposed), rendered)
            return
        flight = InFlight(proposal, rendered)
        self.ledger.record_source(trial, rendered.source)
        first = self._first_with.setdefault(rendered.source.sha256, trial)
        if first != trial:
            self._duplicate(flight, first)
        elif rejection := self._pipeline.screen_launch(rendered):
            self._reject(flight, rejection)
        elif recorded := self._compilers.recorded(rendered.source):
            self._compiled(flight, recorded)
        else:
            self._compiling[self._compilers.compile(rendered.source)] = flight

    def _on_compiled(self, flight: InFlight[Rendered], result: Binary | Rejection) -> None:
        if isinstance(result, Rejection):
            self._reject(flight, result)
            return
        self.progress.compiled += 1
        self._compiled(flight, result)

    def _compiled(self, rendered: InFlight[Rendered], binary: Binary) -> None:
        compiled = self._pipeline.compiled(rendered.candidate, binary)
        flight = InFlight(rendered.proposal, compiled)
        self.ledger.record_binary(flight.trial, compiled.source, binary)
        if rejection := self._pipeline.screen_binary(compiled):
            self._reject(flight, rejection)
            return
        seed = seed_for(self.setting.seed, self.run, flight.trial)
        judged = self._pipeline.evaluate(compiled.contender, seed, self._compilers.workers)
        self._judging[judged] = flight

    def _on_judged(self, flight: InFlight[Compiled], result: Evaluation | Rejection) -> None:
        if self.setting.timed and isinstance(result, Evaluation) and result.figure:
            self._predict(flight)
        self._finish(flight, *record_evaluation(self.ledger, flight.trial, result))

    def _predict(self, flight: InFlight[Compiled]) -> None:
        """Has the model's figure put beside the measured one: how well predictions rank is known of every search."""
        self._predicting[self._compilers.predict(flight.candidate.contender)] = flight

    def _on_predicted(self, flight: InFlight[Compiled], result: Estimated | Rejection) -> None:
        if isinstance(result, Rejection) or result.figure is None:
            return
        self.ledger.record_measurement(flight.trial, result.figure)
        if result.by_model:
            assert self._prior is not None  # a search that times has one
            self._prior.predict(flight.proposal.config, result.figure.median_us)

    def _hold_finals(self) -> None:
        """Times the best of the ledger against each other, where the judge's figures gain by it."""
        s = self.setting
        future = hold_finals(self.ledger, self._judge, str(s.target.problem), s.target.gpu.key)
        if future is None:
            return
        self.progress.stage = "timing the best against each other"
        while not future.done() and not self._stop:
            wait((future,), POLL_SECONDS)
            self._on_change(self.progress)
        if future.done():
            self.progress.notes += record_finals(self.ledger, self.run, future.result())
            own = self.ledger.best(str(s.target.problem), s.target.gpu.key, top=1, run=self.run)
            self.progress.best = own[0] if own else None

    # ── the end of a candidate ──────────────────────────────────────────────────────────────────────────────────────

    def _duplicate(self, flight: InFlight[Proposed], first: int) -> None:
        """The same source under another setting: one of its knobs does nothing here.

        It shares that one's result and costs no trial: as many kernels are tried as were asked for.
        """
        self._started -= 1
        reason = f"renders the same source as trial {first}"
        self.ledger.finish(flight.trial, Outcome.DUPLICATE, reason, None, None)
        self._count(flight, Outcome.DUPLICATE)
        if first in self._values:
            self._proposer.tell(flight.proposal, self._values[first])
        else:
            self._duplicates.setdefault(first, []).append(flight.proposal)

    def _reject(self, flight: InFlight[Proposed], rejection: Rejection) -> None:
        self._finish(flight, rejection.outcome, rejection.reason)

    def _finish(
        self, flight: InFlight[Proposed], outcome: Outcome, reason: str | None, device: str | None = None
    ) -> None:
        self.ledger.finish(flight.trial, outcome, reason, flight.occupancy, device)
        found = self.ledger.candidate(flight.trial)
        values = self._values[flight.trial] = told(found, self.setting.objectives)
        for proposal in (flight.proposal, *self._duplicates.pop(flight.trial, ())):
            self._proposer.tell(proposal, values)
        self._count(flight, outcome)
        best = self.progress.best
        if outcome.ranked and (best is None or found.ranked_by.rank_key < best.ranked_by.rank_key):
            self.progress.best = found

    def _count(self, flight: InFlight[Proposed], outcome: Outcome) -> None:
        self.progress.outcomes[outcome] += 1
        self._on_finish(flight.trial)
        self._on_change(self.progress)
