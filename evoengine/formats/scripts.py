"""What a script says of its kernel, learned by running it in a child process under a time limit."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.untrusted import parse_json, read_limited_text

RUNNER = Path(__file__).with_name("script_runner.py")
SCRIPT_SECONDS = 120.0
END_SECONDS = 10.0
"""for ending what a script has started, which may start more"""
MARK = "EVOENGINE_SCRIPT"
"""a variable that whatever a script starts inherits, in whatever session it is"""
MOST_NOTES = 16 << 20
"""bytes that a script may leave: the text of a kernel and some numbers"""


def run_script(kind: str, script: Path, seconds: float = SCRIPT_SECONDS) -> list[dict[str, Any]]:
    """What script_runner wrote down, a record for each call; some even where the script failed behind them.

    Raises UsageError where there is none: with the script's last line of output, or because it took too long.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}")
    with tempfile.TemporaryDirectory(prefix="evoengine-script-") as folder:
        out = Path(folder, "calls.json")
        said, late = _run([sys.executable, str(RUNNER), kind, str(script), str(out)], seconds)
        if not out.exists():
            why = f"it did not end after {seconds:g} s" if late else said or "it ended without a word"
            raise UsageError(f"{script} did not come to what there is to import: {why}")
        try:
            found: list[dict[str, Any]] = parse_json(read_limited_text(out, MOST_NOTES))
        except (OSError, ValueError) as error:
            raise UsageError(f"what {script} says of its kernel cannot be taken over: {error}") from None
        return found


def _run(command: list[str], seconds: float) -> tuple[str, bool]:
    """The last line that the process printed as an error, and whether it was cut off."""
    mark = secrets.token_hex(16)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", MARK: mark}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end_marked(f"{MARK}={mark}".encode())
            process.wait()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return (lines[-1][:300] if lines else ""), late


def _end_marked(mark: bytes) -> None:
    """Ends the script with whatever it has started."""
    end = time.monotonic() + END_SECONDS
    while (found := list(_marked(mark))) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: bytes) -> Iterator[int]:
    """Processes with that variable; what has ended and waits to be taken in has none any more."""
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                yield int(name)
