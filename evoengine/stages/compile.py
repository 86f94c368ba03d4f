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
    section_headers = int.from_bytes(cubin[40:48], "little")
    program_headers = int.from_bytes(cubin[32:40], "little")
    sections = section_headers + int.from_bytes(cubin[58:60], "little") * int.from_bytes(cubin[60:62], "little")
    programs = program_headers + int.from_bytes(cubin[54:56], "little") * int.from_bytes(cubin[56:58], "little")
    return cubin + b"\0" if max(sections, programs) == len(cubin) + 1 else cubin


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
