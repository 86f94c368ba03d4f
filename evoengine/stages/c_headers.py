"""The C library's headers as far as device code uses them: NVRTC brings none, and kernels written for nvcc name them.

Names that CUDA has without any include (printf, assert, expf, memcpy, size_t) need nothing here. The integers of 64
bits are `long long`, as CCCL has them under NVRTC.
"""

from __future__ import annotations

from evoengine.devices.emulator.inline_ptx import INCLUDE

_INTEGERS = """\
#pragma once
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
#define INT8_MAX 127
#define INT8_MIN (-128)
#define INT16_MAX 32767
#define INT16_MIN (-32768)
#define INT32_MAX 2147483647
#define INT32_MIN (-2147483647 - 1)
#define INT64_MAX 9223372036854775807ll
#define INT64_MIN (-9223372036854775807ll - 1)
#define UINT8_MAX 255
#define UINT16_MAX 65535
#define UINT32_MAX 4294967295u
#define UINT64_MAX 18446744073709551615ull
"""
_LIMITS = """\
#pragma once
#define CHAR_BIT 8
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1)
#define ULONG_MAX 18446744073709551615ul
#define LLONG_MAX 9223372036854775807ll
#define LLONG_MIN (-9223372036854775807ll - 1)
#define ULLONG_MAX 18446744073709551615ull
"""
_FLOATS = """\
#pragma once
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
"""
_MATH = (INCLUDE / "math.h").read_text("utf-8")
_BY_C_NAME = {
    "assert": "", "float": _FLOATS, "limits": _LIMITS, "math": _MATH, "stdbool": "", "stddef": "",
    "stdint": _INTEGERS, "stdio": "", "stdlib": "", "string": "",
}  # fmt: skip

C_HEADERS = {f"{name}.h": text for name, text in _BY_C_NAME.items()} | {
    f"c{name}": text for name, text in _BY_C_NAME.items()
}
"""stdint.h and cstdint, and so on → what each holds"""
