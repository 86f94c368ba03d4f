"""A kernel as plain CUDA text with `#define` knobs: without a template language, it also compiles by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from evoengine.errors import UsageError
from evoengine.records import Value
from evoengine.sandbox.untrusted import read_limited_text

_COMMENT_OR_LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def defined(path: Path, values: Mapping[str, Value]) -> str:
    """Return the file's text after a `#define` for every value whose name it uses.

    Its own definitions of those names are removed. Lines keep their numbers by `#line`. A name that occurs only in
    comments gets no definition, so that equal kernels have equal text. Raises UsageError if the file cannot be read, or
    if a value is not a single line.
    """
    try:
        text = read_limited_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as text: {error}") from None
    used = set(re.findall(r"[A-Za-z_]\w*", _COMMENT_OR_LITERAL.sub(" ", text)))
    values = {name: value for name, value in values.items() if name in used}
    lines = "".join(f"#define {name} {_spelled(path, name, value)}\n" for name, value in values.items())
    return f"{lines}#line 1\n{_without_own(text, values)}"


def _spelled(path: Path, name: str, value: Value) -> str:
    if isinstance(value, bool):
        return str(int(value))
    spelled = str(value)
    if re.search(r"[\r\n\\]", spelled):
        raise UsageError(
            f"the knob {name} of {path} has the value {spelled!r}; a #define takes a single line without \\"
        )
    return spelled


def _without_own(text: str, values: Mapping[str, Value]) -> str:
    """Blank `#define NAME …` and `#undef NAME`, also under conditions: the search decides the value."""
    if not values:
        return text
    names = "|".join(map(re.escape, values))
    own = re.compile(
        rf"^[ \t]*#[ \t]*(?:define|undef)[ \t]+(?:{names})\b(?!\()(?:[^\n\\]|\\.)*", re.MULTILINE | re.DOTALL
    )
    return own.sub(lambda match: "\n" * match[0].count("\n"), text)
