"""Read a space file into a Definition; every error names the file, the line and the remedy."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from evoengine.errors import UsageError, did_you_mean
from evoengine.records import Value
from evoengine.sandbox.untrusted import parse_toml, read_limited_text
from evoengine.space.definition import Constraint, Definition, Knob, LaunchRule, dependencies, domain_error
from evoengine.space.expression import CALLS, Expression

_MAX_KNOBS = 256
_MAX_VALUES = 32767
_LARGEST_VALUE = 2**53
_TABLES = ("kernel", "knobs", "constraint", "let", "launch", "kernels", "cost", "start")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_RESERVED = {*CALLS, "gpu", "and", "or", "not", "in", "is", "if", "else", "lambda", "for", "None", "True", "False"}


def read_definition(path: Path, variables: Mapping[str, Value]) -> Definition:
    """Read and check a space file. `variables` are the names of the problem and of the GPU (`gpu.NAME`).

    Raises UsageError naming file, line and remedy.
    """
    try:
        text = read_limited_text(path)
    except FileNotFoundError:
        raise UsageError(f"there is no space file {path}") from None
    except OSError as error:
        raise UsageError(f"the space file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the space file {path} is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:
        raise UsageError(f"the space file {path} cannot be read: {error}") from None
    return parse_definition(path, text, variables)


def parse_definition(path: PurePath, text: str, variables: Mapping[str, Value]) -> Definition:
    """Parse the text as `read_definition` does; `path` names it in messages."""
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"the space file {path} is not valid TOML: {error}") from None
    _refuse_long_integers(tables, str(path))
    return _Reader(path, text, tables, variables).read()


def _refuse_long_integers(value: Any, where: str) -> None:
    """Raise UsageError for integers beyond TOML's 64 bits, which Python reads but may fail to write."""
    if isinstance(value, dict):
        for key, each in value.items():
            _refuse_long_integers(each, f"{where}: {key}" if ": " not in where else f"{where}.{key}")
    elif isinstance(value, list):
        for each in value:
            _refuse_long_integers(each, where)
    elif isinstance(value, int) and value.bit_length() > 63:
        raise UsageError(f"{where} holds an integer of {value.bit_length()} bits; a number has at most 63 and a sign")


