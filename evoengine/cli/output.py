"""Write the output of commands: lines and tables for people, and JSON for programs.

JSON is one object, with the version of its shape first, and lists under the plural of what they hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from textwrap import indent
from typing import Any

import click
from rich.console import Console
from rich.style import Style
from rich.text import Text

from evoengine.text import plain, plain_lines
from evoengine.views import SCHEMA, AnswerView, jsonable


class Output(Console):
    """A console without markup, emoji names or highlighting; `plain_lines` escapes control characters."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, *, style: str | Style = "", **_: Any) -> Text:
        return Text(plain_lines(text), style=style)


stderr = Output(stderr=True)
stdout = Output()
if not stdout.is_terminal:
    # tables in pipes and files keep all columns
    stdout.width = 100_000


def say(text: str, style: str | None = None) -> None:
    """Print one line on stderr."""
    stderr.print(plain(text), style=style, soft_wrap=True)


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
