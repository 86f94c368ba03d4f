"""Which of several figures counts more: kinds and devices are never mixed, and finals decide between their finalists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from evoengine.ledger.rows import PREFERENCE
from evoengine.records import Kind


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the measurements, as far as ranking needs it; a higher id was taken later."""

    id: int
    trial: int
    kind: Kind
    speed: float
    """runs per second"""
    suspect: str | None
    terms: Mapping[str, float]
    device: str = ""

    @property
    def trust(self) -> int:
        return PREFERENCE.index(self.kind)


def ranked(figures: Iterable[Figure]) -> list[int]:
    """Trials best first, by figures of the most trusted kind that any has; `figures` come oldest first.

    Only those of the device that gave the last such figure count: one name (h100) stands for GPUs of unlike speed.

    A candidate counts by its last figure of its own most trusted kind, and not at all where that one is suspect. The
    finalists of the last finals keep the places they won there: what was timed before, and alone, is behind them.
    """
    held: dict[int, Figure] = {}
    for figure in figures:
        if figure.trial not in held or figure.trust <= held[figure.trial].trust:
            held[figure.trial] = figure
    believed = [f for f in held.values() if not f.suspect]
    trusted = min((f.trust for f in believed), default=None)
    alike = [f for f in believed if f.trust == trusted]
    last = max(alike, key=lambda f: f.id, default=None)
    return _with_finals([f for f in alike if f.device == last.device])


def _with_finals(figures: list[Figure]) -> list[int]:
    placed = [f for f in figures if "place" in f.terms]
    last_run = max((f.terms["final_of_run"] for f in placed), default=None)
    finalists = sorted((f for f in placed if f.terms["final_of_run"] == last_run), key=_place)
    counted = {f.trial: f.speed for f in figures}
    for better, worse in reversed(list(zip(finalists, finalists[1:], strict=False))):
        counted[better.trial] = max(counted[better.trial], counted[worse.trial])
    if finalists:
        began, slowest = min(f.id for f in finalists), counted[finalists[-1].trial]
        for figure in figures:
            if figure not in finalists and figure.id < began:
                counted[figure.trial] = min(counted[figure.trial], slowest)
    places = {f.trial: _place(f) for f in finalists}
    last = float("inf")
    order = sorted(figures, key=lambda f: (-counted[f.trial], places.get(f.trial, last), -f.speed))
    return [f.trial for f in order]


def _place(figure: Figure) -> float:
    return figure.terms["place"]
