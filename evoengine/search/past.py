"""The earlier trials of a run that a search resumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evoengine.ledger.read import Trial
from evoengine.ledger.store import Ledger
from evoengine.objectives import Objective, sampler_values
from evoengine.records import Config, Outcome, config_key
from evoengine.search.proposer import PastTrial


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
        if trial.trial in kills:
            retries[config_key(trial.config)] = _retry(trial, kills[trial.trial])
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


def _retry(trial: Trial, kills: int) -> Retry:
    return Retry(trial.trial, trial.config, trial.parents, trial.operator, kills)
