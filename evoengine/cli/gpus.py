"""evoengine gpus"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from evoengine.cli.options import json_option
from evoengine.errors import MachineError
from evoengine.gpu import Gpu, known_gpus

if TYPE_CHECKING:
    from rich.table import Table

    from evoengine.tuning.boards import Fitting

SCHEMA = 1
KB = 1024
WIDTH_OF_NAMES = 80
"""columns of a terminal"""


@click.command()
@json_option
def gpus(as_json: bool) -> None:
    """List the GPUs that can be tuned for: their limits and peaks, and the families of kernels that fit.

    Peaks are those of the data sheets, of the tensor cores in fp16 with FP32 sums. `--gpu-file` of search and verify
    takes a board that is not here: a TOML file with one table as in evoengine/gpus.toml.
    """
    from evoengine.cli.display import say, stdout
    from evoengine.sass.chip import why_unmodelled
    from evoengine.tuning.boards import fitting_families

    known = list(known_gpus().values())
    fitting, compiled = fitting_families(known), _compiled()
    if as_json:
        rows = [gpu_json(gpu, fitting[gpu.key], why_unmodelled(gpu), compiled) for gpu in known]
        click.echo(json.dumps({"schema": SCHEMA, "gpus": rows}, indent=2))
        return
    stdout.print(gpus_table(known, fitting, stdout.width))
    for line in remarks(known, fitting, compiled):
        say(line)


def gpu_json(
    gpu: Gpu, fitting: Sequence[Fitting], unmodelled: str | None, compiled: Sequence[int] | None
) -> dict[str, Any]:
    """Sizes in bytes, clock in GHz, peaks in TFLOPS and GB/s; `compiles` is null where there is no compiler here."""
    fields = {name.removeprefix("gpu."): value for name, value in gpu.variables().items()}
    return fields | {
        "families": {f.workload: list(f.families) for f in fitting},
        "left_out": {f.workload: dict(f.left_out) for f in fitting if f.left_out},
        "compiles": None if compiled is None else gpu.capability in compiled,
        "predicted_by": "formula" if unmodelled else "model",
    }


def gpus_table(known: Sequence[Gpu], fitting: Mapping[str, Sequence[Fitting]], width: int) -> Table:
    """A line per GPU, or several where names and families do not fit; below WIDTH_OF_NAMES columns without names."""
    from rich.table import Column, Table

    numbers = ("SMs", "GHz", "GB/s", "KB/\nblock", "KB/\nSM", "TFLOPS")
    named = width >= WIDTH_OF_NAMES
    table = Table(
        Column("GPU", no_wrap=True), *([Column("name", min_width=16)] if named else []), Column("arch", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in numbers), Column("fit", min_width=6),
        box=None, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for gpu in known:
        table.add_row(
            gpu.key, *([gpu.name.removeprefix("NVIDIA ")] if named else []), gpu.arch, str(gpu.sms),
            f"{gpu.clock_ghz:.2f}", f"{gpu.memory_gbs:g}", str(gpu.shared_per_block // KB),
            str(gpu.shared_per_sm // KB), f"{gpu.tensor_tflops:g}", _fitting_text(fitting[gpu.key]),
        )  # fmt: skip
    return table


def _fitting_text(fitting: Sequence[Fitting]) -> str:
    """All families, or not some: what sets GPUs apart."""
    left_out = dict.fromkeys(family for f in fitting for family in f.left_out)
    return f"not {', '.join(left_out)}" if left_out else "all"


def remarks(
    known: Sequence[Gpu], fitting: Mapping[str, Sequence[Fitting]], compiled: Sequence[int] | None
) -> list[str]:
    """Beneath the table: what the families are, why some are left out, what the compiler here cannot do."""
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


def _compiled() -> Sequence[int] | None:
    from evoengine.stages.toolchain import compiled_capabilities

    try:
        return compiled_capabilities()
    except MachineError:
        return None
