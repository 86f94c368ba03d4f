"""Source → an executable that runs the kernel on this machine's CPU, built once and kept on disk.

The runtime (scheduler, memory, reports) is one object per machine; a candidate is one small translation unit linked to
it. Both live in the user's cache, keyed by everything that shapes them: the text, the emulator's own files, and what
the compiler says of itself and of this CPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from platformdirs import user_cache_dir

from evoengine.devices.base import KernelUnbuildable
from evoengine.devices.emulator.inline_ptx import INCLUDE
from evoengine.devices.emulator.translate import cluster_blocks, least_blocks, translate
from evoengine.errors import MachineError
from evoengine.records import Source

RUNTIME = Path(__file__).with_name("runtime")
KEPT = 4096
"""executables kept; beyond it a build removes the eighth that was used longest ago"""

_COMMON = (
    "-std=c++20", "-w", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-fcf-protection=none", f"-I{INCLUDE}",
)  # fmt: skip
_RUNTIME_FLAGS = ("-O3", "-r", "-nostdlib")
# Locals that declarations.py does not fill start as 0xFE (NaN in half), misaligned accesses and indices beyond a local array are reported
# through the sanitizer's handlers, which the runtime defines.
_CANDIDATE_FLAGS = (
    "-O1",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=alignment,bounds",
    "-fno-sanitize-recover=all",
)
# Named one by one: the runtime does without the C++ library, and what is not loaded takes no time to start.
_LIBRARIES = ("-nodefaultlibs", "-lm", "-lc", "-lgcc")
_ERROR = re.compile(
    r"^(?:kernel\.cu:(\d+):(?:\d+:)? )?.*?(?:(?:error|unimplemented): (?!ld returned)|(?=undefined reference))(.*)$",
    re.MULTILINE,
)


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


def build(source: Source) -> Path:
    """The executable for `source`, from the cache where it was built before. Safe to call from many processes at once.

    Raises KernelUnbuildable with the first error and its line, MachineError where the compiler is missing or too old or
    the cache cannot be written.
    """
    key = hashlib.sha256("\0".join((_version(), source.entry, source.text)).encode()).hexdigest()
    executable = _cache() / f"kernel-{key[:32]}"
    if executable.exists():
        os.utime(executable)
        return executable
    runtime = _runtime()
    bounds = f"{least_blocks(source.text, source.entry)}, {cluster_blocks(source.text)}"
    unit = f'#include <evo_emu/cuda.h>\n#include <evo_emu/kernel.h>\n#line 1 "kernel.cu"\n{translate(source.text)}\n'
    unit += f'#line 1 "entry"\nEVO_EMU_ENTRY({source.entry}, {bounds})\n'
    with tempfile.TemporaryDirectory(dir=_cache(), prefix="building-") as folder:
        scratch = Path(folder) / "kernel"
        _compile([*_CANDIDATE_FLAGS, "-xc++", "-c", "-", "-o", f"{scratch}.o"], unit, source.entry)
        _compile([f"{scratch}.o", str(runtime), *_LIBRARIES, "-o", str(scratch)], "", source.entry)
        os.replace(scratch, executable)
    _prune()
    return executable


def _compile(arguments: list[str], unit: str, entry: str) -> None:
    command = [find_compiler(), *_COMMON, *_native(), *arguments]
    done = subprocess.run(command, input=unit, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    match = _ERROR.search(done.stderr)
    if not match:
        said = done.stderr.strip().splitlines()
        raise KernelUnbuildable(f"the host compiler failed: {said[-1] if said else 'without a word'}")
    where = f"line {match[1]}: " if match[1] else ""
    raise KernelUnbuildable(f"{where}{match[2]} (entry point {entry})")


@cache
def _version() -> str:
    """What an executable depends on beside its source: the compiler, the CPU it targets and the emulator's own files."""
    probe = subprocess.run(
        [find_compiler(), *_native(), "-E", "-v", "-xc++", os.devnull], capture_output=True, text=True, check=False
    )
    digest = hashlib.sha256(re.sub(r"/tmp/\S+", "", probe.stderr).encode())
    here = Path(__file__).parent
    for path in sorted([*INCLUDE.rglob("*.h"), *RUNTIME.iterdir(), *here.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _native() -> tuple[str, ...]:
    """-march=native where the compiler knows it."""
    probe = [find_compiler(), "-march=native", "-E", "-xc++", os.devnull]
    return ("-march=native",) if subprocess.run(probe, capture_output=True, check=False).returncode == 0 else ()


def _runtime() -> Path:
    runtime = _cache() / f"runtime-{_version()[:32]}.o"
    if runtime.exists():
        return runtime
    with tempfile.TemporaryDirectory(dir=_cache(), prefix="building-") as folder:
        scratch = Path(folder) / "runtime.o"
        try:
            parts = [str(part) for part in sorted(RUNTIME.glob("*.cpp"))]
            _compile([*_RUNTIME_FLAGS, *parts, "-o", str(scratch)], "", "main")
        except KernelUnbuildable as error:
            raise MachineError(
                f"{find_compiler()} cannot build the emulator: {error}; it needs g++ 12 or clang++ 15, chosen by $CXX"
            ) from error
        os.replace(scratch, runtime)
    return runtime


def _cache() -> Path:
    folder = Path(user_cache_dir("evoengine")) / "emulator"
    remedy = f"cannot write the emulator's cache {folder}: make it writable or set XDG_CACHE_HOME"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(remedy) from error
    if not os.access(folder, os.W_OK):
        raise MachineError(remedy)
    return folder


def _prune() -> None:
    files = list(_cache().glob("kernel-*"))
    if len(files) <= KEPT:
        return

    def last_used(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # another process prunes too
            return 0.0

    for path in sorted(files, key=last_used)[: len(files) - KEPT * 7 // 8]:
        path.unlink(missing_ok=True)
