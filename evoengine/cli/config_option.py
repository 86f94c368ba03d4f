"""What verify's --config may be: JSON, a trial's number, a file, or - for standard input."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

from evoengine.errors import UsageError
from evoengine.records import Config
from evoengine.untrusted import parse_json, read_limited_text

MOST_BYTES = 1 << 20


class Given(NamedTuple):
    """A configuration, and where it is a trial's the problem and the GPU of that."""

    config: Config
    problem: str | None = None
    gpu: str | None = None


def read_config(text: str, db: str | None) -> Given:
    """Read a configuration from JSON text, a file, standard input, or a trial's number.

    Raises UsageError if `text` is none of these, or if the source holds no configuration.
    """
    if text.isdecimal():
        return _of_trial(int(text[:18]), db)
    if text.lstrip().startswith(("{", "[", '"')):
        return Given(_parsed(text, "--config"))
    if text == "-":
        return Given(_parsed(sys.stdin.read(MOST_BYTES + 1), "standard input"))
    return Given(_parsed(_file(Path(text)), text))


def _of_trial(trial: int, db: str | None) -> Given:
    from evoengine.cli.ledger import reading

    with reading(db) as ledger:
        found = ledger.candidate(trial)
    return Given(found.config, found.problem, found.gpu)


def _file(path: Path) -> str:
    try:
        return read_limited_text(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--config {str(path)[:80]!r} is neither JSON nor a trial's number, and cannot be read as a file: {why}"
        ) from None


def _parsed(text: str, where: str) -> Config:
    """Parse a configuration. An object with a field `config`, as printed by show --json and stored in kernel.json,
    stands for that field."""
    if len(text) > MOST_BYTES:
        raise UsageError(f"{where} holds more than {MOST_BYTES} characters, which no configuration takes")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON of a configuration: {str(error)[:200]}") from None
    if isinstance(found, dict) and isinstance(found.get("config"), dict):
        found = found["config"]
    if not isinstance(found, dict):
        raise UsageError(f"{where} must be a JSON object of knobs and values, not {type(found).__name__}")
    for knob, value in found.items():
        if not isinstance(value, int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            shown = json.dumps(value)[:40]
            raise UsageError(f"{where} gives {knob} {shown}; a knob is a number, text, true or false")
    return found
