"""Ask a sampler for configurations until one is valid and new, and tell it each result.

A finished candidate is projected into the ledger's file for optuna-dashboard (`evoengine.ledger.optuna.study`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evoengine.ledger.runs import RETRIES
from evoengine.ledger.store import Ledger
from evoengine.objectives import DEFAULT, OBJECTIVES, Objective, sampler_values
from evoengine.records import Config, Outcome, config_key
from evoengine.search.samplers import make_sampler
from evoengine.search.samplers.prior import Prior, StartedSpace

FIRST_GENERATION = 10
"""valid points drawn at random after the space's start points, before the sampler itself proposes"""
MAX_REJECTED_PROPOSALS = 50
"""consecutive proposals that are invalid or known after which a random remaining point is drawn"""


@dataclass(frozen=True, slots=True)
class Proposal:
    config: Config
    key: str
    number: int = field(repr=False, compare=False)
    """by which the sampler knows it"""
    parents: tuple[int, ...] = ()
    operator: str | None = None


@dataclass(frozen=True, slots=True)
class PastTrial:
    """An earlier trial of a resumed run, for the sampler."""

    trial: int
    config: Config
    values: Sequence[float] | None
    """one per objective; None if it was rejected"""
    parents: tuple[int, ...] = ()
    operator: str | None = None


class Proposer:
    """Valid, new configurations, one at a time."""

    def __init__(
        self,
        space: StartedSpace,
        sampler: str,
        seed: int,
        retry: Sequence[Config] = (),
        known_good: Sequence[Config] = (),
        objectives: Sequence[Objective] = (OBJECTIVES[DEFAULT],),
        prior: Prior | None = None,
        past: Sequence[PastTrial] = (),
    ) -> None:
        """Create a proposer.

        `past` holds the run's earlier trials in order: the sampler learns from them, and none is proposed again.
        `retry` are configurations that were in progress when the run was killed, or that are asked for; they come
        first. `known_good` are the best of neighbouring problems or GPUs; they follow the space's start points. `prior`
        guides the evolutionary sampler; other samplers ignore it.
        """
        self.space = space
        self.invalid = 0
        self.repeated = 0
        # the values of a rejected trial, worse than all others, make the sampler leave the region
        self._penalty = tuple(o.penalty for o in objectives)
        self._sampler = make_sampler(sampler, space, _seed(seed, past), [o.direction for o in objectives], prior)
        self._rng = np.random.default_rng(seed)
        self._known: dict[str, tuple[float, ...] | None] = {}
        """values by configuration; None while it is in flight"""
        self._trials: dict[int, int] = {}
        """the sampler's number of a trial → the ledger's"""
        self._waiting: dict[str, list[int]] = {}
        """numbers of proposals of a configuration that is in flight"""
        self._queue: deque[tuple[Config, str]] = deque()
        """configurations ahead of the sampler's own proposals, with their operators"""
        self._recall(past)
        self._enqueue(retry, "retry")
        for config, operator in space.first_points(self._rng):
            self._enqueue([config], operator)
        self._enqueue(known_good, "ledger")
        if sampler != "evolution":  # which draws its own
            self._enqueue(space.sample(self._rng, min(FIRST_GENERATION, len(space))), "random")
        if past:  # only the first points are the same draws as before
            self._rng = np.random.default_rng(_seed(seed, past))

    def _recall(self, past: Sequence[PastTrial]) -> None:
        numbers: dict[int, int] = {}
        """the ledger's number of a trial → the sampler's"""
        for of in past:
            values = self._penalty if of.values is None else tuple(of.values)
            self._known[config_key(of.config)] = values
            if not self.space.contains(of.config):
                continue
            parents = [numbers[p] for p in of.parents if p in numbers]
            number = numbers[of.trial] = self._sampler.recall(of.config, values, parents, of.operator)
            self._trials[number] = of.trial

    def _enqueue(self, configs: Iterable[Config], operator: str) -> None:
        """Queue valid configurations that were not tried, behind those already queued."""
        self._queue += [(c, operator) for c in configs if config_key(c) not in self._known and self.space.contains(c)]

    @property
    def queued(self) -> bool:
        """Return whether queued points are left, which precede the sampler's own."""
        return bool(self._queue)

    def propose(self) -> Proposal | None:
        """Return the next valid configuration that this search has not tried, or None when the space is exhausted."""
        if len(self._known) >= len(self.space):
            return None
        for _ in range(MAX_REJECTED_PROPOSALS):
            proposal = self._ask()
            if self._accept(proposal):
                return proposal
        unseen = self._untried_config()
        if unseen is None:
            return None
        self._enqueue([unseen], "random")
        while not self._accept(proposal := self._ask()):
            pass
        return proposal

    def started(self, proposal: Proposal, trial: int) -> None:
        """Store the trial number of a proposal, by which later proposals refer to it as a parent."""
        self._trials[proposal.number] = trial

    def tell(self, proposal: Proposal, values: Sequence[float] | None) -> None:
        """Report a candidate's objective values, or None if it was rejected."""
        told = self._penalty if values is None else tuple(values)
        self._known[proposal.key] = told
        for number in (proposal.number, *self._waiting.pop(proposal.key, ())):
            self._sampler.tell(number, told)

    def _accept(self, proposal: Proposal) -> bool:
        if proposal.key in self._known:
            self.repeated += 1
            values = self._known[proposal.key]
            if values is None:
                self._waiting.setdefault(proposal.key, []).append(proposal.number)
            else:
                self._sampler.tell(proposal.number, values)
            return False
        if not self.space.contains(proposal.config):
            self.invalid += 1
            self._sampler.tell(proposal.number, self._penalty)
            return False
        self._known[proposal.key] = None
        return True

    def _ask(self) -> Proposal:
        config, operator = self._queue.popleft() if self._queue else (None, None)
        asked = self._sampler.ask(config)
        parents = tuple(self._trials[n] for n in asked.parents if n in self._trials)
        key = config_key(asked.config)
        return Proposal(asked.config, key, asked.number, parents, operator or asked.operator or "sampler")

    def _untried_config(self) -> Config | None:
        for config in self.space.sample(self._rng, 32):
            if config_key(config) not in self._known:
                return config
        return next((c for c in self.space.enumerate() if config_key(c) not in self._known), None)


