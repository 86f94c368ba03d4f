"""The C++ compiler of this machine, and the folder that keeps what it built.

What is built is keyed by its text and by `identity`, so it is built once for each machine and compiler.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from platformdirs import user_cache_dir

from evoengine.errors import MachineError


@cache
def find_compiler() -> str:
    """The C++ compiler: $CXX, else c++, g++ or clang++ on the path. Raises MachineError with the remedy."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    if named:
        raise MachineError(f"the C++ compiler that $CXX names, {named!r}, is not there: correct or unset CXX")
    raise MachineError("no C++ compiler found: install one, e.g. apt install g++")


@cache
def native_flags() -> tuple[str, ...]:
    """-march=native where the compiler knows it."""
    probe = [find_compiler(), "-march=native", "-E", "-xc++", os.devnull]
    return ("-march=native",) if subprocess.run(probe, capture_output=True, check=False).returncode == 0 else ()


@cache
def identity() -> str:
    """What the compiler says of itself and of the CPU it targets, as a digest."""
    probe = subprocess.run(
        [find_compiler(), *native_flags(), "-E", "-v", "-xc++", os.devnull],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return hashlib.sha256(re.sub(r"/tmp/\S+", "", probe.stderr).encode()).hexdigest()


def cache_folder(name: str) -> Path:
    """The folder of that name in the user's cache, made where it is missing; MachineError where it cannot be."""
    folder = Path(user_cache_dir("evoengine")) / name
    remedy = f"cannot write the cache {folder}: make it writable or set XDG_CACHE_HOME"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(remedy) from error
    if not os.access(folder, os.W_OK):
        raise MachineError(remedy)
    return folder


def prune(folder: Path, pattern: str, kept: int) -> None:
    """Removes the eighth used longest ago where more than `kept` files match; other processes may do the same."""
    files = list(folder.glob(pattern))
    if len(files) <= kept:
        return

    def last_used(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # another process prunes too
            return 0.0

    for path in sorted(files, key=last_used)[: len(files) - kept * 7 // 8]:
        path.unlink(missing_ok=True)
