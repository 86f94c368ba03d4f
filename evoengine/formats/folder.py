"""A kernel's folder before it is written: importers create it, and `evoengine new` writes it to disk."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoengine.errors import MachineError, UsageError
from evoengine.sandbox.kept_process import Held, KeptProcess
from evoengine.sandbox.untrusted import parse_json, read_limited_text
from evoengine.workloads.folder import PROBLEM, SPACE
from evoengine.workloads.folder_reader import require_name

Knobs = Mapping[str, Sequence[int | float | bool | str]]


@dataclass(frozen=True)
class NewFolder:
    """`problem` becomes problem.json, `space` space.toml, `kernel` the file `NAME.cu` or `NAME.cu.j2`."""

    problem: Mapping[str, Any]
    space: str
    kernel: str
    is_template: bool
    remarks: tuple[str, ...] = ()
    """parts that could not be imported, one per line"""

    def files(self) -> dict[str, str]:
        name = self.problem["name"]
        suffix = ".cu.j2" if self.is_template else ".cu"
        problem = dict(self.problem)
        reference, file = problem["reference"], "reference.py"
        problem["reference"] = file
        if isinstance(reference, dict):
            file = reference["file"]
            problem["reference"] = {key: value for key, value in reference.items() if key != "text"}
            reference = reference["text"]
        text = json.dumps(problem, indent=2, ensure_ascii=False) + "\n"
        return {PROBLEM: text, file: reference, SPACE: self.space, f"{name}{suffix}": self.kernel}


@dataclass(frozen=True)
class Rule:
    """A constraint of a space."""

    expr: str
    why: str


def space_text(
    name: str,
    knobs: Knobs,
    rules: Sequence[Rule],
    threads: Sequence[str] | str,
    grid: Sequence[str],
    shared: str = "0",
    starts: Sequence[Mapping[str, Any]] = (),
    comment: str = "",
) -> str:
    """Return a space file of one family."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"kernel = {_toml(name)}", "", "[knobs]"]
    lines += [f"{knob} = [{', '.join(map(_toml, values))}]" for knob, values in knobs.items()]
    for rule in rules:
        lines += ["", "[[constraint]]", f"expr = {_toml(rule.expr)}", f"why = {_toml(rule.why)}"]
    block = _toml(threads) if isinstance(threads, str) else f"[{', '.join(map(_toml, threads))}]"
    lines += [
        "",
        "[launch]",
        f"threads = {block}",
        f"grid = [{', '.join(map(_toml, grid))}]",
        f"shared = {_toml(shared)}",
    ]
    for start in starts:
        lines += ["", "[[start]]", *(f"{knob} = {_toml(value)}" for knob, value in start.items())]
    return "\n".join(lines) + "\n"


def _toml(value: int | float | bool | str) -> str:
    """Return a TOML value.

    TOML reads JSON strings, except escaped characters beyond the basic plane, which are written unescaped.
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def write_folder(made: NewFolder, folder: Path) -> list[Path]:
    """Write the files and return their paths. Raises UsageError if the folder exists or cannot be written."""
    name = require_name(made.problem["name"], str(folder), "a kernel")
    if folder.exists():
        raise UsageError(f"{folder} is there already; choose another name, or move it away")
    written = []
    try:
        folder.mkdir(parents=True)
        for file, text in made.files().items():
            path = folder / file
            path.write_text(text, "utf-8")
            written.append(path)
    except OSError as error:
        raise UsageError(f"the folder of {name} cannot be written to {folder}: {error.strerror}") from None
    return written


def read_text(path: Path, what: str) -> str:
    """Return the contents of a text file. Raises UsageError if it is missing, too large or not text."""
    try:
        return read_limited_text(path)
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} cannot be read: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{what} {path} cannot be read: {reason}") from None


def read_json(path: Path, what: str) -> Any:
    try:
        return parse_json(read_text(path, what))
    except ValueError as error:
        raise UsageError(f"{what} {path} is not valid JSON: {error}") from None


def inside(folder: Path, name: object, what: str) -> Path:
    """Return the path of a file named by another file. Raises UsageError if it is not in the same folder."""
    named = isinstance(name, str) and name and "\0" not in name
    path = (folder / str(name)).resolve() if named else folder.parent
    if not path.is_relative_to(folder.resolve()):
        raise UsageError(f"{what} is {str(name)[:100]!r}; it must be a file in {folder}")
    return path


# Run a script in a child process under a time limit, and return its description of a kernel.

RUNNER = Path(__file__).with_name("script_runner.py")
SCRIPT_SECONDS = 120.0
"""generous, because a script creates the arrays on which its kernel is tuned"""
HELD = Held(processes=256, bytes=16 << 30)
TAIL_BYTES = 2000
MAX_NOTES = 16 << 20
"""limit of a description in bytes: the text of a kernel and some numbers"""


def run_script(
    kind: str, script: Path, seconds: float = SCRIPT_SECONDS, arguments: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run a script under script_runner and return the recorded calls, also those made before a failure.

    Raises UsageError if there are none: with the last line that the script printed, or because it took too long.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}")
    with tempfile.TemporaryFile() as notes:  # an unnamed file leaves nothing behind if this process is killed
        command = [sys.executable, str(RUNNER), kind, str(script.resolve()), *arguments]
        said, late = _run(command, notes.fileno(), seconds)
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
    """Return the last line that the process printed as an error, and whether it was stopped.

    All its children are ended. `notes` is an open file whose number is passed as the last argument. Raises MachineError
    if no process can be started.
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
