"""Exceptions, distinguished by what the user has to do about them.

    EvoengineError
    ├── UsageError      exit 2: an argument, a file or a setting is wrong
    ├── MachineError    exit 3: something is missing on this machine (a compiler, a GPU, a driver)
    │     └── ToolDied  a program that was started for a task died by a signal
    └── NothingFound    exit 1: no error, but no result

The message is one sentence that names what was wrong and what would be right. A failing *candidate* is none of these:
it is data, recorded with an `Outcome` and a reason.
"""

from evoengine.text import one_line


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
