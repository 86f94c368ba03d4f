"""Trials as CSV: the fields of their JSON, flat, so that a spreadsheet shows them and runs nothing of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime
from typing import Any

from evoengine.records import Candidate, Policy
from evoengine.text import plain
from evoengine.views.encoding import utc
from evoengine.views.trials import trial_json

FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""what a spreadsheet may take for the beginning of a formula"""
_POLICY = tuple(f.name for f in fields(Policy))
_SUSTAINED = ("tflops", "median_us", *(f"policy.{name}" for name in _POLICY), "sm_mhz", "watts")
NESTED: Mapping[str, Sequence[str]] = {
    "policy": _POLICY,
    "sustained": _SUSTAINED,
    "range_us": ("low", "high"),
}
"""fields that hold others → those, a column each"""


def csv_lines(candidates: Iterable[Candidate], knobs: Sequence[str]) -> Iterator[str]:
    """Yield a line of column names, then a line per candidate. `knobs` are all knobs of their configurations.

    A field that is null in JSON is empty. The items of a list are separated by blanks. Text is on one line, as returned
    by `plain`, and is prefixed with an apostrophe if a spreadsheet would read it as a formula.
    """
    columns: list[str] | None = None
    for candidate in candidates:
        row = _flat(trial_json(candidate), knobs)
        if columns is None:
            columns = list(row)
            yield _line(list(map(_cell, columns)))
        yield _line([_cell(row[name]) for name in columns])


def _flat(found: Mapping[str, Any], knobs: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in found.items():
        if name == "config":
            row |= {f"config.{knob}": value.get(knob) for knob in knobs}
        elif name in NESTED:
            row |= dict.fromkeys(f"{name}.{inner}" for inner in NESTED[name]) | dict(_inner(name, _unpacked(value)))
        else:
            row[name] = value
    return row


def _inner(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a field with the names of their columns."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            found = _unpacked(item)
            yield from _inner(f"{name}.{key}", found) if isinstance(found, Mapping) else [(f"{name}.{key}", found)]
    elif value is not None:
        yield from zip((f"{name}.{inner}" for inner in NESTED[name]), value, strict=True)


def _unpacked(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _cell(value: Any) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return value
    if isinstance(value, datetime):
        return str(utc(value))
    if isinstance(value, Mapping):
        value = [f"{name}={item}" for name, item in value.items()]
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    text = plain(" ".join(map(str, value)) if is_list else str(value))
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def _line(cells: Sequence[str | int | float]) -> str:
    """Return one line of CSV.

    Text is quoted, because a reader that splits at another character must not find a formula behind one.
    """
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_NONNUMERIC).writerow(cells)
    return written.getvalue()
