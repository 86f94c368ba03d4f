"""The parts of the C library's headers that device code uses: NVRTC has none, but kernels for nvcc include them.

Names that CUDA has without any include (printf, assert, expf, memcpy, size_t) need nothing here. The integers of 64
bits are `long long`, as CCCL has them under NVRTC.
"""

from __future__ import annotations

from evoengine.cuda_emulator.inline_ptx import INCLUDE

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

C_HEADERS = {f"{name}.h": text for name, text in _BY_C_NAME.items()} | {
    f"c{name}": text for name, text in _BY_C_NAME.items()
}
"""stdint.h and cstdint, and so on → what each holds"""
