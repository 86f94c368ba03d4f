"""Write the output of commands: lines and tables for people, and JSON for programs.

JSON is one object, with the version of its shape first, and lists under the plural of what they hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from textwrap import indent
from typing import TYPE_CHECKING

import click

from evoengine.text import plain
from evoengine.views import SCHEMA, AnswerView, jsonable

if TYPE_CHECKING:
    from rich.console import RenderableType


def say(text: str) -> None:
    """Print one line on stderr."""
    from evoengine.cli.console import stderr

    stderr.print(plain(text), soft_wrap=True)


def display(*parts: RenderableType, soft_wrap: bool = False) -> None:
    """Print tables and text on stdout."""
    from evoengine.cli.console import stdout

    stdout.print(*parts, soft_wrap=soft_wrap)


def print_json(answer: AnswerView) -> None:
    """Print an answer. Times are ISO 8601 in UTC; NaN and infinities are "nan", "inf" and "-inf"."""
    click.echo(json.dumps(jsonable(answer), indent=2, allow_nan=False))


def print_json_list(plural: str, items: Iterable[object]) -> None:
    """Print an object with one list, writing items as they arrive, because the list may exceed memory."""
    click.echo(f'{{\n  "schema": {SCHEMA},\n  "{plural}": [', nl=False)
    between = ""
    for item in items:
        text = json.dumps(jsonable(item), indent=2, allow_nan=False)
        click.echo(f"{between}\n{indent(text, '    ')}", nl=False)
        between = ","
    click.echo("\n  ]\n}" if between else "]\n}")