def _seed(seed: int, past: Sequence[PastTrial]) -> int:
    """Return a seed that depends on the past, so that a continued run does not repeat its first draws."""
    return int(np.random.SeedSequence([seed, len(past)]).generate_state(1)[0]) if past else seed


# The earlier trials of a run that a search resumes.


@dataclass(frozen=True, slots=True)
class Retry:
    """A trial that was in flight then, and is retried."""

    trial: int
    config: Config
    parents: tuple[int, ...]
    operator: str | None
    kills: int
    """how often it was killed"""


@dataclass(frozen=True, slots=True)
class RunPast:
    """The past of a run; empty for a new one."""

    trials: Sequence[PastTrial] = ()
    values: Mapping[int, tuple[float, ...] | None] = field(default_factory=dict)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    first_with: Mapping[str, int] = field(default_factory=dict)
    """source sha256 → the trial that had it first"""
    taken_over: int = 0
    retries: Mapping[str, Retry] = field(default_factory=dict)
    """by the configuration's key, the most often killed first"""


def run_past(ledger: Ledger, run: int, objectives: Sequence[Objective]) -> RunPast:
    """Return the earlier trials of the run in their order."""
    kills = ledger.left_over(run)
    trials: list[PastTrial] = []
    values: dict[int, tuple[float, ...] | None] = {}
    outcomes: Counter[Outcome] = Counter()
    retries: dict[str, Retry] = {}
    known = list(ledger.trials(run=run, resources=True))
    origins = ledger.origins(run)
    first_with: dict[str, int] = {}
    for trial in known:
        sha256 = origins[trial.trial].source_sha256
        if trial.outcome and trial.outcome.judged and trial.outcome is not Outcome.DUPLICATE and sha256:
            first_with.setdefault(sha256, trial.trial)
    for trial in known:
        if kills.get(trial.trial, 0) > RETRIES:
            values[trial.trial] = None  # known without a result, so that the sampler does not propose it again
            trials.append(PastTrial(trial.trial, trial.config, None, trial.parents, trial.operator))
        elif trial.trial in kills:
            retry = Retry(trial.trial, trial.config, trial.parents, trial.operator, kills[trial.trial])
            retries[config_key(trial.config)] = retry
        if trial.outcome is None or not trial.outcome.judged:
            continue
        outcomes[trial.outcome] += 1
        if trial.outcome is not Outcome.DUPLICATE:
            values[trial.trial] = sampler_values(trial, objectives)
        elif (original := first_with.get(origins[trial.trial].source_sha256 or "")) in values:
            values[trial.trial] = values[original]
        else:  # its original was in flight and is retried
            continue
        trials.append(PastTrial(trial.trial, trial.config, values[trial.trial], trial.parents, trial.operator))
    taken_over = sum(origin.taken_from is not None for origin in origins.values())
    ordered = dict(sorted(retries.items(), key=lambda item: -item[1].kills))
    return RunPast(trials, values, outcomes, first_with, taken_over, ordered)
