"""Includes of a kernel that the compiler or the emulator cannot handle, reported once before a search."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evoengine.cuda_emulator.declarations import blank_comments
from evoengine.cuda_emulator.inline_ptx import INCLUDE
from evoengine.cuda_emulator.preprocessing import LINE, STANDARD, knows_header
from evoengine.stages.toolchain import CCCL_HEADER, REMEDY, include_folders

_CONDITIONAL = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|endif)\b", re.MULTILINE)
_NEEDS_CCCL = re.compile(r"cooperative_groups(?:\.h|/)|(?:cuda|cub|nv)/")
_HOST_CODE = re.compile(r"thrust/|cub/device/|cublas|cudnn|torch/|ATen/|cutlass/device/")
_NAMED = "the kernel's text must stand alone, so put that of the header into it or, in a template, include it by Jinja"


def unsupported_includes(text: str, emulated: bool) -> list[str]:
    """Return a sentence for each included header that NVRTC, or with `emulated` the emulator, does not provide.

    Includes within #if are left to the compiler. Raises MachineError if CUDA's own headers are missing.
    """
    found = []
    for line, name in _includes(text):
        reason = _refused_by_nvrtc(name) or (_unknown_to_emulator(name) if emulated else None)
        if reason:
            found.append(f"line {line}: {name}: {reason}")
    return found


def _includes(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every include outside conditionals, other than the guard around a whole header."""
    code = blank_comments(text)
    marks = sorted([*_CONDITIONAL.finditer(code), *LINE.finditer(code)], key=lambda mark: mark.start())
    open_conditionals: list[bool] = []
    for mark in marks:
        if mark.re is LINE:
            if not any(open_conditionals):
                yield code.count("\n", 0, mark.start()) + 1, mark[1] or mark[2]
        elif mark[1] == "endif":
            del open_conditionals[-1:]
        else:
            open_conditionals.append(not _is_guard(code[mark.start() :]))


def _is_guard(code: str) -> bool:
    """Return whether this begins #ifndef NAME and #define NAME; the text behind is then read the first time."""
    return re.match(r"[ \t]*#[ \t]*ifndef[ \t]+(\w+)\s+#[ \t]*define[ \t]+\1[ \t]*$", code, re.MULTILINE) is not None


def _refused_by_nvrtc(name: str) -> str | None:
    if _HOST_CODE.match(name):
        return "it is for host code, and a kernel's text holds device code alone"
    if name == "cub/cub.cuh":
        return "NVRTC refuses it; include the primitive's own header, such as cub/block/block_reduce.cuh"
    folders = include_folders()
    if _NEEDS_CCCL.match(name) and not any((folder / CCCL_HEADER).is_file() for folder in folders):
        return f"it needs CCCL, which was not found: {REMEDY}"
    if name in C_HEADERS or any((folder / name).is_file() for folder in folders):
        return None
    if name in STANDARD:
        return f"NVRTC has no standard library; include cuda/std/{name} and write cuda::std for std"
    return f"no such header among CUDA's; {_NAMED}"


def _unknown_to_emulator(name: str) -> str | None:
    if knows_header(name):
        return None
    return "the emulator does not know it, so that no candidate can be gated without a GPU; search on one"


# The parts of the C library's headers that device code uses: NVRTC has none, but kernels for nvcc include them.
#
# Names that CUDA has without any include (printf, assert, expf, memcpy, size_t) need nothing here. The integers of 64
# bits are `long long`, as CCCL has them under NVRTC.

_INTEGERS = (
    (INCLUDE / "evo_emu/c_stdint.h").read_text("utf-8")
    + """\
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long intptr_t;
typedef unsigned long long uintptr_t;
"""
)
_LIMITS = (INCLUDE / "evo_emu/c_limits.h").read_text("utf-8")
_FLOATS = (INCLUDE / "evo_emu/c_float.h").read_text("utf-8")
_MATH = (INCLUDE / "math.h").read_text("utf-8")
_BY_C_NAME = {
    "assert": "", "float": _FLOATS, "limits": _LIMITS, "math": _MATH, "stdbool": "", "stddef": "",
    "stdint": _INTEGERS, "stdio": "", "stdlib": "", "string": "",
}  # fmt: skip # a table
_DRIVER = (INCLUDE / "cuda.h").read_text("utf-8")

C_HEADERS = (
    {f"{name}.h": text for name, text in _BY_C_NAME.items()}
    | {f"c{name}": text for name, text in _BY_C_NAME.items()}
    | {"cuda.h": _DRIVER, "cudaTypedefs.h": _DRIVER}
)
"""stdint.h and cstdint, and so on → what each holds"""
