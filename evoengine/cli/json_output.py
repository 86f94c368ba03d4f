"""JSON on stdout: one object, with the version of its shape first, and lists under the plural of what they hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from textwrap import indent
from typing import Any

import click

from evoengine.times import utc

SCHEMA = 1
"""goes up where a field is taken away or gets another meaning; new fields may come at any time"""


def print_json(**fields: object) -> None:
    """Print an object with `fields`. Times are ISO 8601 in UTC; NaN and infinities are "nan", "inf" and "-inf"."""
    click.echo(json.dumps({"schema": SCHEMA, **jsonable(fields)}, indent=2, allow_nan=False))


def print_json_list(plural: str, items: Iterable[object]) -> None:
    """Print an object with one list, writing items as they arrive, because the list may exceed memory."""
    click.echo(f'{{\n  "schema": {SCHEMA},\n  "{plural}": [', nl=False)
    between = ""
    for item in items:
        text = json.dumps(jsonable(item), indent=2, allow_nan=False)
        click.echo(f"{between}\n{indent(text, '    ')}", nl=False)
        between = ","
    click.echo("\n  ]\n}" if between else "]\n}")


def jsonable(value: Any) -> Any:
    """Convert a value of a record to one that JSON can hold."""
    if isinstance(value, Mapping):
        return {name: jsonable(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [jsonable(item) for item in value]
    if isinstance(value, datetime):
        return utc(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
