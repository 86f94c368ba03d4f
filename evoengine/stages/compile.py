"""CUDA source → binary, without a GPU: NVRTC compiles for the named architecture.

ptxas' report and the SASS are read as well.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from typing import TypedDict

from evoengine.cuda_files import disassembler
from evoengine.errors import MachineError, UsageError
from evoengine.records import Binary, KernelResources, Launch, Source
from evoengine.sandbox.jail import needs_jail
from evoengine.sandbox.machine import memory_for
from evoengine.sass import elf
from evoengine.sass.cubin import kernel_names, whole_image
from evoengine.sass.listing import disassemble, instruction_mix, line_table, names_an_instruction, with_source_lines
from evoengine.stages.includes import C_HEADERS
from evoengine.stages.toolchain import compiler_version, in_jail, include_folders, nvrtc, uncached
from evoengine.workloads.triton_kernel import is_triton

FLAGS = ("--std=c++17", "--ptxas-options=-v")
_STANDARD = re.compile(r"^// (--std=c\+\+(?:14|17|20))$", re.MULTILINE)
"""a line of the kernel's text that chooses its language"""

_RESOURCES = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_WARNING = re.compile(r"ptxas\s+(?:warning|info)\s*:\s*(.*\(C75\d\d\).*|.*)")


COMPILE_BYTES = 2 << 30
"""memory limit of a compilation, in addition to its worker's"""
_UNDEFINED, _WORD = re.compile(r'identifier "(\w+)" is undefined'), re.compile(r"\w+")
_ERROR = re.compile(r"^(?:(\S.*)\(\d+\): error: |ptxas error\s*:)", re.MULTILINE)


class CompileFailed(Exception):
    """The compiler refused the source; the message is its first error."""


class _NotInText(CompileFailed):
    """It failed with a first error that is not in the text, which may be the machine's fault."""


def options(arch: str, text: str = "") -> str:
    """Return the options that determine the binary. They are part of its key, so they contain no paths.

    The language is C++17 unless a line of the kernel's text says otherwise, as `// --std=c++20`.
    """
    standard, *others = FLAGS
    stated = _STANDARD.search(text)
    return " ".join((f"-arch={arch}", stated[1] if stated else standard, *others))


def compile_source(source: Source, arch: str) -> Binary:
    """Compile a source for `arch` (sm_90a, sm_80, …).

    Raises CompileFailed with the first error; MachineError without NVRTC, or if not even an empty kernel compiles. A
    source that fails while an empty kernel compiles is tried once more. A Triton kernel is compiled by Triton, and a
    proposal in a jail.
    """
    if needs_jail(source.text):
        return in_jail(compile_source, source, arch, returns=Binary, raises=(CompileFailed,), executes=False)
    if is_triton(source.text):
        return _compile_triton(source, arch)
    try:
        return _compile(source, arch)
    except _NotInText as failure:
        _require_working(arch)
        if "memory" in str(failure):
            raise CompileFailed(f"{failure} ({COMPILE_BYTES / 2**30:g} GiB is the limit)") from None
    return _compile(source, arch)


def _compile_triton(source: Source, arch: str) -> Binary:
    from evoengine.virtual.host import Refused, compile_text

    try:
        return compile_text(source, arch)
    except Refused as error:
        raise CompileFailed(str(error)) from None


def compile_with_lines(source: Source, arch: str) -> bytes:
    """Return the cubin of a source with a line table, whose instructions are those of `compile_source`.

    Raises CompileFailed and MachineError.
    """
    return _to_cubin(source, (*options(arch, source.text).split(), "-lineinfo"))[0]


def _require_working(arch: str) -> None:
    """Raise MachineError if not even an empty kernel compiles."""
    probe = '#include <cuda_fp16.h>\nextern "C" __global__ void probe() {}\n'
    try:
        _compile(Source(probe, "probe", Launch((1, 1, 1), 32, 0)), arch)
    except CompileFailed as error:
        raise MachineError(f"not even an empty kernel can be compiled: {error}") from error


def _to_cubin(source: Source, flags: Sequence[str]) -> tuple[bytes, str]:
    """Return the cubin, and the compiler's log."""
    file = f"{source.entry}.cu"
    with memory_for(COMPILE_BYTES):
        cubin, log, error = _run_nvrtc(source.text, file, (*flags, *uncached()))
    if error is None:
        return _with_plain_names(source, whole_image(cubin), log)
    first = _ERROR.search(log)
    in_text = first is not None and first[1] in (None, file)
    kind = CompileFailed if in_text else _NotInText
    raise kind(_first_error(log) or error)


def _run_nvrtc(text: str, file: str, flags: Sequence[str]) -> tuple[bytes, str, str | None]:
    """Return the cubin and the compiler's log; where it refused the text, an error in place of the cubin."""
    api = nvrtc()
    headers = (tuple(each.encode() for each in column) for column in (C_HEADERS.values(), C_HEADERS))
    program = api.createProgram(text, file, *headers)
    try:
        try:
            api.compileProgram(program, (*flags, *(f"-I{folder}" for folder in include_folders())))
        except api.NVRTCError as error:
            return b"", api.getProgramLog(program), str(error)
        return api.getCUBIN(program), api.getProgramLog(program), None
    finally:
        api.destroyProgram(program)


