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
"""limit of cached libraries; a build removes the least recently used beyond it"""
UNITS = 3
"""in which the sources are compiled side by side; each costs more than a second for its headers alone, so that one unit
for each source takes twice the time"""
FLAGS = ("-std=c++20", "-fPIC", "-w")
OFTEN, SELDOM = ("-O3",), ("-O1", "-ftree-vectorize")
RUN_SELDOM = frozenset((
    "api", "atomics", "convert", "counting", "decode", "double", "effects", "global_races", "hazards", "order",
    "shared_races", "tensor_copy", "transaction_barriers",
))  # fmt: skip
"""sources of which little runs for each instruction of each warp: more optimisation made no search faster
(benchmarks/notes/first-search.md)"""

_ERROR = re.compile("error|undefined reference")


@cache
def build() -> Path:
    """Return the library, building it if the cache does not have it.

    If several processes call this at once, one of them builds. Raises MachineError if the compiler is missing or too
    old, or if the cache cannot be written.
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
    """Return whether `build` has nothing to do. Raises MachineError as it does."""
    return _place().exists()


def _place() -> Path:
    return cache_folder("sass") / f"core-{_key()[:32]}.so"


def _build_at(built: Path) -> None:
    with building(built.parent) as scratch:
        _build(scratch, scratch / "core.so")
        os.replace(scratch / "core.so", built)
    prune(built.parent, "core-*.so", KEPT)


def _key() -> str:
    digest = hashlib.sha256("\0".join((identity(), *FLAGS, *OFTEN, *SELDOM, *sorted(RUN_SELDOM))).encode())
    for path in sorted(p for p in CORE.iterdir() if p.suffix in (".cpp", ".h", ".inc")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _build(scratch: Path, library: Path) -> None:
    units = [scratch / f"{number}.cpp" for number in range(UNITS)]
    flags = [OFTEN] * (UNITS - 1) + [SELDOM]
    for unit, sources in zip(units, _groups(), strict=True):
        unit.write_text("".join(f'#include "{source}"\n' for source in sorted(sources)), "utf-8")

    def compile_unit(unit: Path, flags: Sequence[str]) -> None:
        _compile([*flags, "-c", str(unit), "-o", f"{unit}.o"])

    with ThreadPoolExecutor(UNITS) as pool:
        list(pool.map(compile_unit, units, flags))
    _compile(["-shared", "-Wl,-z,defs", *(f"{unit}.o" for unit in units), "-o", str(library)])


def _groups() -> list[list[Path]]:
    """Return the sources of each compilation unit.

    Frequently executed sources form groups of similar size; the last group has the others.
    """
    groups: list[list[Path]] = [[] for _ in range(UNITS)]
    for source in sorted(CORE.glob("*.cpp"), key=lambda path: (-path.stat().st_size, path)):
        often = min(groups[:-1], key=lambda group: sum(path.stat().st_size for path in group))
        (groups[-1] if source.stem in RUN_SELDOM else often).append(source)
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
