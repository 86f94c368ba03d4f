"""FlashAttention-2's own machine code under the performance model, beside this project's mma kernels.

    python benchmarks/flash_attention_2.py --cubins DIR [--gpu a100] [--json OUT]

DIR holds cubins for sm_80 with FlashAttention-2's forward kernels, of version 2.5.x (the parameter's layout is theirs).
The wheel of xFormers 0.0.26 has them: `_C_flashattention.so` keeps them uncompressed in its fat binaries. Problems are
those of the published figures: 16,384 tokens in all, 2048 / d heads of dimension d, fp16, forward. Of this project
each start point of the family is compiled and predicted, and the fastest shown. Both are predictions by one model with
one set of constants, and means over SHIFTS, as warps fall into step with one another by chance.

What others measured stands in a column of its own (RECORDED) and is of their kernels alone. The latency of HMMA and
the clocks of a matrix load were inferred from it: that predictions agree with it is no proof of these two. Nothing is
measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from evoengine.devices.base import ScalarArgument, StructArgument, TensorArgument, TensorParameter  # noqa: E402
from evoengine.errors import EvoengineError, UsageError  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import Config  # noqa: E402
from evoengine.sass.chip import find_chip  # noqa: E402
from evoengine.sass.core import Program  # noqa: E402
from evoengine.sass.cubin import Kernel, kernel_names, read_kernel  # noqa: E402
from evoengine.sass.launch import DrawnArgument, Geometry, Launch, prepare  # noqa: E402
from evoengine.sass.listing import disassemble  # noqa: E402
from evoengine.sass.predict import predict  # noqa: E402
from evoengine.space.space import load_space  # noqa: E402
from evoengine.stages.compile import compile_source  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.attention.problem import AttentionProblem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

HEAD_DIMS = (64, 96, 128, 256)
SEQ = 2048
SHIFTS = (0.9, 1.0, 1.1)
"""of the L2's latency, which shift the warps of an SM against one another"""
CANDIDATES = 2
"""start points of one prediction's first ranks that the mean over SHIFTS decides between"""
RECORDED: Mapping[tuple[str, int, bool], float] = {
    ("rtx4090", 64, False): 168.91,
    ("rtx4090", 64, True): 142.23,
    ("rtx4090", 128, False): 169.28,
    ("rtx4090", 128, True): 151.19,
    ("rtx4090", 256, False): 156.15,
    ("rtx4090", 256, True): 144.12,
    ("a100", 128, False): 185.6,
    ("a100", 128, True): 156.3,
}
"""GPU, head dimension, causal mask → TFLOPS of FlashAttention-2 as others measured it.

RTX 4090: tl_doc/flash_perf.md of TileLang's branch of apache/tvm, 2,048 tokens a sequence, batch and clock not stated.
A100: performance/flash-attn/README.md of liangan1/GPU_travel, a sequence of 4,096 tokens, 32 heads, at some 1.2 GHz,
where the boost clock is 1.41."""


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    columns: int
    warps: int

    def shared_bytes(self, dim: int) -> int:
        """Q, and a tile each of K and V."""
        return 2 * dim * (self.rows + 2 * self.columns)


def tile_of(gpu: str, dim: int, causal: bool) -> Tile:
    """What FlashAttention-2 chooses without dropout (csrc/flash_attn/src/flash_fwd_launch_template.h)."""
    small = find_gpu(gpu).capability in (86, 89)
    if dim == 64:
        return Tile(128, 128, 4)
    if dim == 96:
        return Tile(64, 64, 4) if small and causal else Tile(128, 64, 4)
    if dim == 128:
        return (Tile(64, 64, 4) if causal else Tile(128, 32, 4)) if small else Tile(128, 64, 4)
    return Tile(64, 64, 4) if small else Tile(128, 64, 8)


# ── the launch ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Offsets in the kernel's one parameter, Flash_fwd_params: from the order and sizes of its members, and in agreement
# with every constant that the machine code reads. What is not named stays zero: dropout, variable lengths, paging,
# rotary embeddings, ALiBi.
_Q, _K, _V, _STRIDES, _HEADS = 0, 8, 16, 24, 96
_O, _STRIDES_O, _LSE, _SIZES, _SCALES, _WINDOW, _CUMULATIVE = 112, 128, 160, 176, 212, 380, 426
PARAMETER_BYTES = 448


