"""What a kernel may include in the emulator."""

from __future__ import annotations

import re

from evoengine.cuda_emulator.inline_ptx import INCLUDE

PROVIDED = frozenset(
    "assert.h cassert stdio.h cstdio stdlib.h cstdlib string.h cstring cuda_runtime.h cuda_runtime_api.h "
    "device_launch_parameters.h device_functions.h vector_types.h vector_functions.h sm_60_atomic_functions.h".split()
)
"""headers of which the emulator has what device code uses without any include"""
HOST_HEADERS = frozenset("float.h cfloat limits.h climits stdbool.h cstdbool stddef.h cstddef stdint.h cstdint".split())
"""headers that the host compiler brings"""

STANDARD = frozenset(
    "array bit cassert cfloat climits cmath concepts cstddef cstdint initializer_list limits numbers optional ratio "
    "span tuple type_traits utility version".split()
)
"""headers of cuda/std for which the host's C++ library serves: cuda::std is std in the emulator"""

LINE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|\"([^\"\n]+)\")[^\n]*", re.MULTILINE)


def knows_header(name: str) -> bool:
    """Return whether the emulator compiles a kernel that includes the header of that name."""
    standard = name.removeprefix("cuda/std/") if name.startswith("cuda/std/") else ""
    return name in PROVIDED or name in HOST_HEADERS or standard in STANDARD or (INCLUDE / name).is_file()


def for_host(text: str) -> str:
    """Return the text with includes for the host compiler.

    Headers that the emulator provides are removed; cuda/std becomes the host's.
    """
    return LINE.sub(_for_host, text)


_NUMBERS = {"limits": "c_limits.h", "float": "c_float.h", "stdint": "c_stdint.h"}
"""C header → what defines its limits again, in numbers"""


def in_host_environment(text: str, restore_host_macros: str, device_macros: str) -> str:
    """Return the text with directives around each include of a host header; line numbers are kept."""

    def wrap(line: re.Match[str]) -> str:
        name = line[1] or line[2]
        if not is_host_header(name):
            return line[0]
        numbers = _NUMBERS.get(name.removesuffix(".h").removeprefix("c"))
        more = f"#include <evo_emu/{numbers}>\n" if numbers else ""
        number = text.count("\n", 0, line.start()) + 1
        before = f'{restore_host_macros}#line {number} "kernel.cu"\n'
        return f'{before}{line[0]}\n{device_macros}{more}#line {number + 1} "kernel.cu"'

    return LINE.sub(wrap, text)


def host_headers(text: str) -> bool:
    """Return whether the text includes a host header, directly or through cuda/std."""
    return any(is_host_header(line[1] or line[2]) for line in LINE.finditer(text))


def is_host_header(name: str) -> bool:
    return name.startswith(("cub/", "cuda/")) or not (INCLUDE / name).is_file()


def _for_host(line: re.Match[str]) -> str:
    name = line[1] or line[2]
    standard = name.removeprefix("cuda/std/")
    if name in PROVIDED or (standard != name and standard in PROVIDED):
        return ""
    return f"#include <{standard}>" if standard != name and standard in STANDARD else line[0]
