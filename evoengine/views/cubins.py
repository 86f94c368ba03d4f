"""Kernels of binaries, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import TypedDict

from evoengine.sass.cubin import Kernel
from evoengine.views.encoding import SCHEMA
from evoengine.views.tables import Column, Table


class CubinKernelAnswer(TypedDict):
    """A kernel; sizes are in bytes."""

    entry: str
    arch: int
    registers: int
    shared_bytes: int
    local_bytes: int
    parameters: list[int]
    max_threads: int | None
    cluster: list[int]


class CubinsAnswer(TypedDict):
    """The answer of `evoengine cubins --json`."""

    schema: int
    file: str
    kernels: list[CubinKernelAnswer]


def cubins_json(file: Path, kernels: Sequence[Kernel]) -> CubinsAnswer:
    """Return what --json prints."""
    return {"schema": SCHEMA, "file": str(file), "kernels": [_kernel_json(kernel) for kernel in kernels]}


def _kernel_json(kernel: Kernel) -> CubinKernelAnswer:
    return {
        "entry": kernel.entry,
        "arch": kernel.arch,
        "registers": kernel.registers,
        "shared_bytes": kernel.shared_bytes,
        "local_bytes": kernel.local_bytes,
        "parameters": [size for _, size in kernel.parameters],
        "max_threads": kernel.max_threads,
        "cluster": list(kernel.cluster),
    }


def cubins_table(kernels: Sequence[Kernel]) -> Table:
    """Return a row for each kernel."""
    columns = [
        Column("kernel", least=20, folds=True), Column("arch"), Column("registers", right=True),
        Column("shared", right=True), Column("local", right=True), Column("threads at most", right=True, leaves=1),
        Column("parameters", least=8, folds=True),
    ]  # fmt: skip
    return Table(columns, map(_row, kernels))


def _row(kernel: Kernel) -> tuple[str, ...]:
    return (
        kernel.entry,
        f"sm_{kernel.arch}",
        str(kernel.registers),
        str(kernel.shared_bytes),
        str(kernel.local_bytes or ""),
        str(kernel.max_threads or ""),
        " ".join(str(size) for _, size in kernel.parameters),
    )
