"""Locate the package's data files and the ledger, and write files atomically."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from evoengine.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent
_CARRIED = _PACKAGE / "_assets"
"""where a wheel has them (tool.hatch in pyproject.toml); a checkout has no such folder"""


def asset(name: str) -> Path:
    """Return the folder "templates" or "search_spaces"."""
    return (_CARRIED if _CARRIED.is_dir() else _PACKAGE.parent) / name


def package_folder() -> Path:
    """Return the folder of the package's modules."""
    return _PACKAGE


def default_database() -> str:
    """Return the SQLAlchemy URL of the default ledger: db/evoengine.db in the current folder."""
    return f"sqlite:///{Path.cwd() / 'db' / 'evoengine.db'}"


URL_VARIABLE, FILE_VARIABLE = "EVOENGINE_DB", "EVOENGINE_DB_FILE"
"""environment variables that name the ledger: by its URL, and by a file that holds the URL"""
_LARGEST_URL = 4096


def chosen_database(named: str | None) -> str:
    """Return the ledger's URL or file: `named`, else that of the environment, else the default file.

    Raises UsageError if the environment names two, or a file without a URL.
    """
    url, file = os.environ.get(URL_VARIABLE), os.environ.get(FILE_VARIABLE)
    if named:
        return named
    if url and file:
        raise UsageError(f"both {URL_VARIABLE} and {FILE_VARIABLE} are set; keep the one that names the ledger")
    return url or (_url_in(Path(file)) if file else default_database())


def environment_with_ledger(url: str) -> dict[str, str]:
    """Return this process's environment, for a child process that opens the ledger at `url`."""
    return {name: value for name, value in os.environ.items() if name != FILE_VARIABLE} | {URL_VARIABLE: url}


def _url_in(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST_URL + 1)
    except OSError as error:
        raise UsageError(f"{FILE_VARIABLE} names {file}, which cannot be read: {error.strerror}") from error
    lines = content.decode(errors="replace").split("\n")
    url = lines[0].strip()
    if not url or any(line.strip() for line in lines[1:]) or len(content) > _LARGEST_URL or "\ufffd" in url:
        raise UsageError(f"{FILE_VARIABLE} names {file}, which must hold one line, the ledger's URL or file")
    return url


def write_atomically(file: Path, parts: Iterable[str]) -> None:
    """Write UTF-8 text beside `file` and rename it in one step, so that a killed process leaves the old file.

    Missing folders are created. Raises UsageError if it cannot be written, or if the name is that of a folder or a
    device.
    """
    target = Path(os.path.realpath(file))
    if target.exists() and not target.is_file():
        raise UsageError(f"cannot write {file}: it is {'a folder' if target.is_dir() else 'not a regular file'}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.part-", dir=target.parent)
        part = Path(name)
        try:
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="") as written:
                written.writelines(parts)
                written.flush()
                os.fsync(written.fileno())
            part.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~umask())
            part.replace(target)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write {file}: {error.strerror}; name a file in a folder that can be written"
        ) from error


def umask() -> int:
    """Return this process's file mode creation mask."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
