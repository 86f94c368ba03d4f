"""Enumerates one family's valid configurations as columns of small integers, knob by knob."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from evoengine.errors import UsageError
from evoengine.space.arrays import Columns, EncodedColumn, as_bool
from evoengine.space.definition import Constraint, Knob
from evoengine.space.expression import Expression, Scope
from evoengine.space.family import Family

CHUNK = 1 << 17
"""rows in hand at once: what bounds memory beside the valid rows themselves"""
MOST_COUNTED = 1 << 18
"""settings of some knobs that are numbered by a table, which is quicker than sorting"""
MOST_NUMBERED = 2**62
"""settings that an int64 can number"""
MOST_VALID = 50_000_000
MOST_VISITED = 1_000_000_000

Rows = dict[str, np.ndarray]
"""knob → position in its domain, int8 or int16 [n], -1 where inactive"""


@dataclass
class Enumeration:
    """The valid rows of a family in the order of its knobs and their values, and what was removed on the way."""

    rows: Rows
    removed: dict[Constraint, float] = field(default_factory=dict)
    """constraint → combinations it ruled out; an upper bound where later knobs are conditional"""

    def __len__(self) -> int:
        return len(self.rows["family"])


class Enumerator:
    def __init__(self, family: Family) -> None:
        self.family, self.knobs = family, family.knobs
        self.domains = {k.name: np.array(k.values) for k in self.knobs}
        self.removed: dict[Constraint, float] = {}
        self.visited = 0
        # Knobs on which no rule hangs come last: they multiply what is left then, not what is looked at.
        rules = [rule for c in family.constraints for rule in (c.expr, c.when)] + [k.when for k in self.knobs]
        ruled = family.knobs_reached(*rules) | {"family"}
        self.walk = sorted(self.knobs, key=lambda knob: knob.name not in ruled)
        # A constraint is applied as soon as the last knob it depends on is bound.
        self.due: list[list[Constraint]] = [[] for _ in self.walk]
        for constraint in family.constraints:
            hangs_on = family.knobs_reached(constraint.expr, constraint.when)
            self.due[max((i for i, k in enumerate(self.walk) if k.name in hangs_on), default=0)].append(constraint)

    def enumerate(self) -> Enumeration:
        """Raises UsageError where the space is too large to hold."""
        index = self.knobs[0].index(self.family.name)
        parts, valid = [], 0
        for part in self._descend({"family": np.array([index], dtype=_dtype(self.knobs[0]))}, 0):
            parts.append(part)
            valid += len(part["family"])
            if valid > MOST_VALID:
                raise self._too_large(f"more than {MOST_VALID:,} valid configurations")
        names = [k.name for k in self.knobs]
        empty = {k.name: np.empty(0, _dtype(k)) for k in self.knobs}
        # Column by column, giving the parts back on the way: the rows are never held twice.
        rows = {name: np.concatenate([part.pop(name) for part in parts]) if parts else empty[name] for name in names}
        if [k.name for k in self.walk] != names:
            order = self._in_order(rows)
            for name in names:
                rows[name] = rows[name][order]
        return Enumeration(rows, self.removed)

    def _in_order(self, rows: Rows) -> np.ndarray:
        """The places of the rows when they are sorted by the knobs in their own order."""
        if math.prod(len(k.values) + 1 for k in self.knobs) > MOST_NUMBERED:
            return np.lexsort([rows[k.name] for k in reversed(self.knobs)])
        position = np.zeros(len(rows["family"]), np.int64)
        for knob in self.knobs:
            position = position * (len(knob.values) + 1) + rows[knob.name] + 1
        return np.argsort(position)

    def _descend(self, rows: Rows, level: int) -> Iterator[Rows]:
        rows = self._constrained(rows, level)
        if not len(rows["family"]):
            return
        if level + 1 == len(self.walk):
            yield rows
            return
        self._refuse_certain_excess(len(rows["family"]), level)
        knob = self.walk[level + 1]
        step = max(1, CHUNK // len(knob.values))
        for start in range(0, len(rows["family"]), step):
            some = {name: column[start : start + step] for name, column in rows.items()}
            yield from self._descend(self._expanded(some, knob), level + 1)

    def _refuse_certain_excess(self, rows: int, level: int) -> None:
        """At once where nothing removes any of what these rows become: looking at it all would take minutes."""
        later = self.walk[level + 1 :]
        if any(knob.when for knob in later) or any(self.due[level + 1 :]):
            return
        if rows * math.prod(len(knob.values) for knob in later) > MOST_VALID:
            raise self._too_large(f"more than {MOST_VALID:,} valid configurations")

    def _expanded(self, rows: Rows, knob: Knob) -> Rows:
        active = self.active(knob, rows)
        index, origin = expanded(active, len(knob.values))
        self.visited += len(index)
        if self.visited > MOST_VISITED:
            raise self._too_large(f"more than {MOST_VISITED:,} combinations to look at")
        if len(index) > len(active):
            rows = _taken(rows, origin)
        return rows | {knob.name: index.astype(_dtype(knob))}

    def active(self, knob: Knob, rows: Rows) -> np.ndarray:
        length = len(rows["family"])
        if knob.when is None:
            return np.ones(length, bool)
        active = np.zeros(length, bool)
        active[self._where_holds(knob.when, rows, np.arange(length))] = True
        return active

    def _constrained(self, rows: Rows, level: int) -> Rows:
        keep = np.ones(len(rows["family"]), bool)
        for constraint in self.due[level]:
            applies = np.flatnonzero(keep)
            if constraint.when:
                applies = self._where_holds(constraint.when, rows, applies)
            applies = self._where_named(constraint.expr, rows, applies)
            if not len(applies):
                continue
            first, which = self._settings(constraint.expr, rows, applies)
            held = as_bool(constraint.expr.evaluate_arrays(self._columns(rows, applies[first])))
            broken = applies[~held[which]]
            if len(broken):
                later = math.prod(float(len(k.values)) for k in self.walk[level + 1 :])
                self.removed[constraint] = self.removed.get(constraint, 0.0) + len(broken) * later
                keep[broken] = False
        return rows if keep.all() else _taken(rows, np.flatnonzero(keep))

    def _where_named(self, expression: Expression, rows: Rows, among: np.ndarray) -> np.ndarray:
        """The rows on which every knob that stands in the expression is active."""
        for name in sorted(self.family.knobs_named(expression) - {"family"}):
            column = rows[name]
            among = among[column[among] >= 0]
        return among

    def _where_holds(self, when: Expression, rows: Rows, among: np.ndarray) -> np.ndarray:
        # by the code that `contains` uses
        reached = self.family.knobs_reached(when) - {"family"}
        knobs = [k for k in self.knobs if k.name in reached]
        first, which = self._settings(when, rows, among)
        holds = [self.family.holds(when, self._scope(knobs, rows, int(among[i]))) for i in first]
        kept: np.ndarray = among[np.array(holds, bool)[which]]
        return kept

    def _settings(self, expression: Expression, rows: Rows, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        reached = self.family.knobs_reached(expression)
        return settings([k for k in self.knobs[1:] if k.name in reached], rows, among)

    def _scope(self, knobs: list[Knob], rows: Rows, i: int) -> Scope:
        indices = {k.name: int(rows[k.name][i]) for k in knobs}
        config = {k.name: k.values[indices[k.name]] for k in knobs if indices[k.name] >= 0}
        return self.family.scope({"family": self.family.name, **config})

    def _columns(self, rows: Rows, among: np.ndarray) -> Columns:
        coded = {n: EncodedColumn(column, self.domains[n]) for n, column in rows.items() if n != "family"}
        return self.family.columns(coded, len(rows["family"])).at(among)

    def _too_large(self, what: str) -> UsageError:
        return UsageError(
            f"family {self.family.name} has {what}; give its knobs fewer values, or constraints on earlier knobs"
        )

    def combinations(self) -> int:
        """Combinations before constraints, a conditional knob counting once where it is inactive.

        Only knobs that some `when` depends on are enumerated; the others multiply.
        """
        deciders = self.family.knobs_reached(*(k.when for k in self.knobs))
        rows: Rows = {"family": np.zeros(1, np.int8)}
        weight = np.ones(1, object)
        for knob in self.knobs[1:]:
            active = self.active(knob, rows)
            if knob.name in deciders:
                index, origin = expanded(active, len(knob.values))
                rows = _taken(rows, origin) | {knob.name: index.astype(_dtype(knob))}
                weight = weight[origin]
            else:
                weight = weight * np.where(active, len(knob.values), 1).astype(object)
        return int(weight.sum())


def settings(knobs: Sequence[Knob], rows: Rows, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct settings of these knobs, so that a rule is evaluated once for each: where in `among` each setting
    comes first, in order, and which of these settings each row has."""
    setting, count = np.zeros(len(among), np.int64), 1
    for knob in knobs:
        if count * (len(knob.values) + 1) > MOST_NUMBERED:
            setting, count = np.unique(setting, return_inverse=True)[1], len(among)
        setting = setting * (len(knob.values) + 1) + rows[knob.name][among] + 1
        count *= len(knob.values) + 1
    if count > MOST_COUNTED:
        _, first, which = np.unique(setting, return_index=True, return_inverse=True)
    else:
        # of rows with one setting the first is written last, and stays
        first_of = np.full(count, -1)
        first_of[setting[::-1]] = np.arange(len(among) - 1, -1, -1)
        present = np.flatnonzero(first_of >= 0)
        number = np.empty(count, np.int64)
        number[present] = np.arange(len(present))
        first, which = first_of[present], number[setting]
    in_order = np.argsort(first)
    rank = np.empty(len(first), np.int64)
    rank[in_order] = np.arange(len(first))
    return first[in_order], rank[which]


