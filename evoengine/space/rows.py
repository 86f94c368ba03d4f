"""Enumerate a family's valid configurations as columns of small integers, knob by knob."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evoengine.errors import UsageError
from evoengine.space.arrays import Columns, EncodedColumn, as_bool
from evoengine.space.definition import Constraint, Knob
from evoengine.space.expression import Expression, Scope
from evoengine.space.family import Family

CHUNK = 1 << 17
"""rows processed at once, which bounds the memory in addition to the valid rows themselves"""
MAX_COUNTED = 1 << 18
"""largest number of settings that are numbered by a table, which is faster than sorting"""
PER_ROW = 16
"""settings per row beyond which sorting is faster"""
MAX_NUMBERED = 2**62
"""number of settings that an int64 can enumerate"""
MAX_VALID = 50_000_000
MAX_VISITED = 1_000_000_000

Rows = dict[str, np.ndarray]
"""knob → position in its domain, int8 or int16 [n], -1 where inactive"""


@dataclass
class Enumeration:
    """The valid rows of a family in the order of its knobs and their values, and what its constraints removed.

    Knobs on which no rule depends multiply the rows by so much that rows are held without them (`ruled`) until all are
    needed.
    """

    knobs: Sequence[Knob]
    ruled: Rows
    active: Mapping[str, np.ndarray]
    """knob that no rule depends on → bool [n of `ruled`], whether it has a value"""
    removed: Mapping[Constraint, float]
    """constraint → combinations that it excluded; an upper bound where later knobs are conditional"""

    @cached_property
    def _length(self) -> int:
        return int(np.prod(self._multiples(self.active), axis=0).sum())

    def __len__(self) -> int:
        return self._length

    @cached_property
    def rows(self) -> Rows:
        return self.multiplied(self.active)

    def _multiples(self, names: Container[str]) -> list[np.ndarray]:
        """Return for each free knob how many values it takes, int64 [n of `ruled`]; 1 where it is inactive."""
        free = [(k, self.active[k.name]) for k in self.knobs if k.name in self.active]
        values = [np.where(active, len(k.values) if k.name in names else 1, 1) for k, active in free]
        return [np.ones(len(self.ruled["family"]), np.int64), *values]

    def multiplied(self, names: Container[str]) -> Rows:
        """Return the rows with every value of the free knobs of these names, and the first value of the others."""
        if not self.active:
            return self.ruled
        one, *multiples = self._multiples(names)
        counts = np.prod([one, *multiples], axis=0)
        origin = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        setting = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
        free: Rows = {}
        knobs = [k for k in self.knobs if k.name in self.active]
        for knob, values in zip(reversed(knobs), reversed(multiples), strict=True):
            if knob.name in names:
                setting, index = np.divmod(setting, values.take(origin))
            else:
                index = np.zeros(len(origin), np.int64)
            index[~self.active[knob.name].take(origin)] = -1
            free[knob.name] = index.astype(_dtype(knob))
        if [k.name for k in self.knobs] != [*self.ruled, *self.active]:
            order = self._order(free, origin)
            origin, free = origin.take(order), _take_rows(free, order)
        return {k.name: free[k.name] if k.name in free else self.ruled[k.name].take(origin) for k in self.knobs}

    def _order(self, free: Rows, origin: np.ndarray) -> np.ndarray:
        """Return the places of rows when they are sorted by the knobs in their own order."""
        sizes = [len(k.values) + 1 for k in self.knobs]
        if math.prod(sizes) > MAX_NUMBERED:
            columns = free | {name: column.take(origin) for name, column in self.ruled.items()}
            return np.lexsort([columns[k.name] for k in reversed(self.knobs)])
        weights = {k.name: math.prod(sizes[i + 1 :]) for i, k in enumerate(self.knobs)}
        ruled = np.zeros(len(self.ruled["family"]), np.int64)
        for name, column in self.ruled.items():
            ruled += weights[name] * column.astype(np.int64)
        position = ruled.take(origin)
        for name, column in free.items():
            position += weights[name] * column.astype(np.int64)
        return np.argsort(position)


class Enumerator:
    def __init__(self, family: Family) -> None:
        self.family, self.knobs = family, family.knobs
        self.domains = {k.name: np.array(k.values) for k in self.knobs}
        self.removed: dict[Constraint, float] = {}
        self.visited = 0
        rules = [rule for c in family.constraints for rule in (c.expr, c.when)] + [k.when for k in self.knobs]
        ruled = family.knob_dependencies(*rules) | {"family"}
        self.ruled_knobs = [knob for knob in self.knobs if knob.name in ruled]
        self.free = [knob for knob in self.knobs if knob.name not in ruled]
        """they multiply what is left, not what is looked at"""
        # A constraint is applied as soon as the last knob it depends on is bound.
        self.constraints_by_level: list[list[Constraint]] = [[] for _ in self.ruled_knobs]
        for constraint in family.constraints:
            needed = family.knob_dependencies(constraint.expr, constraint.when)
            self.constraints_by_level[
                max((i for i, k in enumerate(self.ruled_knobs) if k.name in needed), default=0)
            ].append(constraint)

    def enumerate(self) -> Enumeration:
        """Return all valid configurations of the family.

        Raises UsageError if the space is too large to hold.
        """
        index = self.knobs[0].index(self.family.name)
        parts: list[Rows] = []
        valid = 0
        for part in self._descend({"family": np.array([index], dtype=_dtype(self.knobs[0]))}, 0):
            parts.append(part)
            valid += len(self._enumeration(part))
            if valid > MAX_VALID:
                raise self._too_large(f"more than {MAX_VALID:,} valid configurations")
        empty = {k.name: np.empty(0, _dtype(k)) for k in self.ruled_knobs}
        # Column by column, releasing the parts on the way, so that the rows are never held twice.
        return self._enumeration(
            {k.name: np.concatenate([empty[k.name], *(part.pop(k.name) for part in parts)]) for k in self.ruled_knobs}
        )

    def _enumeration(self, ruled: Rows) -> Enumeration:
        return Enumeration(self.knobs, ruled, {k.name: self.active(k, ruled) for k in self.free}, self.removed)

    def _descend(self, rows: Rows, level: int) -> Iterator[Rows]:
        rows = self._constrained(rows, level)
        if not len(rows["family"]):
            return
        if level + 1 == len(self.ruled_knobs):
            yield rows
            return
        self._refuse_certain_excess(len(rows["family"]), level)
        knob = self.ruled_knobs[level + 1]
        step = max(1, CHUNK // len(knob.values))
        for start in range(0, len(rows["family"]), step):
            some = {name: column[start : start + step] for name, column in rows.items()}
            yield from self._descend(self._expanded(some, knob), level + 1)

    def _refuse_certain_excess(self, rows: int, level: int) -> None:
        """Raise UsageError at once where no later rule removes anything from too many rows.

        Enumerating them all would take minutes.
        """
        later = self.ruled_knobs[level + 1 :] + self.free
        if any(knob.when for knob in later) or any(self.constraints_by_level[level + 1 :]):
            return
        if rows * math.prod(len(knob.values) for knob in later) > MAX_VALID:
            raise self._too_large(f"more than {MAX_VALID:,} valid configurations")

    def _expanded(self, rows: Rows, knob: Knob) -> Rows:
        active = self.active(knob, rows)
        index, origin = expand(active, len(knob.values))
        self.visited += len(index)
        if self.visited > MAX_VISITED:
            raise self._too_large(f"more than {MAX_VISITED:,} combinations to look at")
        if len(index) > len(active):
            rows = _take_rows(rows, origin)
        return rows | {knob.name: index.astype(_dtype(knob))}

    def active(self, knob: Knob, rows: Rows) -> np.ndarray:
        length = len(rows["family"])
        if knob.when is None:
            return np.ones(length, bool)
        active = np.zeros(length, bool)
        active[self._rows_where_true(knob.when, rows, np.arange(length))] = True
        return active

    def _constrained(self, rows: Rows, level: int) -> Rows:
        keep = np.ones(len(rows["family"]), bool)
        for constraint in self.constraints_by_level[level]:
            applies = np.flatnonzero(keep)
            if constraint.when:
                applies = self._rows_where_true(constraint.when, rows, applies)
            applies = self._rows_with_active_knobs(constraint.expr, rows, applies)
            if not len(applies):
                continue
            first, which = self._distinct_settings(constraint.expr, rows, applies)
            held = as_bool(constraint.expr.evaluate_arrays(self._columns(rows, applies[first])))
            broken = applies[~held[which]]
            if len(broken):
                later = math.prod(float(len(k.values)) for k in self.ruled_knobs[level + 1 :] + self.free)
                self.removed[constraint] = self.removed.get(constraint, 0.0) + len(broken) * later
                keep[broken] = False
        return rows if keep.all() else _take_rows(rows, np.flatnonzero(keep))

    def _rows_with_active_knobs(self, expression: Expression, rows: Rows, among: np.ndarray) -> np.ndarray:
        """Return those of the rows `among` in which every knob named in the expression is active."""
        for name in sorted(self.family.knobs_in(expression) - {"family"}):
            column = rows[name]
            among = among[column[among] >= 0]
        return among

    def _rows_where_true(self, when: Expression, rows: Rows, among: np.ndarray) -> np.ndarray:
        # by the same code as `contains`
        reached = self.family.knob_dependencies(when) - {"family"}
        knobs = [k for k in self.knobs if k.name in reached]
        first, which = self._distinct_settings(when, rows, among)
        holds = [self.family.holds(when, self._scope(knobs, rows, int(among[i]))) for i in first]
        kept: np.ndarray = among[np.array(holds, bool)[which]]
        return kept

    def _distinct_settings(
        self, expression: Expression, rows: Rows, among: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        reached = self.family.knob_dependencies(expression)
        return distinct_settings([k for k in self.knobs[1:] if k.name in reached], rows, among)

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
        """Return the number of combinations before constraints; an inactive conditional knob counts as one value.

        Only knobs on which some `when` depends are enumerated; the others multiply.
        """
        deciders = self.family.knob_dependencies(*(k.when for k in self.knobs))
        rows: Rows = {"family": np.zeros(1, np.int8)}
        weight = np.ones(1, object)
        for knob in self.knobs[1:]:
            active = self.active(knob, rows)
            if knob.name in deciders:
                index, origin = expand(active, len(knob.values))
                rows = _take_rows(rows, origin) | {knob.name: index.astype(_dtype(knob))}
                weight = weight[origin]
            else:
                weight = weight * np.where(active, len(knob.values), 1).astype(object)
        return int(weight.sum())


def distinct_settings(knobs: Sequence[Knob], rows: Rows, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct settings of these knobs, so that a rule is evaluated once for each.

    The result is the position in `among` at which each setting first occurs [settings], in ascending order, and the
    number of each row's setting [rows].
    """
    setting, count = np.zeros(len(among), np.int64), 1
    for knob in knobs:
        if count * (len(knob.values) + 1) > MAX_NUMBERED:
            setting, count = np.unique(setting, return_inverse=True)[1], len(among)
        setting = setting * (len(knob.values) + 1) + rows[knob.name][among] + 1
        count *= len(knob.values) + 1
    if count > min(MAX_COUNTED, PER_ROW * len(among)):
        _, first, which = np.unique(setting, return_index=True, return_inverse=True)
    else:
        # of rows with the same setting the first is written last, and so kept
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


