"""Source → an executable that runs the kernel on this machine's CPU, built once and kept on disk.

The runtime (scheduler, memory, reports) is one object per machine; a candidate is one small translation unit linked to
it. Both live in the user's cache, keyed by everything that shapes them: the text, the emulator's own files, and what
the compiler says of itself and of this CPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from functools import cache
from pathlib import Path

from filelock import FileLock

from evoengine.cuda_emulator.declarations import find_kernels, mask, shares_memory
from evoengine.cuda_emulator.inline_ptx import INCLUDE
from evoengine.cuda_emulator.preprocessing import (
    HOST_HEADERS,
    STANDARD,
    device_macros,
    host_headers,
    host_macros,
    in_host_environment,
    restore_host_macros,
)
from evoengine.cuda_emulator.translate import constant_names, translate
from evoengine.devices.base import KernelUnbuildable
from evoengine.errors import MachineError
from evoengine.records import Launch, Source
from evoengine.sandbox.host_compiler import (
    Jail,
    building,
    cache_folder,
    compiler_kind,
    find_compiler,
    how_it_ended,
    identity,
    native_flags,
    prune,
    run_compiler,
)
from evoengine.sandbox.jail import needs_jail, require_jail
from evoengine.sandbox.machine import machine_error, memory_for, names_machine_fault, why_unfit

RUNTIME = Path(__file__).with_name("runtime")
MAX_EXECUTABLES = 4096
"""executables kept; beyond it a build removes the eighth that was used longest ago"""

JAILED = "jailed-"
"""prefix of the name of an executable that runs in a jail only"""

_COMMON = (
    "-std=c++20", "-w", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-fcf-protection=none", f"-I{INCLUDE}",
)  # fmt: skip # a table
_RUNTIME_FLAGS = ("-O3", "-r", "-nostdlib")
# Locals that declarations.py does not fill start as 0xFE (NaN in half), misaligned accesses and indices beyond a local
# array are reported through the sanitizer's handlers, which the runtime defines.
_CANDIDATE_FLAGS = (
    "-O1",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=alignment,bounds",
    "-fno-sanitize-recover=all",
)
# A kernel whose blocks share memory: the runtime is told of every access (races.cpp), by its place in the code, for
# which the line is found later. What the compiler makes a call of memcpy is told too.
_CHECKED_FLAGS = ("-fsanitize=thread", "-g1")
_CHECKED_FLAGS_OF = {
    "clang": ("-mllvm", "-tsan-distinguish-volatile=1", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
    "gcc": ("--param=tsan-distinguish-volatile=1", "--param=tsan-instrument-func-entry-exit=0"),
}
_CHECKED_PRELUDE = "".join(f'asm(".set {name}, evo_emu_{name}");' for name in ("memcpy", "memmove", "memset"))
_NEEDS_CHECKS = re.compile(r"evo_emu::need_checks|\batomic[A-Z]\w*")
"""in an error: what only checked kernels have"""
_ACCESS_OF_PTX = re.compile(r"\bevo_emu::Scope::")
# Named one by one: the runtime does without the C++ library, and what is not loaded takes no time to start.
_LIBRARIES = ("-nodefaultlibs", "-lm", "-lc", "-lgcc")
BUILD_SECONDS = 60.0
"""for one kernel, which takes a few"""
RUNTIME_SECONDS = 600.0
"""for the emulator's own code, which takes half a minute and is not a kernel's fault on a machine that many share"""
BUILD_BYTES = 2 << 30
"""of memory that the compiler may take for it, beside what its worker has"""

_IN_KERNEL = re.compile(r"^(?:kernel\.cu|entry):\d+:(?:\d+:)? (?:error|sorry, unimplemented):", re.MULTILINE)
_OUT_OF_MEMORY = re.compile(r"memory exhausted|out of memory|Cannot allocate memory|bad_alloc")
_ERROR = re.compile(
    r"^(?:kernel\.cu:(\d+):(?:\d+:)? )?.*?(?:(?:error|unimplemented): (?!ld returned)|(?=undefined reference))(.*)$",
    re.MULTILINE,
)


class _UnlocatedError(KernelUnbuildable):
    """The compiler failed and named no line of the kernel's: that may be the machine's fault."""


def build(source: Source, arch: str) -> Path:
    """Return the executable that runs any kernel of `source` as compiled for `arch` (sm_90a), built or from the cache.

    Safe to call from many processes at once. Raises KernelUnbuildable with the first error and its line; MachineError
    where the compiler is missing or too old, the cache cannot be written, or not even an empty kernel can be built, and
    where there is no jail for a proposed text.
    """
    if needs_jail(source.text):
        require_jail()
    try:
        key = hashlib.sha256("\0".join((_version(), arch, source.entry, source.text)).encode()).hexdigest()
        prefix = JAILED if needs_jail(source.text) else "kernel-"
        executable = cache_folder("emulator") / f"{prefix}{key[:32]}"
        if not _touch(executable):
            _build_and_classify(source, arch, executable)
            prune(cache_folder("emulator"), f"{prefix}*", MAX_EXECUTABLES)
    except OSError as error:
        raise machine_error(error) from error
    return executable


def _touch(executable: Path) -> bool:
    try:
        os.utime(executable)
    except FileNotFoundError:
        return False
    return True


def _build_and_classify(source: Source, arch: str, executable: Path) -> None:
    """Build a kernel, and tell a fault of the kernel from one of the machine.

    If it fails, an empty kernel is built to find out whether the machine is at fault; if that succeeds, the kernel is
    tried once more.
    """
    try:
        _build_at(source, arch, executable)
    except _UnlocatedError as failure:
        _require_working(arch)
        if _OUT_OF_MEMORY.search(str(failure)):
            raise KernelUnbuildable(f"{failure} ({BUILD_BYTES / 2**30:g} GiB is the limit)") from None
        try:
            _build_at(source, arch, executable)
        except _UnlocatedError as again:
            if names_machine_fault(str(again)):
                raise MachineError(f"this machine failed: {again}") from None
            raise


def _require_working(arch: str) -> None:
    """Raise MachineError if not even an empty kernel can be built."""
    if why := why_unfit():
        raise MachineError(why)
    probe = Source('extern "C" __global__ void probe() {}\n', "probe", Launch((1, 1, 1), 32, 0))
    try:
        with building(cache_folder("emulator")) as folder:
            _build_at(probe, arch, folder / "probe")
    except KernelUnbuildable as error:
        raise MachineError(f"{find_compiler()} cannot build even an empty kernel: {error}") from error


def _build_at(source: Source, arch: str, executable: Path) -> None:
    checked = shares_memory(source.text)
    try:
        _compile_and_link(source, arch, checked, executable)
    except KernelUnbuildable as failure:
        if checked or not _NEEDS_CHECKS.search(str(failure)):
            raise
        _compile_and_link(source, arch, True, executable)  # a macro has made what the text does not show


def _compile_and_link(source: Source, arch: str, checked: bool, executable: Path) -> None:
    runtime = build_runtime()
    flags = [*_CANDIDATE_FLAGS, *(_checked_flags() if checked else ())]
    with building(cache_folder("emulator")) as folder:
        scratch = folder / "kernel"
        unit = _unit(source, arch, checked)
        jail = Jail((INCLUDE, runtime), folder) if needs_jail(source.text) else None
        _compile([*flags, "-xc++", "-c", "-", "-o", f"{scratch}.o"], unit, source.entry, jail=jail)
        _compile([f"{scratch}.o", str(runtime), *_LIBRARIES, "-o", str(scratch)], "", source.entry, jail=jail)
        os.replace(scratch, executable)


def _checked_flags() -> tuple[str, ...]:
    return (*_CHECKED_FLAGS, *_CHECKED_FLAGS_OF[compiler_kind()])


def _unit(source: Source, arch: str, checked: bool) -> str:
    """Return what is compiled: the kernel's text between the emulator's headers and what the runtime looks up."""
    text = translate(source.text)
    includes_host = host_headers(text)
    host = _host_macros(includes_host)
    if includes_host:
        text = in_host_environment(text, restore_host_macros(host, arch), device_macros(host, arch, keep=True))
    constants = "".join(f"EVO_EMU_CONSTANT({name})" for name in constant_names(source.text))
    described = any(kernel.name == source.entry for kernel in find_kernels(mask(source.text)))
    entry = f"EVO_EMU_REQUIRE({source.entry})" if described else f"EVO_EMU_ENTRY({source.entry}, 1, 1, 0)"
    return (
        f"#define EVO_EMU_CHECKED {checked:d}\n#include <evo_emu/cuda.h>\n#include <evo_emu/kernel.h>\n"
        f"{'#include <evo_emu/ptx_memory.h>' if _ACCESS_OF_PTX.search(text) else ''}\n"
        f"{_CHECKED_PRELUDE if checked else ''}\n"
        f"extern const bool evo_emu::checked = {checked:d};\n"
        f'{device_macros(host, arch, keep=includes_host)}#line 1 "kernel.cu"\n{text}\n'
        f'#line 1 "entry"\n{entry}\n'
        f"extern const evo_emu::Constant evo_emu::constants[] = {{{constants}{{nullptr, nullptr, 0}}}};\n"
    )


@cache
def _host_macros(with_headers: bool) -> list[str]:
    """Return the names of the host compiler's macros, with those of the headers that a kernel may include."""
    file = cache_folder("emulator") / f"macros-{_version()[:32]}-{with_headers:d}"
    if not file.exists():
        flags = [*_COMMON, *native_flags(), *_CANDIDATE_FLAGS, *_checked_flags()]
        names = host_macros(flags, (STANDARD | HOST_HEADERS) if with_headers else ())
        with building(cache_folder("emulator")) as folder:
            scratch = folder / "macros"
            scratch.write_text("\n".join(names), "utf-8")
            os.replace(scratch, file)
    return file.read_text("utf-8").split()


