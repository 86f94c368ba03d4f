"""A CUDA kernel as the reference of a folder: its text is run in the emulator on the inputs of a case."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run_rounds
from evoengine.devices.base import Argument, ConstantArgument, KernelCall, KernelFailure
from evoengine.errors import UsageError
from evoengine.records import Launch, Source
from evoengine.space.expression import Expression

ARCH = "sm_90a"
SECONDS = 120.0
"""CPU time limit of one run"""
_KEYS = ("file", "text", "entry", "parameters", "threads", "grid", "shared")


@dataclass(frozen=True)
class CudaReference:
    """A kernel's text with its launch; sizes are expressions of axes. It takes `parameters` in their order."""

    text: str
    entry: str
    parameters: tuple[str, ...]
    threads: tuple[Expression, ...]
    grid: tuple[Expression, ...]
    shared: Expression


def read_reference(
    given: Mapping[str, Any],
    parameters: Sequence[str],
    expression: Callable[[Any, str], Expression],
    fail: Callable[[str], Any],
) -> CudaReference:
    """Read the object that is the reference in problem.json; `parameters` are those of the tuned kernel."""
    for key in given:
        if key not in _KEYS:
            fail(f"reference has the unknown key {key!r}; known are {', '.join(_KEYS)}")
    text, entry = given.get("text"), given.get("entry")
    if not isinstance(text, str) or not isinstance(entry, str):
        fail('reference needs a kernel\'s file and its entry, as in {"file": "naive.cu", "entry": "naive", "grid": 1}')
    sizes: dict[str, tuple[Expression, ...]] = {}
    for key in ("threads", "grid"):
        listed = given.get(key, 1)
        listed = listed if isinstance(listed, list) else [listed]
        if not 1 <= len(listed) <= 3:
            fail(f"reference.{key} has {len(listed)} sizes; it has one to three")
        sizes[key] = tuple(expression(size, f"reference.{key}") for size in listed)
    own = given.get("parameters", [*parameters])
    if not isinstance(own, list) or not all(name in parameters for name in own):
        fail(f"reference.parameters must be a list of some of the kernel's: {', '.join(parameters)}")
    shared = expression(given.get("shared", 0), "reference.shared")
    return CudaReference(str(text), str(entry), tuple(own), sizes["threads"], sizes["grid"], shared)


def run_reference(
    reference: CudaReference,
    axes: Mapping[str, int],
    arguments: Mapping[str, Argument],
    constants: Sequence[ConstantArgument],
    of: str,
) -> Mapping[str, np.ndarray]:
    """Return every tensor by name as the kernel leaves it.

    Raises UsageError if the kernel cannot be built or run.
    """
    threads, grid = (_three(sizes, axes) for sizes in (reference.threads, reference.grid))
    launch = Launch(grid, prod(threads), int(reference.shared.evaluate(axes)), threads[1:])
    used = set(re.findall(r"[A-Za-z_]\w*", reference.text))
    macros = "".join(
        f"#define {name} {size}\n" for name, size in axes.items() if name in used - {*reference.parameters}
    )
    source = Source(f"{macros}#line 1\n{reference.text}", reference.entry, launch)
    call = KernelCall(reference.entry, launch, [*(arguments[name] for name in reference.parameters), *constants])
    try:
        return run_rounds(build(source, ARCH), [[call]], 0, SECONDS).tensors[0]
    except KernelFailure as failure:
        raise UsageError(f"{of} cannot be run: {failure}") from None


def _three(sizes: Sequence[Expression], axes: Mapping[str, int]) -> tuple[int, int, int]:
    found = [int(size.evaluate(axes)) for size in sizes]
    x, y, z = (*found, 1, 1)[:3]
    return x, y, z
