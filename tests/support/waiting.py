"""Whether another process lives, and waiting for what it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
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


def is_alive(pid: int) -> bool:
    """Return whether the process runs. One that was adopted and not reaped yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
