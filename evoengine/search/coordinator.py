"""The search: ask for configurations, keep the compilers and the GPU busy, tell what came out, record every stage.

One process owns the ledger and the sampler; workers only compute. A candidate walks the road of
`evoengine.stages` and stops at the first stage that rejects it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from evoengine.errors import UsageError
from evoengine.ledger.store import Ledger
from evoengine.objectives import told
from evoengine.records import (
    Binary,
    Candidate,
    Config,
    Contender,
    Outcome,
    Rejection,
    Source,
    config_key,
)
from evoengine.search.compilers import Compilers
from evoengine.search.finals import hold_finals, record_finals
from evoengine.search.judges import Judge, Usage, make_job, record_judged, seed_for, timed_baselines
from evoengine.search.lookahead import Lookahead
from evoengine.search.proposer import Proposal, Proposer
from evoengine.search.samplers import LED
from evoengine.search.setting import Setting
from evoengine.search.siblings import sibling_prior
from evoengine.search.workers import COMPILER_TERMS, Terms
from evoengine.stages.pipeline import Judged, compile_task, predict_task
from evoengine.stages.predict import Estimated
from evoengine.stages.render import render
from evoengine.stages.screen import screen_binary, screen_launch

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


@dataclass(slots=True)
class Walk:
    """One candidate on its way down the road."""

    trial: int
    proposal: Proposal
    source: Source | None = None
    binary: Binary | None = None
    occupancy: float | None = None


class Coordinator:
    """Runs one search to its end.

    `on_change` is called after every event and at least every POLL_SECONDS, `on_finish` with each trial that ended.
    `compiler` and `predictor` run in a worker under `terms`. The judge is closed with the search.
    """

    def __init__(
        self, setting: Setting, ledger: Ledger, run: int, judge: Judge,
        on_change: Callable[[Progress], None], on_finish: Callable[[int], None],
        compiler: Callable[[Source, str], Binary | Rejection] = compile_task, terms: Terms = COMPILER_TERMS,
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
        self._comparing: set[Future] = set()
        self._compiling: dict[Future, Walk] = {}
        self._judging: dict[Future, Walk] = {}
        self._predicting: dict[Future, Walk] = {}
        """of candidates that a GPU timed"""
        self._first_with: dict[str, int] = {}
        """source sha256 → the trial that rendered it first"""
        self._values: dict[int, tuple[float, ...] | None] = {}
        self._twins: dict[int, list[Proposal]] = {}
        """proposals whose source another trial, still under way, rendered first"""
        self._started = 0
        self._exhausted = False
        self._stop = False
        self._judge = judge
        self._compilers = Compilers(s, ledger, compiler, predictor, terms)
        leads = self._prior is not None and s.sampler in LED
        self._ahead = Lookahead(s, self._prior, self._compilers) if leads else None

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
            self._comparing = {self._judge.baselines()} - {None}
            while not self._stop and (self._fill() or self._under_way()):
                self._look_ahead()
                awaited = self._under_way() | (self._ahead.under_way if self._ahead else set())
                finished, _ = wait(awaited, POLL_SECONDS, FIRST_COMPLETED)
                for future in finished:
                    self._advance(future)
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

    def _under_way(self) -> set[Future]:
        return {*self._comparing, *self._compiling, *self._judging, *self._predicting}

    def _advance(self, future: Future) -> None:
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

    # ── the road ────────────────────────────────────────────────────────────────────────────────────────────────────

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
        walk = Walk(trial, proposal)
        try:
            walk.source = render(s.target, s.space, proposal.config, s.templates)
        except UsageError as error:
            self._reject(walk, Rejection(Outcome.UNCOMPILABLE, str(error)))
            return
        self.ledger.record_source(trial, walk.source)
        twin = self._first_with.setdefault(walk.source.sha256, trial)
        if twin != trial:
            self._duplicate(walk, twin)
        elif why := screen_launch(walk.source.launch, s.target.gpu):
            self._reject(walk, Rejection(Outcome.SCREENED, why))
        elif recorded := self._compilers.recorded(walk.source):
            self._compiled(walk, recorded)
        else:
            self._compiling[self._compilers.compile(walk.source)] = walk

    def _on_compiled(self, walk: Walk, result: Binary | Rejection) -> None:
        if isinstance(result, Rejection):
            self._reject(walk, result)
            return
        self.progress.compiled += 1
        self._compiled(walk, result)

    def _compiled(self, walk: Walk, binary: Binary) -> None:
        s, launch = self.setting, walk.source.launch
        walk.binary = binary
        self.ledger.record_binary(walk.trial, walk.source, binary)
        walk.occupancy = s.target.gpu.occupancy(launch.threads, binary.registers, binary.shared_bytes + launch.shared_bytes)
        if why := screen_binary(binary, launch, s.target.gpu, s.space.cost(walk.proposal.config), s.timed):
            self._reject(walk, Rejection(Outcome.SCREENED, why))
            return
        contender = Contender(walk.trial, walk.source, binary, walk.proposal.config)
        job = make_job(s.space, s.target, contender, seed_for(s.seed, self.run, walk.trial))
        self._judging[self._judge.submit(job, self._compilers.workers)] = walk

    def _on_judged(self, walk: Walk, result: Judged | Rejection) -> None:
        if self.setting.timed and isinstance(result, Judged) and result.figure:
            self._predict(walk)
        self._finish(walk, *record_judged(self.ledger, walk.trial, result))

    def _predict(self, walk: Walk) -> None:
        """Has the model's figure put beside the measured one: how well predictions rank is known of every search."""
        contender = Contender(walk.trial, walk.source, walk.binary, walk.proposal.config)
        self._predicting[self._compilers.predict(contender)] = walk

    def _on_predicted(self, walk: Walk, result: Estimated | Rejection) -> None:
        if isinstance(result, Rejection):
            return
        if result.figure:
            self.ledger.record_measurement(walk.trial, result.figure)
        if result.by_model:
            self._prior.predict(walk.proposal.config, result.figure.median_us)

    def _hold_finals(self) -> None:
        """Times the best of the ledger against each other, where the judge's figures gain by it."""
        s = self.setting
        future = hold_finals(self.ledger, self._judge, str(s.target.problem), s.target.gpu.key)
        if future is None:
            return
        while not future.done() and not self._stop:
            wait((future,), POLL_SECONDS)
            self._on_change(self.progress)
        if future.done():
            self.progress.notes += record_finals(self.ledger, self.run, future.result())
            own = self.ledger.best(str(s.target.problem), s.target.gpu.key, top=1, run=self.run)
            self.progress.best = own[0] if own else None

    # ── the end of a candidate ──────────────────────────────────────────────────────────────────────────────────────

    def _duplicate(self, walk: Walk, twin: int) -> None:
        """The same source under another setting: one of its knobs does nothing here.

        It shares its twin's result and costs no trial: as many kernels are tried as were asked for.
        """
        self._started -= 1
        reason = f"renders the same source as trial {twin}"
        self.ledger.finish(walk.trial, Outcome.DUPLICATE, reason, None, None)
        self._count(walk, Outcome.DUPLICATE)
        if twin in self._values:
            self._proposer.tell(walk.proposal, self._values[twin])
        else:
            self._twins.setdefault(twin, []).append(walk.proposal)

    def _reject(self, walk: Walk, rejection: Rejection) -> None:
        self._finish(walk, rejection.outcome, rejection.reason)

    def _finish(self, walk: Walk, outcome: Outcome, reason: str | None, device: str | None = None) -> None:
        self.ledger.finish(walk.trial, outcome, reason, walk.occupancy, device)
        found = self.ledger.candidate(walk.trial)
        values = self._values[walk.trial] = told(found, self.setting.objectives)
        for proposal in (walk.proposal, *self._twins.pop(walk.trial, ())):
            self._proposer.tell(proposal, values)
        self._count(walk, outcome)
        best = self.progress.best
        if outcome.ranked and (best is None or found.measurement.rank_key < best.measurement.rank_key):
            self.progress.best = found

    def _count(self, walk: Walk, outcome: Outcome) -> None:
        self.progress.outcomes[outcome] += 1
        self._on_finish(walk.trial)
        self._on_change(self.progress)
