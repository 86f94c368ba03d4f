"""What a person sees: the consoles, lines for people, and a figure in a line."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from evoengine.lineage import Bred
from evoengine.records import Candidate, Kind, Measurement, Value
from evoengine.terms import range_us
from evoengine.text import DIGITS, number, plain, plain_lines


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

MARK = {Kind.MEASURED: "", Kind.ESTIMATED: " est.", Kind.RECORDED: " rec."}
BY_FORMULA = "est.* the model could not read the binary (evoengine show says why): by formula, behind all predictions"
TIED = "= is tied with the first: the model's error is larger than what lies between them"
FROM_FILES = "imp. came in by evoengine import: correct and fast by what its file says"


def say(text: str, style: str | None = None) -> None:
    """Print one line on stderr."""
    stderr.print(plain(text), style=style, soft_wrap=True)


@lru_cache(maxsize=4096, typed=True)
def short(value: Value) -> str:
    return str(value).lower()


def digits_of(m: Measurement) -> int:
    """Return how many significant digits of a figure mean something: of a prediction those above its error."""
    ends = range_us(m.terms)
    if ends is None or ends[1] <= m.compared_us:
        return DIGITS
    return min(DIGITS, max(2, 1 + math.ceil(-math.log10(ends[1] / m.compared_us - 1))))


def figure(candidate: Candidate) -> str:
    """Return a figure with its unit and the mark of its kind: `412.5 TFLOPS est.`, or the time if the number of
    operations is unknown."""
    m = candidate.measurement
    if m is None:
        return "–"
    mark = kind_mark(candidate)
    digits = digits_of(m)
    if m.tflops is not None:
        return f"{number(m.tflops, digits)} TFLOPS{mark}"
    return f"{number(m.compared_us, digits)} µs{mark}"


def kind_mark(candidate: Bred) -> str:
    """Return the mark that follows a figure: its kind, and whether it was imported. A measured figure has no mark."""
    m = candidate.measurement
    if m is None:
        return ""
    return MARK[m.kind] + "*" * m.by_formula + " imp." * (candidate.imported_from is not None)


def best_line(best: Candidate | None) -> str:
    if best is None:
        return "best so far: none yet"
    binary, shared = best.binary, best.shared_bytes
    found = f"best so far  #{best.trial}  {figure(best)}   "
    if binary and shared is not None:
        found += f"{binary.registers} reg  {binary.spill_bytes} spill  {shared / 1024:.0f} KB   "
    return found + " ".join(short(v) if k == "family" else f"{k}={short(v)}" for k, v in best.config.items())
