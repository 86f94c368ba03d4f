"""This project's start points beside FlashAttention-3's own machine code: what a step holds, and predicted speed.

    python benchmarks/machine_code.py --cubins DIR [--rows NAME …] [--json OUT]

DIR holds FlashAttention-3's cubins (benchmarks/flash_attention_3.py says which). Each of its six kernels is put beside
the start point of search_spaces/attention.toml for the same problem, compiled here; both are predicted on an H100. As
warpgroups fall into step with one another by chance, a figure is the mean over LATENCIES. Nothing is measured on a GPU.
Exit code 1 where a start point is slower than FlashAttention-3's kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks import flash_attention_3 as fa3  # noqa: E402
from evoengine.errors import EvoengineError, UsageError  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import Config  # noqa: E402
from evoengine.sass.chip import Chip, find_chip  # noqa: E402
from evoengine.sass.core import Program  # noqa: E402
from evoengine.sass.cubin import kernel_names, read_kernel  # noqa: E402
from evoengine.sass.launch import DrawnArgument, prepare  # noqa: E402
from evoengine.sass.listing import disassemble  # noqa: E402
from evoengine.sass.main_loop import MainLoop, count_opcode, main_loops, stall_sum  # noqa: E402
from evoengine.sass.predict import predict  # noqa: E402
from evoengine.space.space import load_space  # noqa: E402
from evoengine.stages.compile import compile_source  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

LATENCIES = (380.0, 400.0, 420.0)
"""clocks of a TMA load, which shift the warpgroups of a block against one another"""
NO_WORSE = 0.995
"""of FlashAttention-3: equal, within what the mean over LATENCIES leaves of chance"""

_BESIDE = {"family": "wgmma", "overlap": True}
STARTS: Mapping[str, Config] = {
    "d64_192x128": {**_BESIDE, "tile_m": 192, "tile_n": 128, "pv_wait": "after_softmax"},
    "d64_192x192": {**_BESIDE, "tile_m": 192, "tile_n": 192},
    "d64_causal_192x128": {**_BESIDE, "tile_m": 192, "tile_n": 128, "schedule": "static"},
    "d128_128x176": {**_BESIDE, "tile_m": 128, "tile_n": 176, "cluster": 2},
    "d128_causal_128x128": {**_BESIDE, "tile_m": 128, "tile_n": 128, "schedule": "static"},
    "d256_128x80": {**_BESIDE, "tile_m": 128, "tile_n": 80, "cluster": 2},
}
"""FlashAttention-3's kernel → what the first start point beside it has"""


@dataclass(frozen=True)
class Step:
    """The shortest way round the shortest main loop, for one warp: it masks nothing, and rescales nothing where a vote
    says so."""

    instructions: int
    per_score: float
    """instructions of a thread for each score of the warp's 16 rows"""
    mufu: int
    r2ur: int
    stalls: int
    """clocks that the warp alone would take"""

    @classmethod
    def of(cls, loops: Sequence[MainLoop], columns: int) -> Step:
        path = min((loop.path for loop in loops), key=len)
        per_score = 32 * len(path) / (16 * columns)
        return cls(len(path), per_score, count_opcode(path, "MUFU"), count_opcode(path, "R2UR"), stall_sum(path))


@dataclass(frozen=True)
class Kernel:
    name: str
    step: Step
    tflops: float


@dataclass(frozen=True)
class Row:
    name: str
    theirs: Kernel
    ours: Kernel

    @property
    def ratio(self) -> float:
        return self.ours.tflops / self.theirs.tflops

    @property
    def reached(self) -> bool:
        return self.ratio >= NO_WORSE


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def perturbed(chip: Chip) -> list[Chip]:
    return [replace(chip, rates={**chip.rates, "tma_latency": clocks}) for clocks in LATENCIES]


def problem_text(published: fa3.Published) -> str:
    p = published.problem
    return f"b{p.batch},h{p.heads},s{p.seqlen},d{p.dim},fp16" + ",causal" * p.causal


