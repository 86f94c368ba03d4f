"""How well estimates rank what was measured: rank correlation, and what a short list would have missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evoengine.ledger.rows import most_trusted
from evoengine.ledger.store import Ledger
from evoengine.records import UNKNOWN_POLICY, Kind, Outcome
from evoengine.terms import FORMULA, model_of

SHORT_LIST = 10
"""number of best estimates to time; the regret is what timing only these would have cost"""


@dataclass(frozen=True, slots=True)
class Pair:
    """One candidate's last estimate beside its last measurement, both in TFLOPS.

    A prediction takes precedence over an estimate by formula.
    """

    trial: int
    problem: str
    gpu: str
    """for which it was compiled and estimated"""
    device: str
    """on which it was measured"""
    family: str
    estimated: float
    measured: float
    policy: str = str(UNKNOWN_POLICY)
    """by which it was measured"""
    model: str = FORMULA
    """the source of the estimate: the model of machine code, or a formula"""

    @property
    def figures(self) -> tuple[float, float]:
        return self.estimated, self.measured


@dataclass(frozen=True, slots=True)
class Agreement:
    candidates: int
    spearman: float | None
    """rank correlation, 1 for the same order; None for fewer than three pairs, or where one side is constant"""
    regret: float | None
    """by how much the best of all is faster than the best of the SHORT_LIST best estimates: 0.05 is 5 %; None where no
    more than those were measured"""


def measured_pairs(ledger: Ledger, problem: str | None = None, gpu: str | None = None) -> list[Pair]:
    """Return the ledger's candidates that have an estimate and a trusted measurement, filtered by problem and GPU."""
    pairs = []
    for c in ledger.candidates(problem=problem, gpu=gpu):
        if c.outcome is Outcome.MEASURED:
            estimate = most_trusted([m for m in ledger.measurements(c.trial) if m.kind is Kind.ESTIMATED])
            measured = c.measurement
            if estimate and measured and estimate.tflops is not None and measured.tflops is not None:
                of = (c.trial, c.problem, c.gpu, measured.device, str(c.config["family"]))
                pairs.append(
                    Pair(*of, estimate.tflops, measured.tflops, str(measured.policy), model_of(estimate.terms))
                )
    return pairs


def of_one_model(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs whose estimates were predicted from machine code; those by formula if there are no others."""
    predicted = [p for p in pairs if p.model != FORMULA]
    return predicted or list(pairs)


def rank_agreement(pairs: Sequence[tuple[float, float]]) -> Agreement:
    """Compute the agreement of (estimated, measured) pairs in which greater is faster."""
    if not pairs:
        return Agreement(0, None, None)
    ordered = sorted(pairs, key=lambda pair: -pair[0])
    measured = [m for _, m in ordered]
    regret = max(measured) / max(measured[:SHORT_LIST]) - 1 if len(measured) > SHORT_LIST else None
    spearman = None
    if len(pairs) > 2:
        from scipy.stats import spearmanr  # takes longer to load than the rest of the command

        sides = list(zip(*pairs, strict=True))
        if all(len(set(side)) > 1 for side in sides):
            spearman = float(spearmanr(*sides).statistic)
    return Agreement(len(pairs), spearman, regret)
