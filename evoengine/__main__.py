"""The entry point of `evoengine` and `python -m evoengine`. Little is imported before Ctrl-C is handled."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with its code."""
    import gc
    import signal

    # imports create objects that stay: scanned less often for garbage, a command starts a tenth sooner
    gc.set_threshold(50_000)
    sys.unraisablehook = _unraisable
    # the sampler's matrices are small: more threads would slow it down and take cores from the compilers
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from evoengine.cli.main import main

        code = main()
        # a Ctrl-C during Python's own shutdown ends the process at once, without a traceback
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    sys.exit(code)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process on a Ctrl-C raised in a finalizer, which Python would report and ignore."""
    if unraisable.exc_type is KeyboardInterrupt:
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
