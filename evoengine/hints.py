"""Hints for the user: a command to paste, or the name that was probably meant."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path

from evoengine.errors import UsageError
from evoengine.text import without_passwords


def hint(command: str, *arguments: object, **options: object) -> str:
    """Return a command such as `evoengine search --db 'my runs/evo.db'`, quoted for a shell.

    An option that is None is left out.
    """
    words = ["evoengine", command, *map(str, arguments)]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name}", without_passwords(str(value))]
    return " ".join(shlex.quote(word) for word in words)


def did_you_mean(name: str, known: Iterable[object]) -> str:
    """Return the end of a sentence, `; did you mean search?`; empty where no known name is near."""
    by_lower = {str(candidate).lower(): str(candidate) for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def nearest_folder(missing: Path) -> str:
    """Return `; did you mean runs?` where a folder of a similar name exists beside the missing one."""
    beside = missing.parent
    return did_you_mean(missing.name, (p.name for p in beside.iterdir() if p.is_dir())) if beside.is_dir() else ""


def require_word(value: str, known: Iterable[str]) -> None:
    """Raise UsageError for a word that is none of the known ones."""
    if value not in (words := tuple(known)):
        raise UsageError(f"{value!r} is not one of {', '.join(words)}{did_you_mean(value, words)}")
