"""What is shown of records, shared by the command line and the service: the shapes of JSON, and tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from typing_extensions import TypedDict

from evoengine.records import named

View = TypeVar("View")
SCHEMA = 1
"""raised when a field is removed or changes its meaning; new fields may be added at any time"""
EVENT_SCHEMA = 1
"""version of the events of --log-json, raised by the same rule"""
OF_A_TRIAL = (
    "trial", "run", "outcome", "reason", "config", "tflops", "tflops_kind", "median_us", "vs_baseline", "registers",
    "spill_bytes", "shared_bytes",
)  # fmt: skip # a table
"""fields of a trial's JSON in its event; docs/ledger.md describes them"""


class AnswerView(TypedDict):
    """An answer of a command or of the service. `schema` is the version of its shape."""

    schema: int


def fields_of(record: object, view: type[View]) -> View:
    """Return the fields of a record that a view names, in its order. mypy does not compare their types."""
    return cast("View", named(record, view.__annotations__))


def utc(time: datetime | None) -> str | None:
    """Return a time as ISO 8601 in UTC, to the millisecond."""
    return None if time is None else time.astimezone(UTC).isoformat(timespec="milliseconds")


def jsonable(value: Any) -> Any:
    """Convert a value of a record to one that JSON can hold; a record becomes an object of its fields."""
    if isinstance(value, Mapping):
        return {name: jsonable(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [jsonable(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, datetime):
        return utc(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
