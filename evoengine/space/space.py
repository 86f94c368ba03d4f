"""The search space: every configuration of a kernel that a space file admits for one problem on one GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Protocol

import numpy as np

from evoengine.errors import UsageError
from evoengine.records import Config, Launch, Value, config_key
from evoengine.space.definition import Definition, Knob, domain_error
from evoengine.space.family import Family
from evoengine.space.reader import parse_definition, read_definition
from evoengine.space.rows import Enumeration, Enumerator, columns_by_setting
from evoengine.space.symbol import symbol
from evoengine.text import printable

SMS = "gpu.sms"
"""the name of a GPU's number of SMs in expressions"""


class HasVariables(Protocol):
    """The part of a problem or a GPU that a space uses."""

    def variables(self) -> Mapping[str, Value]: ...


def load_space(path: Path, problem: HasVariables, gpu: HasVariables, families: Sequence[str] = ()) -> SearchSpace:
    """Read a space file, bind it to the problem and the GPU, and enumerate the valid configurations.

    `families` restricts the space to these; without them every possible family is included. Raises UsageError naming
    file, line and remedy where the file is at fault or admits nothing, and where a family named in `families` has no
    valid configuration.
    """
    return _bound(read_definition(path, {**problem.variables(), **gpu.variables()}), problem, gpu, families)


def space_from_text(text: str, name: str, problem: HasVariables, gpu: HasVariables) -> SearchSpace:
    """Build a space as `load_space` does, from a text that a ledger stores; `name` is its label in messages."""
    label = PurePath(printable(name))
    return _bound(parse_definition(label, text, {**problem.variables(), **gpu.variables()}), problem, gpu, ())


def _bound(definition: Definition, problem: HasVariables, gpu: HasVariables, families: Sequence[str]) -> SearchSpace:
    space = SearchSpace(definition.restricted_to(families) if families else definition, problem, gpu)
    for name in families:
        if name in space.empty_families:
            raise UsageError(f"the family {name} is not possible here: {space.empty_families[name]}")
    return space


