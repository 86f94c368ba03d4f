"""Ctrl-C, SIGTERM and a terminal that goes away: the first ends a command with what there is."""

from __future__ import annotations

import signal
from collections.abc import Callable


def stop_on_signal(stop: Callable[[], None]) -> Callable[[], bool]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends with what there is, a second Ctrl-C at once; gives whether there was
    one. Under nohup, SIGHUP stays ignored."""
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        seen.append(number)
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handle)
    return lambda: bool(seen)
