"""Compare a ledger's own figures with the model.

Measured candidates are set beside predictions, and predictions of an older model are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from evoengine.accuracy.page import Row
from evoengine.errors import EvoengineError
from evoengine.ledger.store import Ledger
from evoengine.records import L2, Candidate, Clocks, Kind, Rejection
from evoengine.sass.clock import BOOST, SUSTAINED, Clock
from evoengine.sass.predict import MODEL_VERSION, Unpredictable
from evoengine.search.compilers import with_machine_code
from evoengine.search.targets import target_of
from evoengine.stages.predict import figure_of, predict_binary
from evoengine.terms import model_version

SET = "own measurements"
OnTrial = Callable[[int], None]


class NotPredicted(Exception):
    """A candidate that the model could not predict; the message names it and the reason."""


def measured_rows(ledger: Ledger, on_trial: OnTrial) -> Iterator[Row | NotPredicted]:
    """Yield each measured candidate beside its prediction at the clock and with the L2 that it was measured with."""
    for trial in _ranked(ledger, lambda c: c.ranked_by.kind is Kind.MEASURED):
        on_trial(trial)
        try:
            candidate = _with_code(ledger, trial)
            policy = candidate.ranked_by.policy
            sustained = policy is not None and policy.clocks is Clocks.SUSTAINED
            clock = Clock(SUSTAINED if sustained else BOOST)
            target = replace(target_of(ledger, candidate), clock=clock)
            cold = policy is None or policy.l2 is not L2.WARM
            p = predict_binary(target, candidate.contender, cold)
            us, named = candidate.ranked_by.median_us, (f"trial {trial}", candidate.problem, candidate.gpu)
            yield Row(SET, *named, str(clock), us, p.time_us, p.kernel_class, p.bound)
        except (Unpredictable, EvoengineError) as error:
            yield NotPredicted(f"trial {trial}: {error}")


def predict_again(ledger: Ledger, on_trial: OnTrial) -> Iterator[int | NotPredicted]:
    """Predict again each candidate whose figure is an older model's, and record the figure beside the old one."""
    for trial in _ranked(ledger, _by_older_model):
        on_trial(trial)
        try:
            candidate = _with_code(ledger, trial)
            target = target_of(ledger, candidate)
            figure = figure_of(predict_binary(target, candidate.contender), target.gpu, target.flops)
            ledger.record_measurement(trial, figure)
            yield trial
        except (Unpredictable, EvoengineError) as error:
            yield NotPredicted(f"trial {trial}: {error}")


def _by_older_model(candidate: Candidate) -> bool:
    version = model_version(candidate.ranked_by.terms)
    return version is not None and version < MODEL_VERSION


def _ranked(ledger: Ledger, wanted: Callable[[Candidate], bool]) -> list[int]:
    return [t.trial for t in ledger.trials(ranked=True) if t.measurement and wanted(ledger.candidate(t.trial))]


def _with_code(ledger: Ledger, trial: int) -> Candidate:
    """Raise Unpredictable where the candidate's machine code is gone and its source does not compile here."""
    found = with_machine_code(ledger, trial)
    if isinstance(found, Rejection):
        raise Unpredictable(f"its machine code is not kept, and its source does not compile here: {found.reason}")
    if found.binary is None:
        raise Unpredictable("it has no machine code")
    return found
