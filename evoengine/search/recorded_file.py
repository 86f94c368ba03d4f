"""The JSON of a recorded space: plain or gzipped, complete or a truncated log."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.untrusted import parse_json, read_limited, unpack_limited

LARGEST_FILE = 1 << 30
"""bytes of a recorded space or a T4 file, packed or not"""
GZIP = b"\x1f\x8b"
LONGEST_WORD = 32
"""characters of a number, or of true, false and null, within which a log may be truncated"""
NESTED = 100
"""objects within one entry of a log, at most"""


def load(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, plain or gzipped; a truncated one is closed after its last complete entry.

    Raises UsageError if there is none.
    """
    try:
        raw = read_limited(path, LARGEST_FILE)
        plain = unpack_limited(raw, LARGEST_FILE) if raw.startswith(GZIP) else raw
        content = _parsed(codecs.getincrementaldecoder("utf-8-sig")().decode(plain))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; give a recorded space") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no recorded space: it must be a JSON object, plain or gzipped") from error
    except ValueError as error:
        raise UsageError(f"{path} is no recorded space: {error}; it must be a JSON object, plain or gzipped") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is no recorded space: it must be a JSON object, or a log of one that was cut short")
    return content


def _parsed(text: str) -> Any:
    """Parse JSON, or a truncated log, which is closed after its last complete entry.

    Return None if the text is neither. Raises ValueError for JSON with invalid content.
    """
    text = text.rstrip().rstrip(",")
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Unterminated string") and len(text) - error.pos > LONGEST_WORD:
            return None  # wrong before its end
    end = len(text)
    for _ in range(NESTED):
        for closing in ("}", "}}", "]}"):
            try:
                return parse_json(text[:end] + closing)
            except json.JSONDecodeError:
                continue
        # Before the last comma after an object. It may be one within an entry: then none of the closings fits.
        end = text.rfind("},", 0, end) + 1
        if not end:
            break
    return None
