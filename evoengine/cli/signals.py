"""Ctrl-C, SIGTERM and a terminal that goes away: the first ends a command with what there is."""

from __future__ import annotations

import signal
from collections.abc import Callable


def stop_on_signal(stop: Callable[[], None]) -> Callable[[], bool]:
    """Have the first Ctrl-C, SIGTERM or SIGHUP end the command with what there is, and a second Ctrl-C at once; return
    whether there was one.

    SIGHUP or SIGINT that the parent has set to be ignored, as nohup and scripts do for what runs in the background,
    stays ignored.
    """
    seen: list[int] = []
    heeded = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]

    def handle(number: int, frame: object) -> None:
        seen.append(number)
        stop()
        if signal.SIGINT in heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for each in (signal.SIGTERM, *heeded):
        signal.signal(each, handle)
    return lambda: bool(seen)