def arguments(
    kernel: Kernel, problem: AttentionProblem, tensors: Mapping[str, np.ndarray] | None = None
) -> StructArgument:
    """The kernel's parameter; `tensors` q, k and v are [batch, seq, heads, head_dim] fp16, drawn where not given."""
    size = kernel.parameters[0][1]
    if size != PARAMETER_BYTES:
        raise UsageError(f"a parameter of {size} bytes; kernels of FlashAttention 2.5.x have one of {PARAMETER_BYTES}")
    batch, heads, seq, dim = problem.batch, problem.heads, problem.seq_q, problem.head_dim
    row, whole = heads * dim, seq * heads * dim
    scale = 1 / math.sqrt(dim)
    rounded = -(-seq // 128) * 128

    def tensor(name: str) -> TensorArgument | DrawnArgument:
        if tensors:
            return TensorArgument(name, tensors[name], False)
        return DrawnArgument(name, 2 * batch * whole, "fp16")

    def output(name: str, shape: tuple[int, ...], dtype: type) -> TensorArgument | DrawnArgument:
        if tensors:
            return TensorArgument(name, np.zeros(shape, dtype), True)
        return DrawnArgument(name, math.prod(shape) * np.dtype(dtype).itemsize, "fp32", output=True)

    numbers = {
        _STRIDES: struct.pack("<9q", *[whole] * 3, *[row] * 3, *[dim] * 3),
        _HEADS: struct.pack("<3i", heads, heads, 1),
        _STRIDES_O: struct.pack("<3q", whole, row, dim),
        _SIZES: struct.pack("<9i", batch, seq, seq, 0, dim, rounded, rounded, dim, 0),
        _SCALES: struct.pack("<2f", scale, scale * math.log2(math.e)),
        _WINDOW: struct.pack("<2i", -1, 0 if problem.causal else -1),
        _CUMULATIVE: b"\1",
    }
    parts = [(offset, ScalarArgument(f"at {offset}", np.void(data))) for offset, data in numbers.items()]
    parts += [(_Q, tensor("q")), (_K, tensor("k")), (_V, tensor("v"))]
    parts += [(_O, output("o", (batch, seq, heads, dim), np.float16))]
    parts += [(_LSE, output("lse", (batch, heads, seq), np.float32))]
    return StructArgument("params", size, tuple(parts))


def launch(
    kernel: Kernel, tile: Tile, problem: AttentionProblem, tensors: Mapping[str, np.ndarray] | None = None
) -> Launch:
    """Blocks of `tile.rows` queries along x, sequences along y, heads along z."""
    grid = (-(-problem.seq_q // tile.rows), problem.batch, problem.heads)
    geometry = Geometry(grid, (32 * tile.warps, 1, 1), tile.shared_bytes(problem.head_dim))
    return prepare(kernel, geometry, [arguments(kernel, problem, tensors)], seed=0)


# ── their kernels ───────────────────────────────────────────────────────────────────────────────────────────────────

_NAME = re.compile(
    r"flash_fwd_kernel\w*traitsILi(?P<dim>\d+)ELi(?P<rows>\d+)ELi(?P<columns>\d+)ELi(?P<warps>\d+)E\w*half_tE\w*EEL"
    r"b(?P<dropout>\d)ELb(?P<causal>\d)ELb(?P<local>\d)ELb(?P<alibi>\d)ELb(?P<even>\d)ELb(?P<even_k>\d)ELb(?P<p>\d)EEv"
)


def find_kernel(folder: Path, dim: int, tile: Tile, causal: bool) -> tuple[Program, Kernel]:
    """The fp16 kernel of that tile without dropout; of two, the one for lengths that it divides."""
    found: dict[str, tuple[Path, str]] = {}
    for path in sorted(folder.glob("*.cubin")):
        for name in kernel_names(path.read_bytes()):
            m = _NAME.search(name)
            if m is None or any(int(m[other]) for other in ("dropout", "local", "alibi", "p")) or m["even_k"] == "0":
                continue
            own = (int(m["dim"]), Tile(int(m["rows"]), int(m["columns"]), int(m["warps"])), m["causal"] == "1")
            if own == (dim, tile, causal):
                found[m["even"]] = path, name
    if not found:
        raise UsageError(f"{folder} has no kernel of FlashAttention-2 for head_dim {dim} with {tile}, causal {causal}")
    path, name = found[max(found)]
    cubin = path.read_bytes()
    return Program(disassemble(cubin), name), read_kernel(cubin, name)


def mean_time(program: Program, launch: Launch, gpu: str) -> float:
    """Microseconds predicted, mean over SHIFTS."""
    chip = find_chip(gpu)
    latency = chip.rates["l2_latency"]
    shifted = [replace(chip, rates={**chip.rates, "l2_latency": shift * latency}) for shift in SHIFTS]
    return float(np.mean([predict(program, launch, one).time_us for one in shifted]))


def predict_theirs(folder: Path, gpu: str, problem: AttentionProblem) -> tuple[Tile, float]:
    """Their tile and microseconds."""
    tile = tile_of(gpu, problem.head_dim, problem.causal)
    program, kernel = find_kernel(folder, problem.head_dim, tile, problem.causal)
    return tile, mean_time(program, launch(kernel, tile, problem), gpu)


# ── ours ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def predict_ours(gpu: str, text: str) -> tuple[Config, float]:
    """The start point of the family that is fastest, of those that compile without spills, and its microseconds."""
    target = Target(*parse_problem(text), find_gpu(gpu))
    space = load_space(asset("search_spaces") / "attention.toml", target.problem, target.gpu)
    found = []
    for config in space.starts:
        if config["family"] != "mma":
            continue
        source = render(target, space, config, asset("templates"))
        binary = compile_source(source, target.gpu.arch)
        if binary.spill_bytes:
            continue
        program = Program(binary.listing, source.entry)
        given = [
            DrawnArgument(p.name, p.bytes, p.dtype, p.output) if isinstance(p, TensorParameter) else p
            for p in target.workload.parameters(target.problem, config)
        ]
        prepared = prepare(read_kernel(binary.cubin, source.entry), source.launch, given, seed=0)
        found.append((predict(program, prepared, find_chip(gpu)).time_us, config, program, prepared))
    nearest = sorted(found, key=lambda one: one[0])[:CANDIDATES]
    times = [(config, mean_time(program, prepared, gpu)) for _, config, program, prepared in nearest]
    return min(times, key=lambda one: one[1])


# ── what is printed ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Row:
    dim: int
    causal: bool
    theirs: str
    """the tile"""
    ours: str
    theirs_tflops: float
    """predicted, as is the next"""
    ours_tflops: float
    recorded_tflops: float | None
    """of their kernel"""


def compare(folder: Path, gpu: str, dim: int, causal: bool) -> Row:
    text = f"b{16384 // SEQ},h{2048 // dim},s{SEQ},d{dim},fp16" + ",causal" * causal
    _, problem = parse_problem(text)
    tile, theirs = predict_theirs(folder, gpu, problem)
    config, ours = predict_ours(gpu, text)
    flops = 4 * SEQ**2 * dim * problem.heads * problem.batch / (2 if causal else 1)
    name = "{tile_m}×{tile_n}, {warps} warps, {stages} stages, Q in {q_in}".format(**config)
    recorded = RECORDED.get((gpu, dim, causal))
    own = f"{tile.rows}×{tile.columns}, {tile.warps} warps"
    return Row(dim, causal, own, name, flops / theirs / 1e6, flops / ours / 1e6, recorded)


def table(gpu: str, rows: Sequence[Row]) -> Table:
    shown = Table(title=f"FlashAttention-2 (2.5) and this project's mma kernels, fp16, 16,384 tokens, on {gpu}: TFLOPS")
    for name in ("head_dim", "mask", "theirs", "ours"):
        shown.add_column(name)
    for name in ("theirs, predicted", "ours, predicted", "ours / theirs", "theirs, recorded elsewhere"):
        shown.add_column(name, justify="right")
    for row in rows:
        ratio = row.ours_tflops / row.theirs_tflops
        recorded = "–" if row.recorded_tflops is None else f"{row.recorded_tflops:.0f}"
        figures = (f"{row.theirs_tflops:.0f}", f"{row.ours_tflops:.0f}", f"{ratio:.2f}", recorded)
        shown.add_row(str(row.dim), "causal" if row.causal else "none", row.theirs, row.ours, *figures)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubins", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gpu", default="a100")
    parser.add_argument("--json", type=Path, metavar="OUT")
    asked = parser.parse_args(arguments)
    try:
        rows = [compare(asked.cubins, asked.gpu, dim, causal) for dim in HEAD_DIMS for causal in (False, True)]
    except EvoengineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    Console(width=160).print(table(asked.gpu, rows))
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
