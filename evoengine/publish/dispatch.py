"""table.json: the exports of a folder that serve several problems, each pinned by its checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.publish.folder import CHECKSUMS
from evoengine.sandbox.untrusted import parse_json, read_limited, read_limited_text

TABLE = "table.json"
VERSION = 1
_FIELDS = {"problem": str, "folder": str, "sha256": str}


def read_table(folder: Path) -> list[Path]:
    """Return the folders of a table's exports, whose files are those that the table pins.

    Raises UsageError for what is no table, and where a file is missing or another than the one that was exported.
    """
    where = folder / TABLE
    try:
        found = parse_json(read_limited_text(where))
    except (OSError, ValueError) as error:
        raise UsageError(f"{where} cannot be read: {error}; evoengine best --export DIR writes it") from None
    entries = found.get("entries") if isinstance(found, dict) else None
    if not isinstance(entries, list) or found.get("evoengine_table") != VERSION:
        raise UsageError(f"{where} is no table of version {VERSION}; evoengine best --export DIR writes one")
    return [_pinned(folder, entry) for entry in entries]


def _pinned(folder: Path, entry: Any) -> Path:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), kind) for name, kind in _FIELDS.items()):
        raise UsageError(f"{folder / TABLE} has an entry without {', '.join(_FIELDS)}; export the table again")
    name = entry["folder"]
    if not name or "/" in name or name.startswith("."):
        raise UsageError(f"{folder / TABLE} names the folder {name[:60]!r}; an export is directly beside the table")
    own: Path = folder / name
    try:
        sums = read_limited(own / CHECKSUMS)
        if hashlib.sha256(sums).hexdigest() != entry["sha256"]:
            raise UsageError(f"{own / CHECKSUMS} is not the one that {TABLE} pins; export the table again")
        for line in sums.decode().splitlines():
            digest, _, file = line.partition("  ")
            if "/" in file or hashlib.sha256(read_limited(own / file, _LARGEST)).hexdigest() != digest:
                raise UsageError(f"{own / file} is not the file that {TABLE} pins; export the table again")
    except (OSError, ValueError) as error:
        raise UsageError(f"the export of {entry['problem'][:80]} in {own} cannot be read: {error}") from None
    return own


_LARGEST = 256 << 20
"""bytes of a file of an export"""
