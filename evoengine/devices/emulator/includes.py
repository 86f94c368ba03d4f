"""What a kernel may include in the emulator."""

from __future__ import annotations

import re

from evoengine.devices.emulator.inline_ptx import INCLUDE

GIVEN = frozenset(
    "assert.h cassert stdio.h cstdio stdlib.h cstdlib string.h cstring cuda_runtime.h cuda_runtime_api.h "
    "device_launch_parameters.h device_functions.h vector_types.h vector_functions.h sm_60_atomic_functions.h".split()
)
"""headers of which the emulator has what device code uses without any include"""
OF_THE_HOST = frozenset("float.h cfloat limits.h climits stdbool.h cstdbool stddef.h cstddef stdint.h cstdint".split())
"""headers that the host compiler brings"""

STANDARD = frozenset(
    "array bit cassert cfloat climits cmath concepts cstddef cstdint initializer_list limits numbers optional ratio "
    "span tuple type_traits utility version".split()
)
"""headers of cuda/std for which the host's C++ library serves: cuda::std is std in the emulator"""

LINE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|\"([^\"\n]+)\")[^\n]*", re.MULTILINE)


def knows_header(name: str) -> bool:
    """Whether the emulator compiles a kernel that includes the header of that name."""
    standard = name.removeprefix("cuda/std/") if name.startswith("cuda/std/") else ""
    return name in GIVEN or name in OF_THE_HOST or standard in STANDARD or (INCLUDE / name).is_file()


def for_host(text: str) -> str:
    """The text with includes as the host compiler takes them: none of what is given, the host's for cuda/std."""
    return LINE.sub(_for_host, text)


def _for_host(line: re.Match[str]) -> str:
    name = line[1] or line[2]
    standard = name.removeprefix("cuda/std/")
    if name in GIVEN or (standard != name and standard in GIVEN):
        return ""
    return f"#include <{standard}>" if standard != name and standard in STANDARD else line[0]
