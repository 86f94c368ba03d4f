"""The search loop: propose configurations, keep compilers and GPU busy, report results, record every stage.

One process owns the ledger and the sampler; workers only compute. A candidate passes down the pipeline and stops at the
first stage that rejects it. Candidates that begin or end together are written in one transaction and reported after its
commit, so that one coordinator can feed many GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from evoengine.ledger.claims import Claim
from evoengine.ledger.store import Ledger, NewCandidate
from evoengine.objectives import sampler_values
from evoengine.records import AnyBaseline, Binary, Candidate, Judged, Kind, Outcome, Plans, Rejection, Source
from evoengine.sandbox.worker_process import COMPILER_LIMITS, WorkerLimits
from evoengine.sandbox.workers import WorkerPool, Workers
from evoengine.search.compilers import Compilers
from evoengine.search.evaluators import End, Evaluator, end_of, found_baselines, said_of_baselines, seed_for
from evoengine.search.finishing import FINALISTS, Finisher, GateTime, Lead, record_finals, submit_finals
from evoengine.search.identity import Identity, Setting
from evoengine.search.lookahead import Lookahead
from evoengine.search.neighbours import OtherSearches, known_figures, neighbouring_bests
from evoengine.search.pipeline import Compiled, Pipeline, Proposed, Rendered
from evoengine.search.progress import Failures, OnChange, Progress
from evoengine.search.proposer import Proposal, Proposer, run_past
from evoengine.search.samplers import SAMPLERS
from evoengine.search.samplers.prior import Prior
from evoengine.stages.predict import Estimated
from evoengine.stages.tasks import Evaluation, compile_task, predict_task

POLL_SECONDS = 0.1
"""interval at which the display is refreshed and a request to stop is noticed while nothing finishes"""
MAX_BATCH = 8
"""candidates that begin in one transaction at most, so that the first does not wait long for the others"""


class Coordinator:
    """Runs one search to its end.

    `on_change` is called after every event and at least every POLL_SECONDS, `on_finish` with each trial that ended.
    `compiler` and `predictor` run in a worker under `limits`, in `setting.jobs` processes here unless `workers` are
    given. Judge and workers are closed with the search.
    """

    def __init__(
        self,
        setting: Setting,
        ledger: Ledger,
        run: int,
        judge: Evaluator,
        on_change: OnChange,
        on_finish: Callable[[int], None],
        compiler: Callable[[Source, str], Binary | Rejection] = compile_task,
        limits: WorkerLimits = COMPILER_LIMITS,
        predictor: Callable[..., Estimated] = predict_task,
        workers: Workers | None = None,
        identity: Identity | None = None,
        spent: float = 0.0,
    ) -> None:
        """Create the coordinator of a run. A `run` with trials continues; `spent` are the seconds that it took before.

        With an `identity`, all searches of the ledger that have one evaluate each kernel only once.
        """
        self.setting, self.ledger, self.run = setting, ledger, run
        self._judge, self._identity = judge, identity
        self._on_change, self._on_finish = on_change, on_finish
        past = run_past(ledger, run, setting.objectives)
        self.progress = Progress(setting.trials, outcomes=past.outcomes, taken_over=past.taken_over, spent=spent)
        self._started = self.progress.done
        self._exhausted = self._stop = False
        self._retries = dict(past.retries)
        self._exclusive = {key for key, retry in self._retries.items() if retry.kills}
        """configurations that were killed before: each runs alone, since it may be the cause"""
        self._first_with = dict(past.first_with)
        """source sha256 → the trial that rendered it first"""
        self._values = dict(past.values)
        self._duplicates: dict[int, list[Proposal]] = {}
        """proposals whose source another trial, still in flight, rendered first"""
        self._pending = Pending()
        self._unreported: list[int] = []
        """trials whose end is written but not yet reported"""
        self._other_searches, self._failures, self._gate_time = OtherSearches(ledger), Failures(), GateTime()
        s = setting
        self._prior: Prior | None = None
        if s.timed:
            self._prior, said = known_figures(ledger, s)
            self.progress.notes += said
        left = [*(retry.config for retry in self._retries.values()), *s.first]
        known_good = neighbouring_bests(ledger, s)
        self.proposer = Proposer(s.space, s.sampler, s.seed, left, known_good, s.objectives, self._prior, past.trials)
        self._pipeline = Pipeline(s.target, s.space, s.templates, judge, s.timed, s.fill)
        workers = workers or WorkerPool(s.jobs, limits)
        self._compilers = Compilers(s, ledger, compiler, predictor, workers, limits.seconds)
        self._finisher = self._make_finisher()
        self._lead = Lead()
        guiding = self._prior if SAMPLERS[s.sampler].prior_guided else None
        self._lookahead = None if guiding is None else Lookahead(s, guiding, self._compilers)

    def _make_finisher(self) -> Finisher:
        s = self.setting
        return Finisher(
            self.ledger,
            self.run,
            s.target,
            s.seed,
            self._judge,
            self._compilers.workers,
            lambda: not self._stop and self._has_time(),
            self._on_stage,
            self._on_finished,
            {self.run: s.space},
        )

    def stop(self) -> None:
        """Stop after the current event. What is unfinished stays in the ledger for the next run."""
        self._stop = True

    def search(self) -> Progress:
        try:
            # the first candidates are compiled while the device starts and times these
            if baselines := self._judge.baselines():
                self._pending.baselines.add(baselines)
            self.progress.best = self._best()
            self._lead = self._find_lead()
            while not self._stop and (self._fill() or self._pending.futures):
                self._start_lookahead()
                self._other_searches.poll()
                awaited = self._pending.futures | (self._lookahead.in_flight if self._lookahead else set())
                finished, _ = wait(awaited, POLL_SECONDS, FIRST_COMPLETED)
                with self.ledger.database.together():
                    for future in finished:
                        self._advance(future)
                self._report_ended()
                self._judge_lead()
                self.progress.stage = "" if self.progress.done else self._first_stage()
                self._on_change(self.progress)
            if not self._stop:
                self._finish_gate()
            if not self._stop:
                self._submit_finals()
            if self._stop and not self.progress.correct:
                self._judge_lead_of_stopped()
        finally:
            self.progress.usage = self._judge.usage(self.progress.elapsed)
            self._judge.close()
            self._compilers.close()
        if not self.progress.correct:
            self.progress.notes += self._failures.commonest()
        if self._stop:
            self.progress.ended = "interrupted"
        elif self._exhausted:
            self.progress.ended = "every valid configuration was tried"
        return self.progress

    def _first_stage(self) -> str:
        return (
            self._judge.first_stage()
            if self._pending.judging or self._pending.baselines
            else "compiling the first candidates"
        )

    def _advance(self, future: Future[Any]) -> None:
        if self._lookahead and future in self._lookahead.in_flight:
            self._lookahead.advance(future)
            self.progress.predicted = self._lookahead.predicted
        if future in self._pending.baselines:
            self._pending.baselines.remove(future)
            for baseline in (found := found_baselines(future)):
                self.ledger.record_baseline(self.run, baseline)
            self.progress.notes.append(said_of_baselines(found))
        elif future in self._pending.compiling:
            self._on_compiled(self._pending.compiling.pop(future), future.result())
        elif future in self._pending.predicting:
            self._on_predicted(self._pending.predicting.pop(future), future.result())
        elif future in self._pending.judging:
            self._on_judged(self._pending.judging.pop(future), future.result())
        elif future in self._pending.leading:
            self._on_lead_judged(self._pending.leading.pop(future), future.result())
        elif future in self._pending.awaiting:
            flight, key = self._pending.awaiting.pop(future)
            self._dispatch(flight, key, self.ledger.claims.claim(key, flight.trial))

    def _wants_more(self) -> bool:
        """Return whether more candidates are wanted, now or later."""
        s = self.setting
        if self._exhausted or self._started >= s.trials or self._stop:
            return False
        if self._failures.stop_reason():
            self.progress.ended = f"stopped: {self._failures.stop_reason()}"
            return False
        if not self._has_time(self._gate_time.to_finish(self.progress.outcomes[Outcome.UNFINISHED], s.jobs)):
            self.progress.ended = "time is up"
            return False
        return True

    def _has_time(self, reserved: float = 0.0) -> bool:
        s, progress = self.setting, self.progress
        return s.seconds is None or progress.spent + progress.elapsed + reserved <= s.seconds

    def _may_start(self, rendered: int = 0) -> bool:
        """Return whether another candidate fits, with `rendered` candidates pending."""
        if not self._wants_more():
            return False
        s = self.setting
        # one more than there are workers, so that none waits for the coordinator
        pending = self._pending
        compiling = len(pending.compiling) + rendered
        in_flight = compiling + len(pending.judging) + len(pending.leading) + len(pending.awaiting)
        if self._exclusive:
            return not in_flight
        return compiling <= s.jobs and in_flight <= s.jobs + self._judge.queue_depth

    def _fill(self) -> bool:
        """Start candidates while workers are free; return whether any may still be started."""
        while some := self._render_some():
            with self.ledger.database.together():
                begun = [self._begin(proposal, rendered) for proposal, rendered in some]
            # commit the rows first: a killed search must leave one for each candidate in flight
            with self.ledger.database.together():
                for claimed in filter(None, begun):
                    self._dispatch(*claimed)
            self._report_ended()
        return self._may_start()

    def _render_some(self) -> list[tuple[Proposal, Rendered | Rejection]]:
        """Render the next proposals before the ledger is written.

        A template may take long, and other processes write meanwhile.
        """
        some: list[tuple[Proposal, Rendered | Rejection]] = []
        while len(some) < MAX_BATCH and self._may_start(len(some)) and not self._must_predict_first():
            proposal = self.proposer.propose()
            if proposal is None:
                self._exhausted = True
                break
            self._started += 1
            if retry := self._retries.get(proposal.key):
                proposal = replace(proposal, parents=retry.parents, operator=retry.operator)
            if self._lookahead:
                self._lookahead.discard(proposal.config)
            some.append((proposal, self._pipeline.render(Proposed(0, proposal.config))))
        return some

    def _must_predict_first(self) -> bool:
        """Return whether the first pick should wait for predictions that will be available soon. It waits only once."""
        return self._lookahead is not None and not self.proposer.queued and self._lookahead.must_wait()

    def _start_lookahead(self) -> None:
        """Give idle workers likely proposals to predict."""
        if self._lookahead is None or self._exclusive or not self._wants_more():
            return
        best = self.progress.best.config if self.progress.best else None
        for_candidates = {*self._pending.compiling, *self._pending.predicting}
        while len(for_candidates | self._lookahead.in_flight) < self.setting.jobs and self._lookahead.start(best):
            pass

    # ── the pipeline ────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(
        self, proposal: Proposal, rendered: Rendered | Rejection
    ) -> tuple[InFlight[Rendered], str | None, Claim] | None:
        """Insert a proposal into the ledger; return the arguments of `_dispatch`, or None if it has ended."""
        if isinstance(rendered, Rejection):
            trial = self.ledger.add_candidate(*self._row(proposal, None))
            self.proposer.started(proposal, trial)
            self._finish(InFlight(proposal, Proposed(trial, proposal.config)), end_of(rendered))
            return None
        source = rendered.source
        rejection = self._pipeline.screen_launch(rendered)
        key, plans = None, None
        if rejection or source.sha256 in self._first_with or self._identity is None:
            trial = self.ledger.add_candidate(*self._row(proposal, source))
            claim = Claim(trial, False)
        else:
            plans = self._pipeline.plans(proposal.config)
            key = self._identity.key(source, proposal.config, plans)
            trial, claim = self.ledger.add_claiming(self._row(proposal, source), key, self.setting.remeasure)
        self.proposer.started(proposal, trial)
        flight = InFlight(proposal, Rendered(trial, proposal.config, source), plans)
        first = self._first_with.setdefault(source.sha256, trial)
        if first != trial:
            self._duplicate(flight, first)
        elif rejection:
            self._finish(flight, end_of(rejection))
        else:
            return flight, key, claim
        return None

    def _row(self, proposal: Proposal, source: Source | None) -> NewCandidate:
        target, p = self.setting.target, proposal
        retry = self._retries.get(p.key)
        of_target = self.run, str(target.problem), target.gpu.key
        return *of_target, p.config, p.parents, p.operator, source, retry.trial if retry else None

    def _dispatch(self, flight: InFlight[Rendered], key: str | None, claim: Claim) -> None:
        """Compile a rendered candidate, or copy the outcome of another trial that held the claim."""
        if claim.trial != flight.trial:
            assert key is not None  # nothing else is claimed
            if claim.known:
                self._take_over(flight, key, claim.trial)
            else:
                self._pending.awaiting[self._other_searches.wait_for(claim.trial)] = flight, key
        elif recorded := self._compilers.recorded(flight.candidate.source):
            self._compiled(flight, recorded)
        else:
            self._pending.compiling[self._compilers.compile(flight.candidate.source)] = flight

    def _take_over(self, flight: InFlight[Rendered], key: str, original: int) -> None:
        outcome = self.ledger.claims.take_over(key, original, flight.trial, timed=self.setting.timed)
        self.progress.taken_over += 1
        self._ended(flight, outcome, self.ledger.candidate(flight.trial))
        predicted = [m for m in self.ledger.measurements(flight.trial) if m.kind is Kind.ESTIMATED and not m.by_formula]
        if self._prior is not None and predicted:
            self._prior.predict(flight.proposal.config, predicted[-1].median_us)

    def _on_compiled(self, flight: InFlight[Rendered], result: Binary | Rejection) -> None:
        if isinstance(result, Rejection):
            self._finish(flight, end_of(result))
            return
        self.progress.compiled += 1
        self._compiled(flight, result)

    def _compiled(self, rendered: InFlight[Rendered], binary: Binary) -> None:
        compiled = self._pipeline.compiled(rendered.candidate, binary)
        flight = InFlight(rendered.proposal, compiled)
        self.ledger.record_binary(flight.trial, compiled.source, binary)
        if rejection := self._pipeline.screen_binary(compiled):
            self._finish(flight, end_of(rejection))
            return
        seed = seed_for(self.setting.seed, self.run, flight.trial)
        whole = len(self.setting.objectives) > 1  # a prediction does not tell what leads in one of several objectives
        judged = self._pipeline.evaluate(compiled.contender, seed, self._compilers.workers, rendered.plans, whole)
        self._pending.judging[judged] = flight

    def _on_judged(self, flight: InFlight[Compiled], result: Evaluation | Rejection) -> None:
        if isinstance(result, Evaluation):
            self._gate_time.add(result.verdicts, result.whole)
        if self.setting.timed and isinstance(result, Evaluation) and result.figure:
            self._predict(flight)
        self._finish(flight, end_of(result))

    def _predict(self, flight: InFlight[Compiled]) -> None:
        """Predict a measured candidate as well, so that every search knows how well predictions rank."""
        self._pending.predicting[self._compilers.predict(flight.candidate.contender)] = flight

    def _on_predicted(self, flight: InFlight[Compiled], result: Estimated | Rejection) -> None:
        if isinstance(result, Rejection) or result.figure is None:
            return
        self.ledger.record_measurement(flight.trial, result.figure)
        if result.by_model:
            assert self._prior is not None  # a search that times has one
            self._prior.predict(flight.proposal.config, result.figure.median_us)

    # ── the gate finished ───────────────────────────────────────────────────────────────────────────────────────────

    def _judge_lead(self) -> None:
        """Finish the gate of a candidate that has led for a while, so that a killed search leaves a verified best."""
        if self.setting.timed or self._exclusive or not self._lead.due or not self._has_time():
            return
        assert self._lead.trial is not None  # it is due
        self._lead.finished = True
        begun = self._finisher.begin(self._lead.trial)
        if not isinstance(begun, Rejection):
            future, candidate = begun
            self._pending.leading[future] = candidate

    def _judge_lead_of_stopped(self) -> None:
        """Finish the gate for the leader of a search that was stopped before any candidate passed it whole."""
        if self.setting.timed or self._lead.trial is None or self._lead.finished:
            return
        begun = self._finisher.begin(self._lead.trial)
        if not isinstance(begun, Rejection):
            future, candidate = begun
            self._on_stage("finishing the gate of the best")
            self._on_lead_judged(candidate, future.result())

    def _on_lead_judged(self, candidate: Candidate, result: Judged | Rejection) -> None:
        if isinstance(result, Judged):
            self._gate_time.add(result.verdicts, result.whole)
        self._finisher.end(candidate, result)
        self.progress.best = self._best()
        self._lead = self._find_lead()

    def _find_lead(self) -> Lead:
        """Return the best prediction that the run has in the ledger and no judge has refuted."""
        found = next(iter(self._finisher.ranked_predictions()), None)
        if found is None or found.measurement is None:
            return Lead()
        return Lead(found.trial, found.measurement.rank_key, found.outcome is not Outcome.UNFINISHED)

    def _finish_gate(self) -> None:
        """Finish the gate of what the ranking shows, or of the finalists, while there is time."""
        finisher = self._finisher
        said = finisher.finish_finalists(FINALISTS) if self.setting.timed else finisher.finish_ranking()
        self.progress.notes += said
        self.progress.best = self._best()

    def _on_stage(self, stage: str) -> None:
        self.progress.stage = stage
        self._on_change(self.progress)

    def _on_finished(self, before: Candidate, outcome: Outcome) -> None:
        """Count a candidate whose gate was finished by its new outcome."""
        if before.run == self.run and before.outcome is not None:
            self.progress.outcomes[before.outcome] -= 1
            self.progress.outcomes[outcome] += 1

    def _submit_finals(self) -> None:
        """Time the best candidates of the ledger against each other, if the evaluator times them."""
        s = self.setting
        future = submit_finals(self.ledger, self._judge, str(s.target.problem), s.target.gpu.key)
        if future is None:
            return
        self.progress.stage = "timing the best against each other"
        while not future.done() and not self._stop:
            wait((future,), POLL_SECONDS)
            self._on_change(self.progress)
        if future.done():
            self.progress.notes += record_finals(self.ledger, self.run, future.result())
            self.progress.best = self._best()

    # ── the end of a candidate ──────────────────────────────────────────────────────────────────────────────────────

    def _duplicate(self, flight: InFlight[Proposed], first: int) -> None:
        """Record a proposal whose source equals that of trial `first`: one of its knobs has no effect here.

        It copies that trial's result and does not count towards the number of trials.
        """
        self._started -= 1
        reason = f"renders the same source as trial {first}"
        self.ledger.finish(flight.trial, Outcome.DUPLICATE, reason, None, None)
        self._count(flight, Outcome.DUPLICATE)
        if first in self._values:
            self.proposer.tell(flight.proposal, self._values[first])
        else:
            self._duplicates.setdefault(first, []).append(flight.proposal)

    def _finish(self, flight: InFlight[Proposed], end: End) -> None:
        proposal, ended = flight.proposal, self._pipeline.ended(flight.candidate, end, self.run)
        self.ledger.finish(
            flight.trial, end.outcome, end.reason, ended.occupancy, end.device, end.verdicts, end.figure, end.evidence
        )
        self._ended(flight, end.outcome, replace(ended, parents=proposal.parents, operator=proposal.operator))

    def _ended(self, flight: InFlight[Proposed], outcome: Outcome, found: Candidate) -> None:
        values = self._values[flight.trial] = sampler_values(found, self.setting.objectives)
        for proposal in (flight.proposal, *self._duplicates.pop(flight.trial, ())):
            self.proposer.tell(proposal, values)
        self._count(flight, outcome)
        self._failures.add(flight.trial, outcome, found.reason)
        best = self.progress.best
        if outcome.ranked and (best is None or found.ranked_by.rank_key < best.ranked_by.rank_key):
            self.progress.best = found
        self._lead.trials_behind += 1
        if outcome.has_figure and found.ranked_by.rank_key < self._lead.rank_key:
            self._lead = Lead(found.trial, found.ranked_by.rank_key, outcome is not Outcome.UNFINISHED)

    def _best(self) -> Candidate | None:
        """Return the best of the run's own trials."""
        target = self.setting.target
        own = self.ledger.best(str(target.problem), target.gpu.key, top=1, run=self.run)
        return own[0] if own else None

    def _count(self, flight: InFlight[Proposed], outcome: Outcome) -> None:
        self._exclusive.discard(flight.proposal.key)
        self.progress.outcomes[outcome] += 1
        self._unreported.append(flight.trial)

    def _report_ended(self) -> None:
        """Report trials whose outcome is committed."""
        for trial in self._unreported:
            self._on_finish(trial)
            self._on_change(self.progress)
        self._unreported.clear()


