"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Held = TypeVar("Held")


def wait_for(condition: Callable[[], Held]) -> Held:
    """Return what the condition returns once it holds.

    Five minutes are more than the slowest machine takes for what a test waits for.
    """
    end = time.monotonic() + 300
    while not (held := condition()):
        assert time.monotonic() < end, "waited five minutes for nothing"
        time.sleep(0.1)
    return held
