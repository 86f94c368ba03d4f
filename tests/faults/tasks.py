"""What workers do while something else goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from evoengine.sandbox import worker_process  # so that a keeper which imports this has it ready  # noqa: F401

ORPHANED = "evoengine-worker-0123456789abcdef"
"""a folder that a killed keeper left"""


def double(number: int) -> int:
    Path(os.environ["TMPDIR"], "scratch").write_text("a worker's file")
    return 2 * number


def die_at_first(folder: Path, number: int) -> int:
    """Somebody kills its worker, once, with a process of its own beside it."""
    met = folder / "died"
    if not met.exists():
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        met.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number
