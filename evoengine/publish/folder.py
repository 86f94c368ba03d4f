"""Write a folder atomically, and replace only an unchanged earlier export; read a table of exports.

table.json names the exports of a folder that serve several problems, each pinned by its checksums.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.paths import umask
from evoengine.sandbox.untrusted import parse_json, read_limited, read_limited_text

CHECKSUMS = "SHA256SUMS"
"""checksums of all other files, in the format of `sha256sum -c`"""
MARK = "kernel.json"
"""the file by which an export is recognised"""
ABANDONED_SECONDS = 3600
"""age at which the remains of a killed export are removed"""
_AT_FDCWD, _EXCHANGE = -100, 2  # renameat2(2)


def require_writable(folder: Path) -> None:
    """Raise UsageError if `folder` contains files that no export wrote, is not a folder, or cannot be made."""
    target = Path(os.path.realpath(folder))
    if why := _why_not(target) or _why_not_beside(target):
        raise UsageError(
            f"cannot write to {folder}: {why}; --export takes a folder that is new, empty or an earlier export"
        )


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write the files and their checksums; return their paths, that of the checksums last.

    The files are written beside the folder and renamed in one step, so that a killed process leaves the folder
    unchanged. Raises UsageError if `folder` contains files that no export wrote, or cannot be written.
    """
    require_writable(folder)
    files = with_checksums(contents)
    _write_whole(folder, files, "--export takes a folder that can be made")
    return [folder / name for name in files]


def require_new(folder: Path) -> None:
    """Raise UsageError if `folder` contains anything, is not a folder, or cannot be made."""
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise UsageError(f"cannot write to {folder}: it is not empty; --package takes a folder that is new or empty")
    require_writable(folder)


def write_new(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files by their paths within a new or empty folder, all or none of them; return their paths.

    Raises UsageError if `folder` contains anything, or cannot be written.
    """
    require_new(folder)
    _write_whole(folder, contents, "--package takes a folder that can be made")
    return [folder / name for name in contents]


def _write_whole(folder: Path, files: Mapping[str, bytes], remedy: str) -> None:
    """Write files by their paths within a folder, all or none of them."""
    target = Path(os.path.realpath(folder))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        part = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        try:
            for name, data in files.items():
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                (part / name).write_bytes(data)
            part.chmod(0o777 & ~umask())
            _swap_into_place(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; {remedy}") from error


def with_checksums(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the contents of an export's folder with the checksums last."""
    return {**contents, CHECKSUMS: checksums(contents).encode()}


def checksums(contents: Mapping[str, bytes]) -> str:
    """Return one line per file: SHA-256, two spaces, name."""
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in contents.items())


def _why_not(target: Path) -> str | None:
    """Return why nothing may be written there; None if it does not exist, is empty, or is an unchanged export."""
    if not os.path.lexists(target):
        return None
    if not target.is_dir():
        return "it is a file"
    if target == Path.cwd():
        return "it is the current folder, which would be replaced: name a folder within it"
    try:
        found = {p.name for p in target.iterdir()} - {"__pycache__"}
        return _changed(target, found) if found else None
    except OSError as error:
        return f"{error.strerror}"


def _why_not_beside(target: Path) -> str | None:
    """Return why nothing may be made beside the folder, where its files are written first; None if it may."""
    above = next(parent for parent in target.parents if os.path.lexists(parent))
    if not above.is_dir():
        return f"{above} is a file"
    return None if os.access(above, os.W_OK | os.X_OK) else f"{above} may not be written to"


def _changed(target: Path, found: set[str]) -> str | None:
    """Return the first file that no export wrote or that has changed since."""
    listed = _listed(target)
    if listed is None:
        return f"it has {min(found)!a}, which no export wrote"
    for name in sorted(found - {CHECKSUMS}):
        path = target / name
        if name not in listed or not stat.S_ISREG(path.lstat().st_mode):
            return f"it has {name!a}, which no export wrote"
        if hashlib.sha256(path.read_bytes()).hexdigest() != listed[name]:
            return f"{name!a} was changed since it was exported"
    return None


def _listed(target: Path) -> dict[str, str] | None:
    """Return the SHA-256 of each file of an earlier export; None if the folder is not one."""
    try:
        lines = (target / CHECKSUMS).read_text("ascii").splitlines()
        described = json.loads((target / MARK).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(described, dict) or not isinstance(described.get("provenance"), dict):
        return None
    is_ours = "evoengine" in described["provenance"]
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)} if is_ours else None


def _swap_into_place(part: Path, target: Path) -> None:
    """Rename `part` to `target`; an existing target, empty or an earlier export, becomes `part`."""
    try:
        part.rename(target)  # over an empty folder too
    except OSError:
        if not target.is_dir() or target.is_symlink():
            raise
        _exchange(part, target)


def _exchange(part: Path, target: Path) -> None:
    """Exchange two names, in one step if the system supports it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        code = libc.renameat2(_AT_FDCWD, os.fsencode(part), _AT_FDCWD, os.fsencode(target), _EXCHANGE)
        if code == 0:
            return
    old = part.with_name(f"{part.name}-old")
    target.rename(old)
    try:
        part.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}.part-"


def _remove_abandoned(target: Path) -> None:
    for left in target.parent.glob(f"{_prefix(target)}*"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


TABLE = "table.json"
VERSION = 1
_FIELDS = {"problem": str, "folder": str, "sha256": str}


def read_table(folder: Path) -> list[Path]:
    """Return the folders of a table's exports after checking their files.

    Raises UsageError if there is no table, or if a file is missing or is not the one that was exported.
    """
    where = folder / TABLE
    try:
        found = parse_json(read_limited_text(where))
    except (OSError, ValueError) as error:
        raise UsageError(f"{where} cannot be read: {error}; evoengine best --export DIR writes it") from None
    entries = found.get("entries") if isinstance(found, dict) else None
    if not isinstance(entries, list) or found.get("evoengine_table") != VERSION:
        raise UsageError(f"{where} is not a table of version {VERSION}; evoengine best --export DIR writes one")
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
