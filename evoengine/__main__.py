"""`evoengine` and `python -m evoengine`. Little is imported before Ctrl-C is dealt with."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    import signal

    sys.unraisablehook = _again
    try:
        from evoengine.cli.main import main

        code = main()
        # what Python does at its end says nothing to anybody who is tired of waiting for it
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    sys.exit(code)


def _again(unraisable: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C that came in a finalizer, which Python reports and drops: the next line of the program gets it."""
    if unraisable.exc_type is KeyboardInterrupt:
        import _thread

        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