def columns_by_setting(family: Family, enumeration: Enumeration) -> tuple[np.ndarray, Columns]:
    """The first valid row of each setting of the knobs that launch and costs hang on: their numbers, and the rows as
    columns that expressions can be evaluated on."""
    reached = family.knobs_reached(*family.launch_rule.expressions, *family.cost_rules.values())
    rows, knobs = enumeration.rows, family.knobs[1:]
    numbers, _ = settings([k for k in knobs if k.name in reached], rows, np.arange(len(enumeration)))
    coded = {k.name: EncodedColumn(rows[k.name][numbers], np.array(k.values)) for k in knobs}
    return numbers, family.columns(coded, len(numbers))


def expanded(active: np.ndarray, values: int) -> tuple[np.ndarray, np.ndarray]:
    """Gives each active row all values of a knob, the others -1: positions in the domain, and which row each is of."""
    if active.all():
        return np.tile(np.arange(values), len(active)), np.repeat(np.arange(len(active)), values)
    counts = np.where(active, values, 1)
    origin = np.repeat(np.arange(len(active)), counts)
    index = np.arange(len(origin)) - (np.cumsum(counts) - counts)[origin]
    index[~active[origin]] = -1
    return index, origin


def _taken(rows: Rows, places: np.ndarray) -> Rows:
    """These rows, in this order. Taking by place is many times quicker than repeating by counts or masking."""
    return {name: column.take(places) for name, column in rows.items()}


def _dtype(knob: Knob) -> type[np.signedinteger]:
    return np.int8 if len(knob.values) <= 127 else np.int16
