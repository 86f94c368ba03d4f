"""The lineage of a candidate, and the effects of knob changes, from the parents in the ledger."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from evoengine.records import Config, Measurement, Outcome, Value

Change = tuple[str, Value | None, Value | None]
"""knob, the parent's value, the child's; None if the knob was inactive"""


class Bred(Protocol):
    """The fields of a trial that lineages need: a Candidate, or a row of a ledger's list."""

    @property
    def trial(self) -> int: ...
    @property
    def config(self) -> Config: ...
    @property
    def outcome(self) -> Outcome | None: ...
    @property
    def measurement(self) -> Measurement | None: ...
    @property
    def parents(self) -> tuple[int, ...]: ...
    @property
    def operator(self) -> str | None: ...
    @property
    def imported_from(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """A candidate and the parent it improves on. `gain` is its speed over the parent's, where both have a figure."""

    candidate: Bred
    parent: Bred | None
    changes: tuple[Change, ...]
    gain: float | None


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one knob change over all steps that made it, alone or with others."""

    change: Change
    steps: int
    alone: int
    """steps in which nothing else changed"""
    better: int
    median_gain: float


def path(trial: int, known: Mapping[int, Bred]) -> list[Step]:
    """Return the steps from a start point to `trial`. Of two parents the faster is followed."""
    steps: list[Step] = []
    seen: set[int] = set()
    current: Bred | None = known[trial]
    while current is not None and current.trial not in seen:
        seen.add(current.trial)
        steps.append(step(current, known))
        current = steps[-1].parent
    return steps[::-1]


def step(candidate: Bred, known: Mapping[int, Bred]) -> Step:
    """Return the step to a candidate from its faster parent."""
    parents = [known[t] for t in candidate.parents if t in known]
    parent = max(parents, key=_speed, default=None)
    if parent is None:
        return Step(candidate, None, (), None)
    return Step(candidate, parent, changes(parent.config, candidate.config), _gain(parent, candidate))


def changes(old: Config, new: Config) -> tuple[Change, ...]:
    if old.keys() == new.keys():
        return tuple((n, value, new[n]) for n, value in old.items() if value != new[n])
    names = dict.fromkeys((*old, *new))
    return tuple((n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n))


def transition(change: Change) -> str:
    """Return `tile_n 64→32`; a knob that is inactive on one side is shown as –."""
    knob, *values = change
    old, new = ("–" if value is None else str(value).lower() for value in values)
    return f"{knob} {old}→{new}"


def effects(trials: Iterable[Bred], parents: Iterable[Bred] = ()) -> list[Effect]:
    """Return every change of a knob from parent to child, largest gain first.

    Of `trials` only those with a figure are used, since the others say nothing about speed. `parents` are further
    trials that `trials` came from; their own parents are not considered.
    """
    children = {t.trial: t for t in trials if _figure_of(t)}
    known = {t.trial: t for t in parents if _figure_of(t)} | children
    gains: dict[Change, list[tuple[float, bool]]] = defaultdict(list)
    for made in (step(t, known) for t in children.values()):
        if made.gain is not None:
            for change in made.changes:
                gains[change].append((made.gain, len(made.changes) == 1))
    found = [
        Effect(change, len(g), sum(a for _, a in g), sum(x > 1 for x, _ in g), statistics.median(x for x, _ in g))
        for change, g in gains.items()
    ]
    return sorted(found, key=lambda e: (-e.median_gain, -e.steps))


def _gain(parent: Bred, child: Bred) -> float | None:
    before, after = _figure_of(parent), _figure_of(child)
    if before is None or after is None or not before.comparable(after):
        return None
    return before.compared_us / after.compared_us


def _speed(candidate: Bred) -> float:
    """Return runs per microsecond; 0 for a candidate without a figure."""
    figure = _figure_of(candidate)
    return 1.0 / figure.compared_us if figure else 0.0


def _figure_of(candidate: Bred) -> Measurement | None:
    return candidate.measurement if candidate.outcome and candidate.outcome.has_figure else None
