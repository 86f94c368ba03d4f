"""Waits for a database that is away for a while: a server that restarts, a file that another program has locked.

Who only reads a list is told at once. A search waits, for what it has measured is not to be had again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from evoengine.errors import UsageError

WAIT_SECONDS = 600.0
"""longer than a server takes to restart or to be upgraded"""
RETRY_SECONDS = 0.5


class Unavailable(UsageError):
    """The database cannot be used for now."""


Result = TypeVar("Result")


class Patience:
    """Tries again until the database is back, for `WAIT_SECONDS` at most; says so once, and once that it is over."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo

    def call(self, attempt: Callable[[], Result]) -> Result:
        """Raises Unavailable where the database stays away."""
        began: float | None = None
        while True:
            try:
                result = attempt()
            except Unavailable as error:
                if began is None:
                    began = time.monotonic()
                    self._echo(f"{error}; this search waits, {WAIT_SECONDS / 60:g} minutes at most")
                if time.monotonic() - began >= WAIT_SECONDS:
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                if began is not None:
                    self._echo(f"the ledger is back after {time.monotonic() - began:.0f} s: the search goes on")
                return result


class HasPatience(Protocol):
    patience: Patience | None
    """None of what is told at once"""


Self = TypeVar("Self", bound=HasPatience)
Given = ParamSpec("Given")


def patient(method: Callable[Concatenate[Self, Given], Result]) -> Callable[Concatenate[Self, Given], Result]:
    """Has the whole method tried again, where its object has patience: each is one transaction, which was not made."""

    @wraps(method)
    def call(self: Self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        if self.patience is None:
            return method(self, *args, **kwargs)
        return self.patience.call(lambda: method(self, *args, **kwargs))

    return call