def ours(published: fa3.Published, wanted: Config, chip: Chip) -> Kernel:
    gpu = find_gpu(fa3.CHIP)
    target = Target(*parse_problem(problem_text(published)), gpu)
    space = load_space(asset("search_spaces") / "attention.toml", target.problem, gpu)
    config = next((c for c in space.starts if wanted.items() <= c.items()), None)
    if config is None:
        raise UsageError(f"attention.toml has no start point with {wanted} that is valid for {target.problem}")
    source = render(target, space, config, asset("templates"))
    binary = compile_source(source, gpu.arch)
    program, kernel = Program(binary.listing, source.entry), read_kernel(binary.cubin, source.entry)
    parameters = target.workload.parameters(target.problem, config)
    arguments = [DrawnArgument(p.name, p.bytes, p.dtype, p.output) if hasattr(p, "bytes") else p for p in parameters]
    launch = prepare(kernel, source.launch, arguments, 0)
    times = [predict(program, launch, one, target.flops).time_us for one in perturbed(chip)]
    step = Step.of(main_loops(binary.listing, source.entry), int(config["tile_n"]))
    return Kernel(title(config), step, target.flops / float(np.mean(times)) / 1e6)


def title(config: Config) -> str:
    """What tells start points of one tile from one another."""
    words = [f"{config['tile_m']}×{config['tile_n']}", str(config["pv_wait"])]
    words += [str(config["schedule"])] if config["schedule"] != "none" else []
    words += ["2 blocks"] if config.get("cluster") == 2 else []
    words += [f"exp2 {config['exp2_on_fma']:g}"] if config["exp2_on_fma"] else []
    words += [f"rescale {config['rescale_above']}"] if config["rescale_above"] else []
    words += ["bits"] if config["max_by"] == "bits" else []
    return " ".join(words)


def theirs(folder: Path, name: str, chip: Chip) -> Kernel:
    cubin = (folder / f"{name}.cubin").read_bytes()
    loops = main_loops(disassemble(cubin), kernel_names(cubin)[0])
    tile, problem = fa3.KERNELS[name].tile, fa3.KERNELS[name].problem
    times = [fa3.predict_launch(folder, name, problem, one).time_us for one in perturbed(chip)]
    tflops = problem.flops / float(np.mean(times)) / 1e6
    return Kernel(f"FlashAttention-3 {tile.rows}×{tile.columns}", Step.of(loops, tile.columns), tflops)


def table(rows: Sequence[Row]) -> Table:
    out = Table(title="a warp's step of the main loop, and predicted TFLOPS on an H100; not measured")
    for name in ("problem", "kernel", "instructions", "per score", "MUFU", "R2UR", "stall sum", "TFLOPS", "mark"):
        out.add_column(name, no_wrap=True, justify="left" if name in ("problem", "kernel") else "right")
    for row in rows:
        problem = problem_text(fa3.KERNELS[row.name])
        for kernel, first in ((row.theirs, True), (row.ours, False)):
            s = kernel.step
            figure = f"{kernel.tflops:.0f}" + ("" if first else f" ({row.ratio - 1:+.1%})")
            counts = [str(s.instructions), f"{s.per_score:.2f}", str(s.mufu), str(s.r2ur), str(s.stalls)]
            mark = "" if first else "reached" if row.reached else "missed"
            out.add_row(problem if first else "", kernel.name, *counts, figure, mark)
        out.add_section()
    return out


def as_json(rows: Sequence[Row]) -> str:
    def kernel(one: Kernel) -> dict[str, object]:
        return {"kernel": one.name, "step": vars(one.step), "tflops": one.tflops}

    found = {r.name: {"theirs": kernel(r.theirs), "ours": kernel(r.ours), "reached": r.reached} for r in rows}
    return json.dumps(found, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cubins", type=Path, required=True, metavar="DIR", help="FlashAttention-3's binaries")
    parser.add_argument(
        "--rows", nargs="+", choices=STARTS, default=list(STARTS), metavar="NAME", help="in place of all"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    asked = parser.parse_args(arguments)
    missing = [name for name in asked.rows if not (asked.cubins / f"{name}.cubin").is_file()]
    if missing:
        parser.error(f"{asked.cubins} has no {', '.join(f'{name}.cubin' for name in missing)}")
    chip = find_chip(fa3.CHIP)
    try:
        rows = [
            Row(name, theirs(asked.cubins, name, chip), ours(fa3.KERNELS[name], STARTS[name], chip))
            for name in asked.rows
        ]
    except EvoengineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    Console(width=180).print(table(rows))
    if asked.json:
        asked.json.write_text(as_json(rows))
    return 0 if all(row.reached for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
