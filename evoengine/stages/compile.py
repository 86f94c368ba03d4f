"""CUDA source → binary: NVRTC compiles for the named architecture, ptxas' report and the SASS are read out. No GPU needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from evoengine.records import Binary, Source
from evoengine.stages.toolchain import compiler_version, disassembler, include_folders, nvrtc

FLAGS = ("--std=c++17", "--ptxas-options=-v")

_RESOURCES = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_WARNING = re.compile(r"ptxas\s+(?:warning|info)\s*:\s*(.*\(C75\d\d\).*|.*)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


class CompileFailed(Exception):
    """The compiler refused the source; the message is its first error."""


def options(arch: str) -> str:
    """The options that decide what comes out: part of a binary's key, so no paths among them."""
    return " ".join((f"-arch={arch}", *FLAGS))


def compile_source(source: Source, arch: str) -> Binary:
    """Compiles for `arch` (sm_90a, sm_80, …); raises CompileFailed with the first error, MachineError without NVRTC."""
    api = nvrtc()
    start = time.perf_counter()
    program = api.createProgram(source.text, f"{source.entry}.cu", (), ())
    try:
        includes = tuple(f"-I{folder}" for folder in include_folders())
        try:
            api.compileProgram(program, (*options(arch).split(), *includes))
        except api.NVRTCError as error:
            raise CompileFailed(_first_error(api.getProgramLog(program)) or str(error)) from None
        log = api.getProgramLog(program)
        cubin = _whole_image(api.getCUBIN(program))
    finally:
        api.destroyProgram(program)
    require_entry(cubin, source.entry)
    elapsed = (time.perf_counter() - start) * 1e3
    return Binary(
        cubin=cubin,
        arch=arch,
        options=options(arch),
        compiler=compiler_version(),
        mix=instruction_mix(cubin),
        compile_ms=elapsed,
        **read_report(log, source.entry),
    )


def read_report(log: str, entry: str) -> dict[str, object]:
    """Registers, spills, stack, static shared memory and warnings from ptxas' verbose log."""
    own = log[log.find(f"'{entry}'") :] if f"'{entry}'" in log else log
    used = _RESOURCES.search(own)
    if not used:
        raise CompileFailed(f"the compiler said nothing of the registers of {entry}: {log.strip()[:200]!r}")
    stack = _STACK.search(own)
    frame, stores, loads = map(int, stack.groups()) if stack else (0, 0, 0)
    return {
        "registers": int(used[1]),
        "shared_bytes": int(used[2] or 0),
        "stack_bytes": frame,
        "spill_bytes": stores + loads,
        "warnings": tuple(dict.fromkeys(_warnings(log))),
    }


def _warnings(log: str) -> list[str]:
    """ptxas' warnings, and its C75xx remarks, which say that wgmma was serialised or setmaxnreg ignored."""
    found = []
    for line in log.splitlines():
        match = _WARNING.match(line.strip())
        if match and ("warning" in line or "(C75" in line):
            found.append(match[1].strip())
    return found


def _first_error(log: str) -> str | None:
    return next((line.strip() for line in log.splitlines() if "error" in line.lower()), None)


def _whole_image(cubin: bytes) -> bytes:
    """CuPy 14.2 hands out the image without its last byte, a zero; the ELF header tells how long it should be."""
    sections = _number(cubin, 40, 8) + _number(cubin, 58, 2) * _number(cubin, 60, 2)
    programs = _number(cubin, 32, 8) + _number(cubin, 54, 2) * _number(cubin, 56, 2)
    return cubin + b"\0" if max(sections, programs) == len(cubin) + 1 else cubin


def require_entry(cubin: bytes, entry: str) -> None:
    """Raises CompileFailed where the binary has no kernel of that name, under which a device would look for it."""
    kernels = kernel_names(cubin)
    if entry in kernels:
        return
    found = f"it has {', '.join(kernels)}" if kernels else "it has no kernel at all"
    mangled = any(name.startswith("_Z") and entry in name for name in kernels)
    remedy = f'declare it extern "C" __global__ void {entry}(…)' + (", so that C++ keeps its name" if mangled else "")
    raise CompileFailed(f"the binary has no kernel named {entry}: {found}; {remedy}")


def kernel_names(cubin: bytes) -> list[str]:
    """The kernels in an ELF image, by their sections: each kernel's machine code lies in one named `.text.NAME`.

    Section headers are as in the ELF-64 specification: name at byte 0, offset at 24 and size at 32 of each.
    """
    first, size, count, names_at = (_number(cubin, *at) for at in ((40, 8), (58, 2), (60, 2), (62, 2)))
    headers = [cubin[first + i * size :][:size] for i in range(count)]
    names = cubin[_number(headers[names_at], 24, 8) :][: _number(headers[names_at], 32, 8)]
    starts = (_number(header, 0, 4) for header in headers)
    sections = (names[start : names.index(b"\0", start)].decode() for start in starts)
    return [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]


def _number(image: bytes, at: int, size: int) -> int:
    return int.from_bytes(image[at : at + size], "little")


def instruction_mix(cubin: bytes) -> dict[str, int]:
    """How often each SASS opcode stands in the binary; empty where no disassembler is at hand."""
    tool = disassembler()
    if tool is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        listing = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, timeout=60)
    if listing.returncode:
        raise CompileFailed(f"nvdisasm cannot read the binary: {listing.stderr.strip()}")
    return dict(sorted(Counter(_INSTRUCTION.findall(listing.stdout)).items()))
