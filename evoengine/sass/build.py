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
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-w")

_ERROR = re.compile("error|undefined reference")
_STANDARD = re.compile(r"^#include <.*>$", re.MULTILINE)


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
    sources = sorted(CORE.glob("*.cpp"))
    texts = [path.read_text("utf-8") for path in (*sources, *CORE.glob("*.h"))]
    standard = {include for text in texts for include in _STANDARD.findall(text)}
    headers = scratch / "headers.h"  # precompiled: reading them is half of the work on a source
    headers.write_text("\n".join(sorted(standard)), "utf-8")
    _compile(["-xc++-header", str(headers), "-o", f"{headers}.gch"])
    objects = [scratch / f"{source.stem}.o" for source in sources]

    def compile_source(source: Path, made: Path) -> None:
        _compile(["-include", str(headers), "-c", str(source), "-o", str(made)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_source, sources, objects))
    _compile(["-shared", "-Wl,-z,defs", *map(str, objects), "-o", str(library)])


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
