"""Write a file completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from evoengine.errors import UsageError


def write_atomically(file: Path, parts: Iterable[str]) -> None:
    """Write UTF-8 text beside `file` and rename it in one step, so that a killed process leaves the old file.

    Missing folders are created. Raises UsageError if it cannot be written, or if the name is that of a folder or a
    device.
    """
    target = Path(os.path.realpath(file))
    if target.exists() and not target.is_file():
        raise UsageError(f"cannot write {file}: it is {'a folder' if target.is_dir() else 'no regular file'}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.part-", dir=target.parent)
        part = Path(name)
        try:
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="") as written:
                written.writelines(parts)
                written.flush()
                os.fsync(written.fileno())
            part.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
            part.replace(target)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write {file}: {error.strerror}; name a file in a folder that can be written"
        ) from error


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