def _compile(
    arguments: list[str], unit: str, entry: str, seconds: float | None = None, jail: Jail | None = None
) -> None:
    seconds = seconds or BUILD_SECONDS
    try:
        with memory_for(BUILD_BYTES):
            done = run_compiler([*_COMMON, *native_flags(), *arguments], unit, seconds, jail)
    except subprocess.TimeoutExpired:
        raise KernelUnbuildable(f"the host compiler did not end in {seconds:g} s") from None
    if done.returncode == 0:
        return
    match = _ERROR.search(done.stderr)
    if not match:
        said = done.stderr.strip().splitlines()
        raise _UnlocatedError(f"the host compiler failed: {said[-1] if said else how_it_ended(done.returncode)}")
    where = f"line {match[1]}: " if match[1] else ""
    kind = KernelUnbuildable if _IN_KERNEL.search(done.stderr) else _UnlocatedError
    raise kind(f"{where}{match[2]} (entry point {entry})")


@cache
def _version() -> str:
    """Return what an executable depends on besides its source.

    That is the compiler, the CPU it targets and the emulator's own files.
    """
    digest = hashlib.sha256(identity().encode())
    here = Path(__file__).parent
    for path in sorted([*(f for f in INCLUDE.rglob("*") if f.is_file()), *RUNTIME.iterdir(), *here.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_built() -> bool:
    """Return whether the emulator's own code, which every candidate needs, has been compiled on this machine."""
    return _runtime_file().exists()


def _runtime_file() -> Path:
    return cache_folder("emulator") / f"runtime-{_version()[:32]}.o"


def build_runtime() -> Path:
    """Return the emulator's own code, built if the cache does not have it. Of many processes at once, one builds.

    Raises MachineError where the compiler is missing or too old, or the cache cannot be written.
    """
    runtime = _runtime_file()
    try:
        if not runtime.exists():
            with FileLock(runtime.parent.with_suffix(".lock")):
                if not runtime.exists():
                    _build_runtime_at(runtime)
    except OSError as error:
        raise machine_error(error) from error
    return runtime


def _build_runtime_at(runtime: Path) -> None:
    with building(runtime.parent) as folder:
        scratch = folder / "runtime.o"
        unit = "".join(f'#include "{part}"\n' for part in sorted(RUNTIME.glob("*.cpp")))
        try:
            _compile([*_RUNTIME_FLAGS, "-xc++", "-", "-o", str(scratch)], unit, "main", RUNTIME_SECONDS)
        except KernelUnbuildable as error:
            raise MachineError(
                f"{find_compiler()} cannot build the emulator: {error}; it needs g++ 12 or clang++ 15, chosen by $CXX"
            ) from error
        os.replace(scratch, runtime)
