"""The consoles, and lines for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from evoengine.text import plain, plain_lines


class Output(Console):
    """A console that shows text as text: no markup, no emoji names, and control characters as `plain_lines` writes
    them."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, *, style: str | Style = "", **_: Any) -> Text:
        return Text(plain_lines(text), style=style)


stderr = Output(stderr=True)
stdout = Output()
if not stdout.is_terminal:
    # into a pipe or a file a table goes unbroken, however wide
    stdout.width = 100_000


def say(text: str, style: str | None = None) -> None:
    """Print one line on stderr."""
    stderr.print(plain(text), style=style, soft_wrap=True)
