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
from evoengine.sandbox.host_compiler import (
    building,
    cache_folder,
    compiler_kind,
    find_compiler,
    how_it_ended,
    identity,
    native_flags,
    prune,
    run_compiler,
)  # fmt: skip
from evoengine.sandbox.machine import machine_error

CORE = Path(__file__).with_name("core")
KEPT = 16
"""limit of cached libraries; a build removes the least recently used beyond it"""
FLAGS = ("-std=c++20", "-fPIC", "-w", "-ffp-contract=off")
OFTEN = {
    "gcc": ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fpeel-loops", "-funswitch-loops"),
    "clang": ("-O3",),
}
"""flags of the unit that runs often: of GCC's -O3 what makes it faster"""
SELDOM = ("-Og",)
"""flags of the other unit, which is compiled at the same time; each more would cost a second for its headers alone"""
OF_KIND = {"gcc": ("--param=ggc-min-expand=300",), "clang": ()}
"""the compiler collects its garbage less often, which saves a tenth of the time"""
RUN_OFTEN = frozenset((
    "bits", "caches", "counting", "floating", "functional", "half", "integer", "machine", "matrix", "memory_ops",
    "operands", "order", "products", "shared_races", "sm_async", "sm_memory", "sparse", "timing", "wgmma",
))  # fmt: skip
"""sources in which the executor spends nine tenths of its time: more optimisation of the others costs more than it
saves (benchmarks/notes/first-search.md)"""

_ERROR = re.compile("error|undefined reference")
_given: list[Path] = []


def use(library: Path) -> None:
    """Let `build` return that library, which another process of this version has built, in this process."""
    _given.append(library)


@cache
def build() -> Path:
    """Return the library, building it if the cache does not have it.

    If several processes call this at once, one of them builds. Raises MachineError if the compiler is missing or too
    old, or if the cache cannot be written.
    """
    if _given:
        return _given[-1]
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
    digest = hashlib.sha256("\0".join((identity(), *FLAGS, *_often(), *SELDOM, *sorted(RUN_OFTEN))).encode())
    for path in sorted(p for p in CORE.iterdir() if p.suffix in (".cpp", ".h", ".inc")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _often() -> tuple[str, ...]:
    return OFTEN[compiler_kind()]


def _build(scratch: Path, library: Path) -> None:
    def compile_unit(name: str, flags: Sequence[str], often: bool) -> str:
        unit = scratch / f"{name}.cpp"
        sources = [source for source in sorted(CORE.glob("*.cpp")) if (source.stem in RUN_OFTEN) == often]
        unit.write_text("".join(f'#include "{source}"\n' for source in sources), "utf-8")
        _compile([*flags, *OF_KIND[compiler_kind()], "-c", str(unit), "-o", f"{unit}.o"])
        return f"{unit}.o"

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_unit, ("often", "seldom"), (_often(), SELDOM), (True, False)))
    # of an inline function that both hold, the linker takes the first
    _compile(["-shared", "-Wl,-z,defs", *objects, "-o", str(library)])


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
