"""core/*.cpp → a shared library that executes machine code, built once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from filelock import FileLock

from evoengine.errors import MachineError
from evoengine.host_compiler import (
    building,
    cache_folder,
    find_compiler,
    how_it_ended,
    identity,
    native_flags,
    prune,
    run_compiler,
)  # fmt: skip
from evoengine.machine import machine_error

CORE = Path(__file__).with_name("core")
KEPT = 16
"""libraries kept; beyond it a build removes those that were used longest ago"""
MOST_UNITS = 4
"""in which the sources are compiled; each costs more than a second of headers"""
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-w")

_ERROR = re.compile("error|undefined reference")


@cache
def build() -> Path:
    """The library, built where the cache does not have it. Of many processes that call it at once, one builds.

    Raises MachineError where the compiler is missing or too old, or the cache cannot be written.
    """
    built = _place()
    try:
        if not built.exists():
            with FileLock(built.parent.with_suffix(".lock")):  # others wait: it takes some ten seconds on all cores
                if not built.exists():
                    _build_at(built)
        os.utime(built)
    except OSError as error:
        raise machine_error(error) from error
    return built


def is_built() -> bool:
    """Whether `build` has nothing to do; raises MachineError as it does."""
    return _place().exists()


def _place() -> Path:
    return cache_folder("sass") / f"core-{_key()[:32]}.so"


def _build_at(built: Path) -> None:
    with building(built.parent) as scratch:
        _build(scratch, scratch / "core.so")
        os.replace(scratch / "core.so", built)
    prune(built.parent, "core-*.so", KEPT)


def _key() -> str:
    digest = hashlib.sha256("\0".join((identity(), *FLAGS)).encode())
    for path in sorted(p for p in CORE.iterdir() if p.suffix in (".cpp", ".h", ".inc")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _build(scratch: Path, library: Path) -> None:
    """Compile the sources in as many units as there are cores: most of the work on a small unit is its headers."""
    units = _units(min(os.cpu_count() or 1, MOST_UNITS))
    objects = [scratch / f"{number}.o" for number in range(len(units))]

    def compile_unit(sources: Sequence[Path], made: Path) -> None:
        unit = made.with_suffix(".cpp")
        unit.write_text("".join(f'#include "{source}"\n' for source in sorted(sources)), "utf-8")
        _compile(["-c", str(unit), "-o", str(made)])

    with ThreadPoolExecutor(len(units)) as pool:
        list(pool.map(compile_unit, units, objects))
    _compile(["-shared", "-Wl,-z,defs", *map(str, objects), "-o", str(library)])


def _units(count: int) -> list[list[Path]]:
    """The sources in `count` groups of about the same size."""
    groups: list[list[Path]] = [[] for _ in range(count)]
    sizes = [0] * count
    for size, source in sorted(((path.stat().st_size, path) for path in CORE.glob("*.cpp")), reverse=True):
        least = sizes.index(min(sizes))
        groups[least].append(source)
        sizes[least] += size
    return groups


def _compile(arguments: Sequence[str]) -> None:
    done = run_compiler([*FLAGS, *native_flags(), *arguments])
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines()
    said = [line for line in lines if "error: ld returned" not in line and _ERROR.search(line)] or lines
    first = said[0] if said else how_it_ended(done.returncode)
    raise MachineError(
        f"{find_compiler()} cannot build the executor of machine code: {first}; it needs g++ 12 or clang++ 15, "
        "chosen by $CXX"
    )
