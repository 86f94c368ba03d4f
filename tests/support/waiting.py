"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds; five minutes are more than the slowest machine takes for what a test waits for."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, "waited five minutes for nothing"
        time.sleep(0.1)
