"""evoengine gpus"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import json_option
from evoengine.gpu import Gpu, known_gpus

if TYPE_CHECKING:
    from evoengine.cli.tables import Table
    from evoengine.tuning.boards import Fitting

KB = 1024


@click.command()
@json_option
def gpus(as_json: bool) -> None:
    """List the supported GPUs with their limits and peaks, and the kernel families that fit them.

    Peaks are from data sheets: dense fp16 tensor operations with FP32 accumulation. For other boards, pass --gpu-file
    to search or verify: a TOML file with one table as in evoengine/gpus.toml.
    """
    from evoengine.cli.display import say, stdout
    from evoengine.cli.output import print_json
    from evoengine.sass.chip import why_unmodelled
    from evoengine.tuning.boards import fitting_families
    from evoengine.views.json_shapes import compilable, gpu_json

    known = list(known_gpus().values())
    fitting, compiled = fitting_families(known), compilable()
    if as_json:
        rows = [gpu_json(gpu, fitting[gpu.key], why_unmodelled(gpu), compiled) for gpu in known]
        print_json(gpus=rows)
        return
    stdout.print(gpus_table(known, fitting))
    for line in remarks(known, fitting, compiled):
        say(line)


def gpus_table(known: Sequence[Gpu], fitting: Mapping[str, Sequence[Fitting]]) -> Table:
    """Return a table with one GPU per line. In a narrow terminal the names are left out first."""
    from evoengine.cli.tables import Column, Table

    columns = [Column("GPU"), Column("name", leaves=9), Column("arch"), Column("SMs", right=True)]
    numbers = ("GHz", "GB/s", "KB per block", "KB per SM")
    columns += [Column(name, right=True, leaves=n) for n, name in zip((4, 0, 3, 2), numbers, strict=True)]
    columns += [Column("TFLOPS", right=True), Column("fit", least=6, folds=True)]
    rows = [
        [
            gpu.key, gpu.name.removeprefix("NVIDIA "), gpu.arch, str(gpu.sms), f"{gpu.clock_ghz:.2f}",
            f"{gpu.memory_gbs:g}", str(gpu.shared_per_block // KB), str(gpu.shared_per_sm // KB),
            f"{gpu.tensor_tflops:g}", _fitting_text(fitting[gpu.key]),
        ]
        for gpu in known
    ]  # fmt: skip
    return Table(columns, rows)


def _fitting_text(fitting: Sequence[Fitting]) -> str:
    """Return "all", or the families that do not fit."""
    left_out = dict.fromkeys(family for f in fitting for family in f.left_out)
    return f"not {', '.join(left_out)}" if left_out else "all"


def remarks(
    known: Sequence[Gpu], fitting: Mapping[str, Sequence[Fitting]], compiled: Sequence[int] | None
) -> list[str]:
    """Return the lines below the table: the families, why some do not fit, and what the compiler cannot target."""
    by_workload: dict[str, dict[str, None]] = {}
    reasons: dict[str, None] = {}
    for row in fitting.values():
        for f in row:
            by_workload.setdefault(f.workload, {}).update(dict.fromkeys((*f.families, *f.left_out)))
            reasons |= {f"{family} left out: {why}": None for family, why in f.left_out.items()}
    listed = "; ".join(f"{workload}: {', '.join(families)}" for workload, families in by_workload.items())
    lines = [f"families of {listed}", *reasons]
    others = [gpu.key for gpu in known if compiled is not None and gpu.capability not in compiled]
    if others:
        lines.append(f"the compiler here cannot compile for {', '.join(others)}")
    return lines
