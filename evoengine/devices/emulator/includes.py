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

LINE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|\"([^\"\n]+)\")[^\n]*", re.MULTILINE)


def knows_header(name: str) -> bool:
    """Whether the emulator compiles a kernel that includes the header of that name."""
    return name in GIVEN or name in OF_THE_HOST or (INCLUDE / name).is_file()


def without_given(text: str) -> str:
    """The text with the includes of what is given blanked, so that the host's headers of these names are not read."""
    return LINE.sub(lambda line: "" if (line[1] or line[2]) in GIVEN else line[0], text)
