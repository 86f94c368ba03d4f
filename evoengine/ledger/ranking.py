"""Which of several figures counts more: kinds, devices and policies are never mixed, and finals decide between their
finalists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from evoengine.ledger.rows import KIND_PRECEDENCE
from evoengine.records import Clocks, Kind, Policy
from evoengine.terms import FORMULA, model_of

HERE = 0
"""stands for all runs of this ledger; those are numbered from 1"""


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the measurements, as far as ranking needs it; a higher id was taken later."""

    id: int
    trial: int
    kind: Kind
    us: float
    """the time that is compared"""
    suspect: str | None
    terms: Mapping[str, float]
    device: str = ""
    run: int = HERE
    """of the trial"""
    policy: Policy | None = None
    gate_version: int = 0
    """that the trial was judged by; 0 of one from before versions were kept"""
    kernel: str = ""
    """of the trial's run, where that is a kernel that somebody brought"""

    @property
    def speed(self) -> float:
        """runs per second"""
        return 1e6 / self.us

    @property
    def precedence(self) -> tuple[int, bool, bool]:
        """Less is trusted more; figures of back-to-back runs stand beside the others, and count where there are
        none."""
        sustained = self.policy is not None and self.policy.clocks is Clocks.SUSTAINED
        return KIND_PRECEDENCE.index(self.kind), self.by_formula, sustained

    @property
    def by_formula(self) -> bool:
        return self.kind is Kind.ESTIMATED and model_of(self.terms) == FORMULA

    def comparable(self, other: Figure) -> bool:
        return self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        return self.kind, self.device, self.policy, self.gate_version, self.kernel


def ranked(figures: Iterable[Figure]) -> list[int]:
    """Trials best first, by figures of the most trusted kind that any has; `figures` come oldest first.

    Only those of the device and the policy that gave the last such figure count: one name (h100) stands for GPUs of
    unlike speed, and the same kernel takes another time with a warm L2 or launched from a graph.

    A candidate counts by its last figure of its own most trusted kind, and not at all where that one is suspect. The
    finalists of the last finals keep the places they won there: what was timed before, and alone, is behind them.
    Finals of an imported run say so of that run alone: nobody timed its finalists against what this ledger had.

    Behind predictions come estimates by formula, of what the model could not read, in an order of their own.
    """
    trusted = standing(figures)
    if not trusted:
        return []
    last = min(trusted, key=lambda f: (f.precedence, -f.id))
    order = in_order([f for f in trusted if f.comparable(last)])
    if last.kind is Kind.ESTIMATED and not last.by_formula:
        same = (last.gate_version, last.kernel)
        order += in_order([f for f in trusted if f.by_formula and (f.gate_version, f.kernel) == same])
    return [trial for trial, _ in order]


def standing(figures: Iterable[Figure]) -> list[Figure]:
    """Of each trial the last figure of its own most trusted kind, if that is not suspect; `figures` come oldest
    first."""
    held: dict[int, Figure] = {}
    for figure in figures:
        if figure.trial not in held or figure.precedence <= held[figure.trial].precedence:
            held[figure.trial] = figure
    return [f for f in held.values() if not f.suspect]


def in_order(figures: Sequence[Figure]) -> list[tuple[int, float]]:
    """Trials best first, each with the speed it counts by: that of its figure, which finals may raise for a finalist
    and lower for others. Of equals the older trial is first.

    `figures` may be compared, and are one of a trial. Those left out that are in no finals change nothing between the
    others.
    """
    counted = {f.trial: f.speed for f in figures}
    places: dict[int, float] = {}
    for finalists, concerned in _last_finals(figures):
        places |= {f.trial: _place(f) for f in finalists}
        for better, worse in reversed(list(pairwise(finalists))):
            counted[better.trial] = max(counted[better.trial], counted[worse.trial])
        began, slowest = min(f.id for f in finalists), counted[finalists[-1].trial]
        for figure in concerned:
            if figure.id < began and counted[figure.trial] > slowest:
                counted[figure.trial] = slowest
                places.pop(figure.trial, None)
    last = float("inf")
    order = sorted(figures, key=lambda f: (-counted[f.trial], places.get(f.trial, last), -f.speed, f.trial))
    return [(f.trial, counted[f.trial]) for f in order]


def _last_finals(figures: Sequence[Figure]) -> Iterator[tuple[list[Figure], list[Figure]]]:
    """Finalists by their places, and the figures that are behind them where they were taken before.

    Finals held in another ledger, whose numbers are below 0, are about their own run alone. This ledger's come last.
    """
    held: dict[int, list[Figure]] = {}
    for figure in figures:
        if "place" in figure.terms:
            held.setdefault(figure.run if figure.terms["final_of_run"] < 0 else HERE, []).append(figure)
    for run, placed in sorted(held.items(), reverse=True):
        last = max(f.terms["final_of_run"] for f in placed)
        finalists = sorted((f for f in placed if f.terms["final_of_run"] == last), key=lambda f: (_place(f), f.trial))
        yield finalists, [f for f in figures if run in (HERE, f.run)]


def _place(figure: Figure) -> float:
    return figure.terms["place"]