def columns_by_setting(family: Family, enumeration: Enumeration) -> tuple[Rows, Columns]:
    """Return the first valid row of each setting of the knobs on which launch and costs depend.

    The second result holds the same rows as columns on which expressions can be evaluated.
    """
    reached = family.knob_dependencies(*family.launch_rule.expressions, *family.cost_rules.values())
    rows, knobs = enumeration.multiplied(reached), family.knobs[1:]
    numbers, _ = distinct_settings([k for k in knobs if k.name in reached], rows, np.arange(len(rows["family"])))
    rows = _take_rows(rows, numbers)
    coded = {k.name: EncodedColumn(rows[k.name], np.array(k.values)) for k in knobs}
    return rows, family.columns(coded, len(numbers))


def expand(active: np.ndarray, values: int) -> tuple[np.ndarray, np.ndarray]:
    """Give each active row all values of a knob, and each other row -1.

    Returns positions in the domain, and the row to which each belongs.
    """
    if active.all():
        return np.tile(np.arange(values), len(active)), np.repeat(np.arange(len(active)), values)
    counts = np.where(active, values, 1)
    origin = np.repeat(np.arange(len(active)), counts)
    index = np.arange(len(origin)) - (np.cumsum(counts) - counts)[origin]
    index[~active[origin]] = -1
    return index, origin


def _take_rows(rows: Rows, places: np.ndarray) -> Rows:
    """Return these rows, in this order. `take` is many times faster than repeating by counts or masking."""
    return {name: column.take(places) for name, column in rows.items()}


def _dtype(knob: Knob) -> type[np.signedinteger]:
    return np.int8 if len(knob.values) <= 127 else np.int16
