"""Run a script in a child process under a time limit, and return its description of a kernel."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from evoengine.errors import MachineError, UsageError
from evoengine.sandbox.kept_process import Held, KeptProcess
from evoengine.sandbox.untrusted import parse_json, read_limited_text

RUNNER = Path(__file__).with_name("script_runner.py")
SCRIPT_SECONDS = 120.0
HELD = Held(processes=256, bytes=16 << 30)
"""generous, since a script creates the arrays on which its kernel is tuned"""
TAIL_BYTES = 2000
MAX_NOTES = 16 << 20
"""largest description in bytes: the text of a kernel and some numbers"""


def run_script(kind: str, script: Path, seconds: float = SCRIPT_SECONDS) -> list[dict[str, Any]]:
    """Run a script under script_runner and return the recorded calls, also those made before a failure.

    Raises UsageError if there are none: with the last line that the script printed, or because it took too long.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}")
    with tempfile.TemporaryFile() as notes:  # nameless, so that nothing is left if this process is killed
        said, late = _run([sys.executable, str(RUNNER), kind, str(script.resolve())], notes.fileno(), seconds)
        if not os.fstat(notes.fileno()).st_size:
            why = f"it did not end after {seconds:g} s" if late else said or "it ended without a message"
            raise UsageError(f"{script} described no kernel to import: {why}")
        try:
            text = read_limited_text(Path(f"/proc/self/fd/{notes.fileno()}"), MAX_NOTES)
            found: list[dict[str, Any]] = parse_json(text)
        except (OSError, ValueError) as error:
            raise UsageError(f"what {script} says of its kernel cannot be taken over: {error}") from None
        return found


def _run(command: list[str], notes: int, seconds: float) -> tuple[str, bool]:
    """Return the last line that the process printed as an error, and whether it was stopped. All its children end too.

    `notes` is an open file whose number is passed as the last argument. Raises MachineError if no process can be
    started.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    try:
        process = KeptProcess(HELD, [*command, str(notes)], environment=environment, fds=[notes])
    except OSError as error:
        raise MachineError(f"a process for the script cannot be started: {error}") from error
    try:
        process.wait(seconds)
        late = process.exit_code(wait=False) is None
        lines = process.output_tail(TAIL_BYTES).strip().splitlines()
    finally:
        process.close()
    return process.why or (lines[-1][:300] if lines else ""), late
