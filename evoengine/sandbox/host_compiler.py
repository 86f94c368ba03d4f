"""The C++ compiler of this machine, and the cache of its results, which are keyed by source and `identity`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_dir

from evoengine.errors import MachineError
from evoengine.sandbox.jail import end_of, jailed
from evoengine.sandbox.machine import how_ended, machine_error, require_own_end

BUILDING = "building-"
"""prefix of folders in the cache in which a build is in progress"""


@cache
def find_compiler() -> str:
    """Return the C++ compiler: $CXX, else c++, g++ or clang++ on the path. Raises MachineError with the remedy."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    if named:
        raise MachineError(f"$CXX names {named!r}, which does not exist: correct or unset CXX")
    raise MachineError("no C++ compiler found: install one, e.g. apt install g++")


@cache
def compiler_kind() -> str:
    """Return "clang" or "gcc", which some options are named for."""
    return "clang" if "__clang__" in run_compiler(["-dM", "-E", "-xc++", os.devnull]).stdout else "gcc"


@cache
def native_flags() -> tuple[str, ...]:
    """Return -march=native if the compiler supports it."""
    probe = run_compiler(["-march=native", "-E", "-xc++", os.devnull])
    return ("-march=native",) if probe.returncode == 0 else ()


def run_compiler(
    arguments: Sequence[str], text: str = "", seconds: float | None = None, jail: Jail | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the compiler with `text` on its standard input and its messages in English; in a `jail` if one is given.

    Raises subprocess.TimeoutExpired, after all its processes were ended; MachineError if it cannot be started, ToolDied
    if a signal ended it.
    """
    command = [find_compiler(), *arguments]
    if jail:
        command = jailed(command, [*jail.readable, *_outside_usr(command[0])], [jail.writable])
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            process_group=0,
        )
    except OSError as error:
        raise machine_error(error) from error
    with process:
        try:
            out, err = process.communicate(text, seconds)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    code = end_of(process.returncode) if jail else process.returncode
    require_own_end(find_compiler(), code, err)
    return subprocess.CompletedProcess(command, code, out, err)


class Jail(NamedTuple):
    """The paths that a compiler in a jail may read, and the folder to which it may write."""

    readable: tuple[Path, ...]
    writable: Path


def _outside_usr(compiler: str) -> list[Path]:
    """Return the folder that a compiler outside /usr is installed in."""
    home = Path(compiler).resolve().parent.parent
    return [] if home == Path("/") else [home]


def how_it_ended(code: int) -> str:
    return f"it was ended by {how_ended(code)}" if code < 0 else f"it ended with {how_ended(code)}"


@cache
def identity() -> str:
    """Return a digest of the compiler's version and of the CPU it targets."""
    probe = run_compiler([*native_flags(), "-E", "-v", "-xc++", os.devnull])
    if probe.returncode:
        said = probe.stderr.strip().splitlines()
        raise MachineError(f"{find_compiler()} does not run: {said[-1] if said else how_it_ended(probe.returncode)}")
    return hashlib.sha256(re.sub(r"/tmp/\S+", "", probe.stderr).encode()).hexdigest()


def cache_folder(name: str) -> Path:
    """Return the folder of that name in the user's cache, creating it if necessary.

    Raises MachineError if it cannot be created.
    """
    folder = Path(user_cache_dir("evoengine")) / name
    remedy = f"cannot write the cache {folder}: make it writable or set XDG_CACHE_HOME"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(remedy) from error
    if not os.access(folder, os.W_OK):
        raise MachineError(remedy)
    return folder


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Yield a folder in `folder` to build in, which is removed at the end, as are those of killed builds.

    The folder is locked while its process lives; an unlocked one has no owner. Raises OSError.
    """
    remove_abandoned(folder)
    scratch, lock = _locked_folder(folder)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _locked_folder(folder: Path) -> tuple[Path, int]:
    """Create and lock a folder.

    Another process may take it for abandoned and remove it before it is locked; then another one is created.
    """
    while True:
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=BUILDING))
        try:
            lock = os.open(scratch, os.O_RDONLY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # a file system without locks: remove_abandoned skips it
            fcntl.flock(lock, fcntl.LOCK_EX)
        if scratch.exists():
            return scratch, lock
        os.close(lock)


def remove_abandoned(folder: Path) -> None:
    """Remove the folders of builds whose process has ended."""
    for scratch in folder.glob(f"{BUILDING}*"):
        try:
            lock = os.open(scratch, os.O_RDONLY)
        except OSError:  # its owner has just removed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(scratch, ignore_errors=True)
        except OSError:  # its owner lives, or this file system has no locks
            continue
        finally:
            os.close(lock)


def prune(folder: Path, pattern: str, kept: int) -> None:
    """Remove the least recently used eighth if more than `kept` files match. Other processes may do the same."""
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
