"""Exceptions, distinguished by what the user has to do about them.

    EvoengineError
    ├── UsageError      exit 2: an argument, a file or a setting is wrong
    ├── MachineError    exit 3: something is missing on this machine (a compiler, a GPU, a driver)
    │     └── ToolDied  a program that was started for a task died by a signal
    └── NothingFound    exit 1: no error, but no result

The message is one sentence that names what was wrong and what would be right. A failing *candidate* is none of these:
it is data, recorded with an `Outcome` and a reason.
"""

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path

from evoengine.text import one_line, without_passwords


class EvoengineError(Exception):
    exit_code = 1

    def __init__(self, message: str) -> None:
        """Store the message as one line, truncated where it is long: it may quote a file of others."""
        super().__init__(one_line(message))


class NothingFound(EvoengineError):
    exit_code = 1


class UsageError(EvoengineError):
    exit_code = 2


class MachineError(EvoengineError):
    exit_code = 3


class ToolDied(MachineError):
    """A compiler, or another program of a task, died by a signal that none of its limits explains.

    In a worker it counts as the death of the worker (`evoengine.sandbox.deaths`).
    """

    def __init__(self, message: str, how: str) -> None:
        """`how` is the signal's name."""
        super().__init__(message)
        self.how = how


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
    """Return the end of a sentence, `; did you mean search?`; empty if no known name is near."""
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
