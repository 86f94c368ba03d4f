"""JSON on stdout: one object, with the version of its shape first, and lists under the plural of what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from textwrap import indent

import click

from evoengine.views.encoding import SCHEMA, jsonable


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
