"""Make untrusted text safe to show in a terminal, a page or a comment.

Reasons, devices, knobs, compilers' warnings and origins of runs may hold anything: escape sequences, a line feed that
begins a line of its own, marks that turn the reading direction, Markdown. `Cc`, `Cf`, `Zl` … are the general
categories of Unicode; `str.isprintable` is false for just those that show nothing or do something.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_MARKDOWN = re.compile(r"[\\`*_\[\]<>!|~&@$]|:(?=//)|(?<=www)\.", re.IGNORECASE)
"""what begins emphasis, code, a link, an image, HTML, an entity, a table's cell or GitHub's bare links
(CommonMark 2.4: a backslash before ASCII punctuation makes it that character)"""
DIGITS = 4
"""significant digits of a displayed number"""


def plain(text: object) -> str:
    r"""Return text on one line, with non-printing characters as escapes such as `\x1b`, `\n` or `\u202e`."""
    text = str(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def printable(text: str, most: int = 200) -> str:
    """Return text on one line of at most `most` characters, with control characters escaped."""
    shown = plain(text[: most + 1])
    return f"{shown[: most - 1]}…" if len(shown) > most else shown


def one_line(text: str, most: int = 1000) -> str:
    """Return text as `printable` does, but keep both the beginning and the end of a long one.

    The remedy is at the end.
    """
    half = most // 2
    shown = plain(text if len(text) <= most else f"{text[:half]}…{text[-half:]}")
    return shown if len(shown) <= 2 * most else f"{shown[:half]}…{shown[-half:]}"


def plain_lines(text: object) -> str:
    """Return text as `plain` does, keeping line breaks; tabs become spaces."""
    return "\n".join(plain(line.expandtabs()) for line in str(text).split("\n"))


def markdown(text: object, longest: int | None = None) -> str:
    """Return one line that a Markdown renderer shows as `plain` returns it, cut to `longest` characters."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", plain(text))
    if longest is None or len(escaped) <= longest:
        return escaped
    cut = escaped[:longest]
    backslashes = len(cut) - len(cut.rstrip("\\"))
    # half an escape would take the character after the cut
    return cut[:-1] if backslashes % 2 else cut


def _escaped(character: str) -> str:
    # a line feed has an escape of its own, other characters their code point
    return character.encode("unicode_escape").decode("ascii")


def spans(numbers: Iterable[int]) -> str:
    """Return numbers in order with neighbours joined: "trials 1 to 4, 7"."""
    known = set(numbers)
    starts = sorted(n for n in known if n - 1 not in known)
    ends = sorted(n for n in known if n + 1 not in known)
    parts = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    return f"{'trial' if len(known) == 1 else 'trials'} {', '.join(parts)}"


def number(value: float, digits: int = DIGITS) -> str:
    """Return a number with so many significant digits; those of DIGITS have all digits before the decimal point."""
    if digits < DIGITS and value:
        value = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def rounded(value: float, digits: int) -> str:
    """Return a number with at most so many significant digits and DIGITS, without zeros behind its decimals."""
    kept = float(f"{value:.{digits}g}")
    return f"{kept:,.0f}" if abs(kept) >= 10 ** (DIGITS - 1) else f"{kept:.{DIGITS}g}"
