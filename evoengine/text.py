"""Make untrusted text safe to show in a terminal, a page or a comment.

Reasons, devices, knobs, compilers' warnings and origins of runs may hold anything: escape sequences, a line feed that
begins a line of its own, marks that turn the reading direction, Markdown. `Cc`, `Cf`, `Zl` … are the general
categories of Unicode; `str.isprintable` is false for just those that show nothing or do something.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Sequence

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
    """Return numbers of trials in order with neighbours joined: "trials 1 to 4, 7"."""
    known = set(numbers)
    return f"{'trial' if len(known) == 1 else 'trials'} {ranges(known, ' to ', ', ')}"


def ranges(numbers: Iterable[int], joint: str, between: str) -> str:
    """Return numbers in order with neighbours joined, such as 1-4,7."""
    known = set(numbers)
    starts = sorted(n for n in known if n - 1 not in known)
    ends = sorted(n for n in known if n + 1 not in known)
    return between.join(f"{a}" if a == b else f"{a}{joint}{b}" for a, b in zip(starts, ends, strict=True))


def number(value: float, digits: int = DIGITS) -> str:
    """Return a number with so many significant digits; those of DIGITS have all digits before the decimal point."""
    if digits < DIGITS and value:
        value = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def rounded(value: float, digits: int) -> str:
    """Return a number with at most so many significant digits and DIGITS, without zeros behind its decimals."""
    kept = float(f"{value:.{digits}g}")
    return f"{kept:,.0f}" if abs(kept) >= 10 ** (DIGITS - 1) else f"{kept:.{DIGITS}g}"


# Remove passwords of database URLs from everything that is stored or shown.

HIDDEN = "***"
_URL = r"([A-Za-z][\w+.-]*://)({rest})"
_IN_TEXT, _WHOLE = (re.compile(_URL.format(rest=rest), re.DOTALL) for rest in (r"\S*", ".*"))
_PARAMETER = re.compile(r"(?i)(\b\w*(?:password|passwd|secret|token)=)[^&\s]*")
"""libpq takes password, sslpassword and oauth_client_secret as parameters of a URL, too"""


def hide_passwords(text: str) -> str:
    """Replace the password of every URL, and every parameter that is called a password, by HIDDEN."""
    return _hidden(text, _IN_TEXT)


def without_passwords(url: str) -> str:
    """Return a URL without passwords, which are then read from elsewhere (PGPASSWORD, ~/.pgpass)."""
    hidden = re.escape(HIDDEN)
    return re.sub(rf"\w+={hidden}&?", "", _hidden(url, _WHOLE)).replace(f":{HIDDEN}", "").rstrip("?&")


def command_line(arguments: Sequence[str] | None = None) -> str:
    r"""Return this process's command line, or that of `arguments`, without passwords.

    Bytes that are not UTF-8, as in a file's name, are written `\xff`, because a database stores text.
    """
    given = sys.argv if arguments is None else arguments
    return " ".join(_hidden(os.fsencode(each).decode("utf-8", "backslashreplace"), _WHOLE) for each in given)


def _hidden(text: str, url: re.Pattern[str]) -> str:
    return _PARAMETER.sub(rf"\1{HIDDEN}", url.sub(lambda found: found[1] + _without_password(found[2]), text))


def _without_password(rest: str) -> str:
    """Return what follows `://` without the password, which may contain an unescaped @ or slash."""
    login, at, place = rest.rpartition("@")
    if at:
        user, colon, _ = login.partition(":")
        return f"{user}:{HIDDEN}@{place}" if colon else rest
    host, colon, port = rest.partition("/")[0].partition(":")
    is_port = not port or port[0].isdigit() or host.startswith("[")
    return rest if is_port else f"{host}:{HIDDEN}"  # user:password, and the host was forgotten