class SearchSpace:
    """The valid configurations, held as columns of indices: a byte or two per knob and configuration.

    A Config is a plain dict in knob order with Python ints, floats, strings and bools, active knobs only.

    size: combinations before constraints, a conditional knob counting once where it is inactive.
    valid: configurations after them; `len(space)` is the same.
    starts: the file's known-good points that are valid here; `dropped_starts` pairs the others with the reason.
    empty_families: family → the `why` of the constraint that removed the most of it.
    """

    def __init__(self, definition: Definition, problem: HasVariables, gpu: HasVariables) -> None:
        self._definition = definition
        self._of_gpu = gpu.variables()
        self._variables = {**problem.variables(), **self._of_gpu}
        self.name, self.text, self.sha256 = definition.path.name, definition.text, definition.sha256
        self.kernel, self.knobs = definition.kernel, definition.knobs
        self.families = tuple(str(f) for f in self.knobs[0].values)
        self._families = {name: Family(name, definition, self._variables) for name in self.families}
        enumerators = {name: Enumerator(family) for name, family in self._families.items()}
        self.size = sum(e.combinations() for e in enumerators.values())
        self._enumerations = {name: e.enumerate() for name, e in enumerators.items()}
        self._ends = np.cumsum([len(e) for e in self._enumerations.values()])
        self.valid = int(self._ends[-1])
        self.empty_families = {n: _main_reason(e)[1] for n, e in self._enumerations.items() if not len(e)}
        if not self.valid:
            raise UsageError(self._why_empty())
        self._check_rules()
        self.starts, self.dropped_starts = self._sorted_starts()

    def __len__(self) -> int:
        return self.valid

    def contains(self, config: Config) -> bool:
        return self.why_invalid(config) is None

    def why_invalid(self, config: Config) -> str | None:
        """Return the `why` of the first broken constraint, or what is wrong with a knob; None for a valid one."""
        if self.knobs[0].index(config.get("family")) is None:
            return f"{domain_error(self.knobs[0])}, not {config.get('family')!r}"
        if why := self.empty_families.get(str(config["family"])):
            return why
        return self._families[str(config["family"])].why_invalid(config)

    def is_active(self, knob: Knob, config: Config) -> bool:
        """Return whether the knob is active, given the configuration's values of the knobs before it."""
        return knob.when is None or self._family_of(config).is_active(knob, self._family_of(config).scope(config))

    def sample(self, rng: np.random.Generator, n: int = 1) -> list[dict[str, Value]]:
        """Draw n independent configurations: a family, all equally likely, then one of its, with replacement."""
        filled = [e for e in self._enumerations.values() if len(e)]
        drawn = [filled[i] for i in rng.integers(len(filled), size=n)]
        places = rng.integers([len(e) for e in drawn])
        return [self._at(e, int(i)) for e, i in zip(drawn, places, strict=True)]

    def first_points(self, rng: np.random.Generator) -> list[tuple[Config, str]]:
        """Return what a search tries first, alternating families, each with its operator: `start` or `random`.

        A family without a start point gets as many random draws as the others have starts on average. Otherwise a short
        search would spend all its trials on the others, and its sampler would learn nothing of that family. Empty where
        the file has no start points at all.
        """
        points = [(config, "start") for config in self.starts]
        started = {config["family"] for config in self.starts}
        each = math.ceil(len(points) / max(1, len(started)))
        for family, enumeration in self._enumerations.items():
            if points and family not in started:
                places = rng.choice(len(enumeration), min(each, len(enumeration)), replace=False)
                points += [(self._at(enumeration, int(i)), "random") for i in places]
        return _round_robin(points)

    def enumerate(self) -> Iterator[dict[str, Value]]:
        """Yield every valid configuration once, in the order of knobs and values."""
        return map(self._config, range(self.valid))

    def encode(self, config: Config) -> np.ndarray:
        """Return the positions in the knobs' domains, int16 [knobs], -1 where inactive.

        Raises UsageError on an unknown value.
        """
        row = np.full(len(self.knobs), -1, np.int16)
        for i, knob in enumerate(self.knobs):
            if knob.name in config:
                index = knob.index(config[knob.name])
                if index is None:
                    raise UsageError(f"{domain_error(knob)}, not {config[knob.name]!r}")
                row[i] = index
        return row

    def decode(self, row: Sequence[int] | np.ndarray) -> dict[str, Value]:
        """Return the configuration of an encoded row [knobs]; the inverse of `encode`."""
        return {k.name: k.values[int(i)] for k, i in zip(self.knobs, row, strict=True) if i >= 0}

    def neighbours(self, config: Config) -> list[dict[str, Value]]:
        """Return every valid configuration one knob away, in the order of knobs and values.

        A change that activates or deactivates other knobs gives one neighbour: in knob order, each knob keeps its value
        where a valid configuration allows that, and otherwise takes the nearest one in its domain; newly active knobs
        then take their first valid values.
        """
        row, found = self.encode(config), dict[str, dict[str, Value]]()
        for k, knob in enumerate(self.knobs):
            for i, value in enumerate(knob.values):
                if row[k] < 0 or i == row[k]:
                    continue
                changed = {**config, knob.name: value}
                if self._same_knobs_active(changed):
                    neighbour = changed if self.contains(changed) else None
                else:
                    neighbour = self._nearest(row, k, i)
                if neighbour:
                    found.setdefault(config_key(neighbour), neighbour)
        return list(found.values())

    def launch(self, config: Config, problem: HasVariables | None = None) -> Launch:
        """Return the launch geometry, for the space's problem or for another one on the same GPU."""
        return self._family_of(config).launch(config, self._variables_for(problem))

    def grids_by_sms(self, config: Config, sms: Iterable[int]) -> dict[int, tuple[int, int, int]]:
        """Return the grid on GPUs like this one with other numbers of SMs; empty if the launch ignores them.

        A number for which the rule gives no launch, or one that differs in more than the grid, is left out.
        """
        family, own, found = self._family_of(config), self.launch(config), dict[int, tuple[int, int, int]]()
        for count in sms:
            try:
                launch = family.launch(config, {**self._variables, "gpu.sms": count})
            except UsageError:
                continue
            if replace(launch, grid=own.grid) == own:
                found[count] = launch.grid
        return found if set(found.values()) - {own.grid} else {}

    def sized_launch(self, config: Config, problem: HasVariables) -> Launch:
        """Return the launch geometry for sizes that are Symbols, and for `gpu.sms` in the place of this GPU's SMs."""
        variables = {**self._variables_for(problem), SMS: symbol(SMS)}
        return self._family_of(config).launch(config, variables)

    def size_rules(
        self, config: Config, problem: HasVariables, kept_by: Iterable[HasVariables]
    ) -> list[tuple[str, str]]:
        """Return expression and reason of the constraints that sizes which are Symbols may break.

        Those that one of `kept_by` breaks, of which the kernel is known to be right, are left out: they are for speed.
        """
        seen = [self._variables_for(known) for known in kept_by]
        return [*self._family_of(config).size_rules(config, self._variables_for(problem), seen)]

    def cost(self, config: Config, problem: HasVariables | None = None) -> dict[str, float]:
        """Return the family's named cost figures, per block; empty if the file states none."""
        return self._family_of(config).cost(config, self._variables_for(problem))

    def _variables_for(self, problem: HasVariables | None) -> Mapping[str, Value]:
        return self._variables if problem is None else {**problem.variables(), **self._of_gpu}

    def _family_of(self, config: Config) -> Family:
        family = self._families.get(str(config.get("family")))
        if family is None:
            raise UsageError(f"{domain_error(self.knobs[0])}, not {config.get('family')!r}")
        return family

    def _config(self, i: int) -> dict[str, Value]:
        f = int(np.searchsorted(self._ends, i, side="right"))
        enumeration = self._enumerations[self.families[f]]
        return self._at(enumeration, i - int(self._ends[f]) + len(enumeration))

    def _at(self, enumeration: Enumeration, i: int) -> dict[str, Value]:
        return self.decode([enumeration.rows[k.name][i] for k in self.knobs])

    def _same_knobs_active(self, config: Config) -> bool:
        family = self._family_of(config)
        scope = family.scope(config)
        return all(family.is_active(k, scope) == (k.name in config) for k in self.knobs)

    def _nearest(self, row: np.ndarray, k: int, value: int) -> dict[str, Value] | None:
        """Return the valid configuration with knob k at `value` that keeps most of `row`; see `neighbours`."""
        enumeration = self._enumerations[self.families[value if k == 0 else row[0]]]
        wanted = row.copy()
        wanted[k] = value
        left: np.ndarray | slice = slice(None)
        for j in (k, *(j for j in range(1, len(row)) if j != k and row[j] >= 0)):
            column = enumeration.rows[self.knobs[j].name][left].astype(np.int16)
            distance = np.abs(column - wanted[j])
            distance[column < 0] = np.iinfo(np.int16).max
            if not len(distance) or (j == k and distance.min() > 0):
                return None
            best = np.flatnonzero(distance == distance.min())
            left = best if isinstance(left, slice) else left[best]
        return self._at(enumeration, int(left[0])) if isinstance(left, np.ndarray) else None

    def _why_empty(self) -> str:
        enumerations = self._enumerations.values()
        where, why = max((_main_reason(e) for e in enumerations), key=lambda reason: reason[2])[:2]
        return f"{where}: the constraints leave nothing for this problem and GPU; the one that removes the most: {why}"

    def _check_rules(self) -> None:
        for name, family in self._families.items():
            rows, columns = columns_by_setting(family, self._enumerations[name])
            family.check_costs(columns)
            for i in family.doubtful_launches(columns):
                family.launch(self.decode([rows[k.name][i] for k in self.knobs]), self._variables)

    def start_points(self) -> Iterator[tuple[str, Config]]:
        """Yield where each start point stands and its knobs, with their defaults."""
        for where, config in self._definition.starts:
            if "family" not in config:
                raise UsageError(f"{where}: the start lacks family; name one of {', '.join(self.families)}")
            yield where, self.completed(config)

    def completed(self, config: Config) -> Config:
        """Return the configuration with the defaults of active knobs that it does not name.

        Trials of before a knob was added lack it. Raises UsageError if the family is none of the space's.
        """
        return self._family_of(config).completed(config)

    def _sorted_starts(self) -> tuple[tuple[Config, ...], tuple[tuple[Config, str], ...]]:
        valid, dropped = [], []
        for where, config in self.start_points():
            if missing := self._family_of(config).missing_knob(config):
                raise UsageError(f"{where}: the start lacks {missing}; give it a value, or the knob a default")
            reason = self.why_invalid(config)
            if reason is None:
                valid.append(config)
            else:
                dropped.append((config, reason))
        return tuple(valid), tuple(dropped)


def _round_robin(points: Sequence[tuple[Config, str]]) -> list[tuple[Config, str]]:
    """Reorder points to the first of each family, then the second of each, and so on.

    Thus even a short search tries every family.
    """
    families = [config["family"] for config, _ in points]
    order = sorted(range(len(points)), key=lambda i: families[:i].count(families[i]))
    return [points[i] for i in order]


def _main_reason(enumeration: Enumeration) -> tuple[str, str, float]:
    """Return place, reason and removed share of the constraint that removed the most."""
    constraint, removed = max(enumeration.removed.items(), key=lambda item: item[1])
    return constraint.expr.where, f"{constraint.why} (`{constraint.expr.text}`)", removed
