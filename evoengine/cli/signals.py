"""Ctrl-C and SIGTERM: the first ends a command with what there is."""

from __future__ import annotations

import signal
from collections.abc import Callable


def stop_on_signal(stop: Callable[[], None]) -> Callable[[], bool]:
    """The first Ctrl-C or SIGTERM ends with what there is, a second Ctrl-C at once; gives whether there was one."""
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        seen.append(number)
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return lambda: bool(seen)
