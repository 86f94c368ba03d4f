"""The consoles of rich that commands print on: a module of its own, because importing rich takes time."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from evoengine.text import plain_lines


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