# Candidates in flight: their proposals, the furthest stage that each reached, and what is awaited for them.

Reached = TypeVar("Reached", bound=Proposed, covariant=True)


@dataclass(frozen=True, slots=True)
class InFlight(Generic[Reached]):
    proposal: Proposal
    candidate: Reached
    plans: Plans | None = None
    """the gate's cases, if they were computed before"""

    @property
    def trial(self) -> int:
        return self.candidate.trial


@dataclass(slots=True)
class Pending:
    """The futures that a search awaits, by the task, each with the candidate that it is for."""

    baselines: set[Future[list[AnyBaseline] | Rejection]] = field(default_factory=set)
    compiling: dict[Future[Binary | Rejection], InFlight[Rendered]] = field(default_factory=dict)
    judging: dict[Future[Evaluation | Rejection], InFlight[Compiled]] = field(default_factory=dict)
    leading: dict[Future[Judged | Rejection], Candidate] = field(default_factory=dict)
    """candidates that have led for a while, whose gate is being finished"""
    predicting: dict[Future[Estimated | Rejection], InFlight[Compiled]] = field(default_factory=dict)
    """predictions of candidates that a GPU timed"""
    awaiting: dict[Future[None], tuple[InFlight[Rendered], str]] = field(default_factory=dict)
    """candidates that another search evaluates, with the key of the evaluation"""

    @property
    def futures(self) -> set[Future[Any]]:
        return {*self.baselines, *self.compiling, *self.judging, *self.leading, *self.predicting, *self.awaiting}