class _Lines:
    """The lines of keys, for error messages: (table, number of its repetition, key) → line."""

    def __init__(self, text: str) -> None:
        self.found: dict[tuple[str, int, str], int] = {}
        table = array = ""
        seen: dict[str, int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if array and line.lstrip().startswith("{"):  # an item of `start = [`, as one of [[start]]
                seen[array] = seen.get(array, -1) + 1
                self.found[array, seen[array], ""] = number
                for name in re.findall(r"""[{,]\s*["']?([\w\-]+)["']?\s*=""", line):
                    self.found.setdefault((array, seen[array], name), number)
            elif header := re.match(r"\s*\[+\s*([\w.\-]+)\s*\]+", line):
                table, array = header[1], ""
                seen[table] = seen.get(table, -1) + 1
                self.found.setdefault((table, seen[table], ""), number)
                self.found.setdefault((table.partition(".")[0], 0, ""), number)
            elif key := re.match(r"""\s*["']?([\w\-]+)["']?\s*=""", line):
                self.found.setdefault((table, seen.get(table, 0), key[1]), number)
                array = key[1] if not table and re.search(r"=\s*\[\s*(#.*)?$", line) else ""

    def line(self, table: str, key: str, repetition: int) -> int | None:
        """Return the line of the key, else of the table of that name, else of the table in which it should stand."""
        places = ((table, repetition, key), (f"{table}.{key}".strip("."), 0, ""), (table, repetition, ""))
        return next((self.found[place] for place in places if place in self.found), None)


class _Reader:
    def __init__(self, path: PurePath, text: str, tables: dict[str, Any], variables: Mapping[str, Value]) -> None:
        self.path, self.text, self.tables, self.variables = path, text, tables, variables
        self.lines = _Lines(text)

    def read(self) -> Definition:
        for key in self.tables:
            if key not in _TABLES:
                self._raise_unknown_key(self._at("", key), key, _TABLES)
        kernel = self.tables.get("kernel")
        if not isinstance(kernel, str) or not kernel:
            raise UsageError(f'{self._at("", "kernel")}: the space must name its kernel, as in kernel = "NAME"')
        self.kernel = kernel
        self.knobs = self._knobs()
        self.families = [str(v) for v in self.knobs[0].values]
        lets = self._lets()
        self.names = {k.name for k in self.knobs}.union(self.variables, *lets.values())
        for group in lets.values():
            for let in group.values():
                self._known(let)
        for knob in self.knobs:
            self._check_when(knob, lets)
        return Definition(
            path=self.path,
            text=self.text,
            kernel=kernel,
            knobs=self.knobs,
            constraints=self._constraints(),
            lets={f: lets[""] | lets[f] for f in self.families},
            launch=self._launch(),
            cost=self._cost(),
            starts=self._starts(),
        )

    def _at(self, table: str, key: str = "", repetition: int = 0) -> str:
        line = self.lines.line(table, key, repetition)
        return f"{self.path}:{line}" if line else str(self.path)

    def _table(self, owner: Mapping[str, Any], key: str, header: str) -> dict[str, Any]:
        table = owner.get(key, {})
        if not isinstance(table, dict):
            raise UsageError(f"{self._at('', key)}: {header} must be a table, written [{header}]")
        return table

    def _repeated(self, key: str) -> list[dict[str, Any]]:
        entries = self.tables.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise UsageError(f"{self._at('', key)}: {key} must be written [[{key}]], once for each")
        return entries

    def _raise_unknown_key(self, where: str, key: str, known: Iterable[str]) -> None:
        raise UsageError(f"{where}: unknown key {key!r}; known are {', '.join(known)}{did_you_mean(key, known)}")

    # --- knobs

    def _knobs(self) -> tuple[Knob, ...]:
        """Return the knobs, family first; a space that names no family has one, named as the kernel."""
        table = self._table(self.tables, "knobs", "knobs")
        if "family" not in table:
            table = {"family": [self.kernel], **table}
        if len(table) > _MAX_KNOBS:
            raise UsageError(f"{self._at('knobs')}: the space has {len(table)} knobs; at most {_MAX_KNOBS}")
        if next(iter(table)) != "family":
            raise UsageError(f'{self._at("knobs")}: the first knob must be family, as in family = ["scalar", "wmma"]')
        knobs = tuple(self._knob(name, entry) for name, entry in table.items())
        if knobs[0].kind != "text" or knobs[0].when or knobs[0].default is not None:
            raise UsageError(f"{self._at('knobs', 'family')}: family must be a plain list of names in quotes")
        return knobs

    def _knob(self, name: str, entry: Any) -> Knob:
        where = self._at("knobs", name)
        self._name(name, where, "knob")
        when = default = None
        if isinstance(entry, dict):
            for key in entry:
                if key not in ("values", "when", "default"):
                    self._raise_unknown_key(where, key, ("values", "when", "default"))
            if "when" in entry:
                when = self._expression(entry["when"], where)
            default = entry.get("default")
            entry = entry.get("values")
        if not isinstance(entry, list):
            raise UsageError(f"{where}: knob {name} needs a list of values, as in {name} = [32, 64]")
        self._check_domain(name, entry, where)
        knob = Knob(name, tuple(entry), when, default)
        if default is not None and knob.index(default) is None:
            raise UsageError(f"{where}: knob {name} has the default {default!r}; {domain_error(knob)}")
        return knob

    def _check_domain(self, name: str, values: list[Any], where: str) -> None:
        if not values:
            raise UsageError(f"{where}: knob {name} has an empty domain; give it at least one value")
        if len(values) > _MAX_VALUES:
            raise UsageError(f"{where}: knob {name} has {len(values)} values; at most {_MAX_VALUES}")
        types = {type(v) for v in values}
        if not types <= {bool, int, float, str}:
            raise UsageError(f"{where}: knob {name} may hold integers, decimals, text or true/false only")
        if len(types) > 1:
            mixed = " and ".join(sorted(t.__name__ for t in types))
            raise UsageError(f"{where}: knob {name} mixes {mixed}; its values must be of one type")
        for value in values:
            if (isinstance(value, float) and not math.isfinite(value)) or (
                types == {int} and abs(value) > _LARGEST_VALUE
            ):
                raise UsageError(f"{where}: knob {name} has the value {value}; numbers must be finite and at most 2^53")
        counts = Counter(values)
        if len(counts) < len(values):
            twice = next(value for value in values if counts[value] > 1)
            raise UsageError(f"{where}: knob {name} lists {twice!r} twice; list every value once")

    def _name(self, name: str, where: str, what: str) -> None:
        if not _NAME.match(name) or name in _RESERVED:
            raise UsageError(f"{where}: {name!r} cannot name a {what}; use letters, digits and _, and no keyword")
        if name in self.variables:
            raise UsageError(f"{where}: {what} {name} has the name of a problem variable; rename it")

    def _check_when(self, knob: Knob, lets: Mapping[str, Mapping[str, Expression]]) -> None:
        """Require that a knob's `when` depends only on knobs declared before it."""
        if not knob.when:
            return
        self._known(knob.when)
        order = [k.name for k in self.knobs]
        for family in self.families:
            for name in dependencies(knob.when, {**lets[""], **lets[family]}):
                if name in order and order.index(name) >= order.index(knob.name):
                    raise UsageError(
                        f"{knob.when.where}: the when of {knob.name} depends on {name}, which is not declared before "
                        f"it; declare {name} first"
                    )

    # --- expressions

    def _expression(self, value: Any, where: str) -> Expression:
        if isinstance(value, str):
            return Expression.parse(value, where)
        if isinstance(value, int | float):
            return Expression.parse(repr(value), where)
        raise UsageError(f"{where}: an expression must be text in quotes or a number, not {type(value).__name__}")

    def _known(self, expression: Expression) -> Expression:
        for name in sorted(expression.names - self.names):
            what = "GPU variable" if name.startswith("gpu.") else "knob, let or problem variable"
            hint = did_you_mean(name, self.names)
            raise UsageError(f"{expression.where}: `{expression.text}` names {name}, which is not a {what}{hint}")
        return expression

    def _lets(self) -> dict[str, dict[str, Expression]]:
        """Return the lets by family, with those of every family under ''. Raises on clashing names and cycles."""
        table = self._table(self.tables, "let", "let")
        groups: dict[str, dict[str, Any]] = {"": {k: v for k, v in table.items() if not isinstance(v, dict)}}
        for key, group in table.items():
            if isinstance(group, dict):
                groups[self._family(key, "let")] = group
        lets: dict[str, dict[str, Expression]] = {f: {} for f in ("", *self.families)}
        knobs = {k.name for k in self.knobs}
        for family, group in groups.items():
            header = f"let.{family}" if family else "let"
            for name, value in group.items():
                where = self._at(header, name)
                self._name(name, where, "let")
                if name in knobs or (family and name in lets[""]):
                    other = "a knob" if name in knobs else "a let of every family"
                    raise UsageError(f"{where}: let {name} has the name of {other}; rename one of the two")
                lets[family][name] = self._expression(value, where)
        for family in self.families:
            _check_acyclic(lets[""] | lets[family])
        return lets

    def _family(self, key: str, table: str) -> str:
        if key not in self.families:
            raise UsageError(
                f"{self._at(table, key)}: [{table}.{key}] names no family; known are {', '.join(self.families)}"
                f"{did_you_mean(key, self.families)}"
            )
        return key

    # --- the other tables

    def _constraints(self) -> tuple[Constraint, ...]:
        constraints = []
        for i, entry in enumerate(self._repeated("constraint")):
            where = self._at("constraint", "", i)
            for key in entry:
                if key not in ("expr", "when", "why"):
                    self._raise_unknown_key(self._at("constraint", key, i), key, ("expr", "when", "why"))
            if "expr" not in entry:
                raise UsageError(f"{where}: the constraint has no expr; say what must hold")
            why = entry.get("why")
            if not isinstance(why, str) or not why.strip():
                raise UsageError(f"{where}: the constraint has no why; say in one clause what breaks without it")
            expr = self._known(self._expression(entry["expr"], self._at("constraint", "expr", i)))
            when = entry.get("when")
            if when is not None:
                when = self._known(self._expression(when, self._at("constraint", "when", i)))
            constraints.append(Constraint(expr, when, why))
        return tuple(constraints)

    def _launch(self) -> dict[str, LaunchRule]:
        table, header_of = self._by_family("launch")
        for key in table:
            self._family(key, "launch")
        behind = self._kernels()
        rules = {}
        for family in self.families:
            header = header_of(family)
            if family not in table:
                raise UsageError(f"{self.path}: family {family} lacks [{header}] with threads, grid and shared; add it")
            rule = self._launch_rule(self._table(table, family, header), header)
            rules[family] = replace(rule, then=behind.get(family, ()))
        return rules

    def _kernels(self) -> dict[str, tuple[tuple[str, LaunchRule], ...]]:
        """Return the rules of all kernels but the first, by family.

        They stand in [kernels.ENTRY] where there is one family, else in [kernels.FAMILY.ENTRY].
        """
        table = self._table(self.tables, "kernels", "kernels")
        single = len(self.families) == 1 and not table.keys() & set(self.families)
        by_family = {self.families[0]: table} if single else table
        found = {}
        for family in by_family:
            header = "kernels" if single else f"kernels.{self._family(family, 'kernels')}"
            own = self._table(by_family, family, header)
            for entry in own:
                self._name(entry, self._at(f"{header}.{entry}"), "kernel")
            found[family] = tuple(
                (entry, self._launch_rule(self._table(own, entry, f"{header}.{entry}"), f"{header}.{entry}"))
                for entry in own
            )
        return found

    def _launch_rule(self, rule: Mapping[str, Any], header: str) -> LaunchRule:
        for key in rule:
            if key not in ("threads", "grid", "shared"):
                self._raise_unknown_key(self._at(header, key), key, ("threads", "grid", "shared"))
        for key in ("threads", "grid", "shared"):
            if key not in rule:
                raise UsageError(f"{self._at(header)}: [{header}] has no {key}; it needs threads, grid and shared")
        grid = rule["grid"]
        if not isinstance(grid, list) or len(grid) != 3:
            raise UsageError(f"{self._at(header, 'grid')}: grid must be a list of three: the blocks in x, y and z")
        x, y, z = (self._known(self._expression(e, self._at(header, "grid"))) for e in grid)
        threads = rule["threads"] if isinstance(rule["threads"], list) else [rule["threads"], 1, 1]
        if len(threads) != 3:
            raise UsageError(
                f"{self._at(header, 'threads')}: threads must be one expression, the threads of a block, or a list "
                "of three: those in x, y and z"
            )
        block_x, block_y, block_z = (self._known(self._expression(e, self._at(header, "threads"))) for e in threads)
        shared = self._known(self._expression(rule["shared"], self._at(header, "shared")))
        return LaunchRule((block_x, block_y, block_z), (x, y, z), shared)

    def _by_family(self, key: str) -> tuple[dict[str, Any], Callable[[str], str]]:
        """Return [launch] or [cost] by family, and a function from a family to the header of its table.

        Where there is one family its name may be left out.
        """
        table = self._table(self.tables, key, key)
        if table and len(self.families) == 1 and not any(isinstance(value, dict) for value in table.values()):
            return {self.families[0]: table}, lambda family: key
        return table, lambda family: f"{key}.{family}"

    def _cost(self) -> dict[str, dict[str, Expression]]:
        table, header_of = self._by_family("cost")
        return {
            self._family(family, "cost"): {
                name: self._known(self._expression(value, self._at(header_of(family), name)))
                for name, value in self._table(table, family, header_of(family)).items()
            }
            for family in table
        }

    def _starts(self) -> tuple[tuple[str, dict[str, Value]], ...]:
        starts = []
        knobs = {k.name: k for k in self.knobs}
        for i, entry in enumerate(self._repeated("start")):
            for name, value in entry.items():
                where = self._at("start", name, i)
                if name not in knobs:
                    raise UsageError(f"{where}: the start names {name}, which is not a knob{did_you_mean(name, knobs)}")
                if knobs[name].index(value) is None:
                    raise UsageError(f"{where}: the start has {name} = {value!r}; {domain_error(knobs[name])}")
            if len(self.families) == 1:
                entry = {"family": self.families[0], **entry}
            starts.append((self._at("start", "", i), {n: entry[n] for n in knobs if n in entry}))
        return tuple(starts)


def _check_acyclic(lets: Mapping[str, Expression]) -> None:
    for name, let in lets.items():
        if name in dependencies(let, lets):
            raise UsageError(f"{let.where}: let {name} is defined in terms of itself: `{let.text}`")