def _with_plain_names(source: Source, cubin: bytes, log: str) -> tuple[bytes, str]:
    """Return cubin and log with each entry under its own name where C++ has given it another, as to an instance.

    The names are in the cubin's tables of strings, where a shorter one ends earlier.
    """
    names = kernel_names(cubin)
    for entry in (entry for entry, _ in source.launch.kernels(source.entry) if entry not in names):
        encoded = [name for name in names if name.startswith("_Z") and f"{len(entry)}{entry}" in name]
        if len(encoded) == 1:
            old = encoded[0].encode() + b"\0"
            cubin = cubin.replace(old, entry.encode().ljust(len(old), b"\0"))
            log = log.replace(encoded[0], entry)
    return cubin, log


def _compile(source: Source, arch: str) -> Binary:
    start = time.perf_counter()
    try:
        cubin, log = _to_cubin(source, options(arch, source.text).split())
        entries = [entry for entry, _ in source.launch.kernels(source.entry)]
        for entry in entries:
            require_entry(cubin, entry)
        listing = disassemble(cubin) if disassembler() else ""
    except (UsageError, subprocess.TimeoutExpired) as error:
        raise _NotInText(str(error)) from error
    elapsed = (time.perf_counter() - start) * 1e3
    return Binary(
        cubin=cubin,
        arch=arch,
        options=options(arch, source.text),
        compiler=compiler_version(),
        mix=instruction_mix(listing),
        listing=listing,
        compile_ms=elapsed,
        others=tuple(_resources(log, entry) for entry in entries[1:]),
        **read_report(log, source.entry),
    )


def _resources(log: str, entry: str) -> KernelResources:
    report = read_report(log, entry)
    return KernelResources(
        entry, report["registers"], report["spill_bytes"], report["stack_bytes"], report["shared_bytes"]
    )


class Report(TypedDict):
    """ptxas' report on a kernel, by the names of a Binary's fields."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]


def read_report(log: str, entry: str) -> Report:
    """Parse registers, spills, stack, static shared memory and warnings from ptxas' verbose log."""
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
    """Return ptxas' warnings, and its C75xx remarks, which report that wgmma was serialised or setmaxnreg ignored."""
    found = []
    for line in log.splitlines():
        match = _WARNING.match(line.strip())
        if match and ("warning" in line or "(C75" in line):
            found.append(match[1].strip())
    return found


def _first_error(log: str) -> str | None:
    """Return the first error, with the header to include if the name it misses is one of the C library's."""
    error = next((line.strip() for line in log.splitlines() if "error" in line.lower()), None)
    missing = _UNDEFINED.search(error or "")
    header = missing and next((name for name, text in C_HEADERS.items() if missing[1] in _WORD.findall(text)), None)
    return f"{error}; #include <{header}>, which NVRTC does not include by itself" if header else error


def require_entry(cubin: bytes, entry: str) -> None:
    """Raise CompileFailed if the binary has no kernel of that name, which a device would look up."""
    kernels = kernel_names(cubin)
    if entry in kernels:
        return
    found = f"it has {', '.join(kernels)}" if kernels else "it has no kernel at all"
    mangled = sum(name.startswith("_Z") and f"{len(entry)}{entry}" in name for name in kernels)
    remedy = f'declare it extern "C" __global__ void {entry}(…)' + (", so that C++ keeps its name" if mangled else "")
    if mangled > 1:
        remedy = f"{mangled} of them are instances or overloads of {entry}: leave one"
    raise CompileFailed(f"the binary has no kernel named {entry}: {found}; {remedy}")


def listing_of(binary: Binary) -> str:
    """Return the listing that came with the binary, else a new one. Raises what `disassemble` raises."""
    return binary.listing or disassemble(binary.cubin)


# Lines of the source text for addresses of machine code.
#
# A candidate's binary has no line table: it would treble its size in the ledger. Where a message names addresses, the
# source is compiled again with `-lineinfo`, which changes no instruction, and nvdisasm prints the lines.

_KERNEL = re.compile(r"^kernel (\w+),")


def name_source_lines(message: str, source: Source, binary: Binary) -> str:
    """Return an executor's message with `(FILE:LINE)` behind each instruction's address, as in `at 0x2180 (a.cu:18)`.

    Of a function that was inlined the line of its call is named too. The message is returned as it is where it names no
    instruction, or where the source does not compile to the same machine code again.
    """
    if not names_an_instruction(message):
        return message
    kernel = _KERNEL.match(message)
    entry = kernel[1] if kernel else source.entry
    try:
        cubin = compile_with_lines(source, binary.arch)
        if _code(cubin, entry) != _code(binary.cubin, entry):
            return message
        lines = line_table(cubin, entry)
    except (CompileFailed, MachineError, UsageError):
        return message
    return with_source_lines(message, lines, f"{source.entry}.cu")


def _code(cubin: bytes, entry: str) -> bytes | None:
    return next((s.data for s in elf.sections(cubin) if s.name == f".text.{entry}"), None)
