"""FlashAttention-3's own machine code under the performance model, beside the speed that its authors published.

    python benchmarks/flash_attention_3.py --cubins DIR [--json OUT]

DIR holds cubins of Dao-AILab/flash-attention's `hopper/` forward kernels at commit 0251105, each named as in KERNELS.
The problem is that of the published figures: 16,384 tokens in all, 2048 / d heads of dimension d, fp16, forward, on
an H100 SXM (Shah et al., "FlashAttention-3", arXiv:2407.08608), whose clock nobody locked. Which tile stood behind
which figure at head dimension 64 is not certain. `benchmarks/hopper_accuracy.py` holds the binaries against times at a
fixed clock.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from evoengine.devices.base import ScalarArgument, StructArgument, TensorArgument, TensorMapArgument
from evoengine.errors import UsageError
from evoengine.sass.chip import SUSTAINED, Chip, Clock, find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import Kernel, kernel_names, read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, Launch, prepare
from evoengine.sass.listing import disassemble
from evoengine.sass.predict import Prediction, Unpredictable, predict

CHIP = "h100"
SMS = 132
TOKENS = 16_384
WIDTH = 2048
"""of all heads together"""
UNLOCKED = Clock(SUSTAINED)


@dataclass(frozen=True, slots=True)
class Problem:
    """Self-attention of `batch` sequences; Q, K, V and O are [batch, seqlen, heads, dim] in fp16, LSE
    [batch, heads, seqlen] in fp32."""

    batch: int
    heads: int
    seqlen: int
    dim: int
    causal: bool = False

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.dim)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen, self.heads, self.dim

    @property
    def flops(self) -> float:
        """As the published figures count them: 4 · seqlen² · dim for each head, half of it with a causal mask."""
        return 4 * self.seqlen**2 * self.dim * self.heads * self.batch / (2 if self.causal else 1)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel cuts the problem: rows of Q that a block works on at once, columns of K that it loads at once."""

    rows: int
    columns: int
    p_in_shared: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    tile: Tile
    dim: int
    seqlen: int
    tflops: float
    causal: bool = False

    @property
    def problem(self) -> Problem:
        return Problem(TOKENS // self.seqlen, WIDTH // self.dim, self.seqlen, self.dim, self.causal)


KERNELS = {
    "d64_192x128": Published(Tile(192, 128), 64, 8192, 496),
    "d64_192x192": Published(Tile(192, 192, p_in_shared=True), 64, 16384, 497),
    "d64_causal_192x128": Published(Tile(192, 128), 64, 8192, 460, causal=True),
    "d128_128x176": Published(Tile(128, 176), 128, 16384, 648),
    "d128_causal_128x128": Published(Tile(128, 128), 128, 8192, 602, causal=True),
    "d256_128x80": Published(Tile(128, 80), 256, 16384, 756),
}
"""file without `.cubin` → what it was measured at"""


# ── the launch ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Offsets in the kernel's one parameter, flash::FlashAttnFwdSm90::Params: the mainloop's part, the epilogue's, the
# hardware's and the tile scheduler's. They follow from the order and sizes of its members and agree with every constant
# that the machine code reads. What is not named stays zero: paging, variable lengths, rotary embeddings, descaling.
_Q, _SHAPE_Q, _K, _SHAPE_K, _V = 0x000, 0x008, 0x058, 0x060, 0x088
_DIVISORS = 0x190  # pages of one row, column tiles of a page, query heads of a key head: all one
_MAP_Q, _MAP_K, _MAP_V, _MAP_O = 0x200, 0x300, 0x400, 0x980
_SCALE_LOG2, _SPLITS = 0x708, 0x770
_O, _SHAPE_O, _STRIDE_O, _SHAPE_O_PACKED, _STRIDE_O_PACKED = 0x800, 0x808, 0x820, 0x840, 0x858
_LSE, _STRIDE_LSE, _SHAPE_LSE_PACKED, _STRIDE_LSE_PACKED = 0x8C0, 0x8C8, 0x8E0, 0x8F0
_STATIC_SCHEDULER, _DYNAMIC_SCHEDULER = 0xB24, 0xB28
_COUNTER = 0xB70

_BOX_COLUMNS = 64
"""halfs in a swizzled row of 128 bytes"""
_L2_FOR_KEYS = 32 << 20
"""bytes of K and V that the dynamic scheduler means to keep in the L2"""


def divisor(by: int) -> bytes:
    """cutlass::FastDivmod: the divisor, and the multiplier and shift by which a high product divides."""
    if by == 1:
        return struct.pack("<iII", 1, 0, 0)
    log2 = (by - 1).bit_length()
    return struct.pack("<iII", by, ((1 << (31 + log2)) + by - 1) // by, log2 - 1)


def section_of(problem: Problem) -> int:
    """Heads whose row tiles the dynamic scheduler hands out in turns, so that their K and V stay in the L2."""
    return 1 << max(0, (_L2_FOR_KEYS // (4 * problem.seqlen * problem.dim)).bit_length() - 1)


def arguments(kernel: Kernel, tile: Tile, problem: Problem, tensors: Mapping[str, np.ndarray] | None) -> StructArgument:
    """The kernel's parameter; `tensors` q, k and v are [batch, seqlen, heads, dim] fp16, drawn where not given."""
    batch, seqlen, heads, dim = problem.shape
    row, whole = heads * dim, seqlen * heads * dim
    tensor_bytes = 2 * batch * whole

    def tensor(name: str) -> TensorArgument | DrawnArgument:
        if tensors:
            return TensorArgument(name, tensors[name], False)
        return DrawnArgument(name, tensor_bytes, "fp16")

    def output(name: str, shape: tuple[int, ...], dtype: type) -> TensorArgument | DrawnArgument:
        if tensors:
            return TensorArgument(name, np.zeros(shape, dtype), True)
        return DrawnArgument(name, math.prod(shape) * np.dtype(dtype).itemsize, "fp32", output=True)

    def tensor_map(name: str, rows: int, *splits: int) -> TensorMapArgument:
        dims, box = (dim, seqlen, heads, batch, *splits), (_BOX_COLUMNS, rows, 1, 1, *splits)
        strides = (2 * row, 2 * dim, 2 * whole, *(0 for _ in splits))
        return TensorMapArgument(f"map_{name}", name, "fp16", dims, strides, box, 128)

    blocks = -(-seqlen // tile.rows)
    tiles = blocks * heads * batch
    if problem.causal:
        section = section_of(problem)
        by = (blocks, heads, section, section * blocks, heads * batch % section or 1)
        counts = struct.pack("<i", heads * batch // section)
        scheduler = (_DYNAMIC_SCHEDULER, struct.pack("<i", tiles) + b"".join(map(divisor, by)) + counts)
    else:
        scheduler = (_STATIC_SCHEDULER, struct.pack("<i", tiles) + divisor(blocks) + divisor(heads) + divisor(1))
    numbers = {
        _SHAPE_Q: struct.pack("<4i", seqlen, dim, heads, batch),
        _SHAPE_K: struct.pack("<4i", seqlen, dim, heads, batch),
        _DIVISORS: divisor(1) * 3,
        _SCALE_LOG2: struct.pack("<f", problem.scale * math.log2(math.e)),
        _SPLITS: struct.pack("<i", 1),
        _SHAPE_O: struct.pack("<5i", seqlen, dim, heads, batch, 1),
        _STRIDE_O: struct.pack("<4q", row, dim, whole, 0),
        _SHAPE_O_PACKED: struct.pack("<5i", seqlen, dim, heads, batch, 1),
        _STRIDE_O_PACKED: struct.pack("<4q", row, dim, whole, 0),
        _STRIDE_LSE: struct.pack("<3q", seqlen, heads * seqlen, 0),
        _SHAPE_LSE_PACKED: struct.pack("<4i", seqlen, heads, batch, 1),
        _STRIDE_LSE_PACKED: struct.pack("<3q", seqlen, heads * seqlen, 0),
        scheduler[0]: scheduler[1],
    }
    parts = [(offset, ScalarArgument(f"at {offset:#x}", np.void(data))) for offset, data in numbers.items()]
    parts += [(_Q, tensor("q")), (_K, tensor("k")), (_V, tensor("v")), (_O, output("o", problem.shape, np.float16))]
    parts += [(_MAP_Q, tensor_map("q", tile.rows)), (_MAP_K, tensor_map("k", tile.columns))]
    parts += [(_MAP_V, tensor_map("v", tile.columns)), (_MAP_O, tensor_map("o", tile.rows, 1))]
    parts += [(_LSE, output("lse", (batch, heads, seqlen), np.float32))]
    if problem.causal:
        parts += [(_COUNTER, DrawnArgument("counter", 4, "int32", output=True))]
    return StructArgument("params", kernel.parameters[0][1], tuple(parts))


def launch(
    kernel: Kernel, tile: Tile, problem: Problem, blocks: int = SMS, tensors: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
) -> Launch:  # fmt: skip
    """A launch of `blocks` persistent blocks, as many as SMs; the scheduler's counter starts at zero."""
    rows, columns, dim = tile.rows, tile.columns, problem.dim
    halfs = 2 * 2 * columns * dim + rows * dim + (rows * columns if tile.p_in_shared else 0)
    # an empty array before and one behind the tiles take 1 KB each by their alignment, and the barriers one more
    geometry = Geometry((blocks, 1, 1), (128 + 2 * rows, 1, 1), 2 * halfs + 3072)
    prepared = prepare(kernel, geometry, [arguments(kernel, tile, problem, tensors)], seed)
    for allocation in prepared.allocations:
        if allocation.name == "counter":
            allocation.held[:] = 0
    return prepared


# ── the prediction ──────────────────────────────────────────────────────────────────────────────────────────────────


def steps_of_tiles(tile: Tile, problem: Problem) -> np.ndarray:
    """Return the column tiles that each row tile works on [tiles], in the order in which the scheduler hands row tiles
    out."""
    blocks, columns = -(-problem.seqlen // tile.rows), -(-problem.seqlen // tile.columns)
    if not problem.causal:
        return np.full(blocks * problem.heads * problem.batch, columns)
    section, heads = section_of(problem), problem.heads * problem.batch
    steps = []
    for first in range(0, heads, section):
        for block in reversed(range(blocks)):
            needed = min(columns, -(-(block + 1) * tile.rows // tile.columns))
            steps += [needed] * min(section, heads - first)
    return np.array(steps)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    published: float
    """TFLOPS"""
    prediction: Prediction
    seconds: float
    """of CPU"""

    @property
    def tflops(self) -> float:
        return KERNELS[self.name].problem.flops / self.prediction.time_us / 1e6

    @property
    def deviation(self) -> float:
        return self.tflops / self.published - 1


def read(folder: Path, name: str) -> tuple[Program, Kernel]:
    """Return the program and launch facts of the folder's binary; raise UsageError where it holds several kernels."""
    cubin = (folder / f"{name}.cubin").read_bytes()
    names = kernel_names(cubin)
    if len(names) != 1:
        raise UsageError(f"{name}.cubin holds {len(names)} kernels; it takes one")
    return Program(disassemble(cubin), names[0]), read_kernel(cubin, names[0])


def predict_launch(
    folder: Path, name: str, problem: Problem, chip: Chip, clock: Clock = UNLOCKED
) -> Prediction:  # fmt: skip
    """Predict a problem by the binary of that name."""
    program, kernel = read(folder, name)
    return predict(program, launch(kernel, KERNELS[name].tile, problem), chip, problem.flops, clock=clock)


def row(folder: Path, name: str, chip: Chip) -> Row:
    begun = time.process_time()
    prediction = predict_launch(folder, name, KERNELS[name].problem, chip)
    return Row(name, KERNELS[name].tflops, prediction, time.process_time() - begun)


# ── what is printed ─────────────────────────────────────────────────────────────────────────────────────────────────


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title=f"FlashAttention-3 forward, fp16, {TOKENS} tokens, on {CHIP} without a locked clock: TFLOPS")
    shown.add_column("kernel")
    for column in ("published", "predicted", "GHz", "CPU s"):
        shown.add_column(column, justify="right")
    shown.add_column("bound by")
    for r in rows:
        p = r.prediction
        figure = f"{r.tflops:.0f} ({r.deviation:+.1%})"
        shown.add_row(r.name, f"{r.published:.0f}", figure, f"{p.ghz:.2f}", f"{r.seconds:.0f}", p.bound)
    return shown


def as_json(rows: Sequence[Row]) -> str:
    found = {
        r.name: {
            "published_tflops": r.published,
            "tflops": r.tflops,
            "deviation": r.deviation,
            "ghz": r.prediction.ghz,
            "shares": r.prediction.shares,
        }
        for r in rows
    }
    return json.dumps(found, indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubins", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="OUT")
    asked = parser.parse_args(arguments)
    there = [name for name in KERNELS if (asked.cubins / f"{name}.cubin").is_file()]
    if not there:
        parser.error(f"{asked.cubins} has none of the cubins {', '.join(KERNELS)}")
    try:
        rows = [row(asked.cubins, name, find_chip(CHIP)) for name in there]
    except (UsageError, Unpredictable) as error:
        parser.error(str(error))
    Console(width=120).print(table(rows))
    if asked.json:
        asked.json.write_text(as_json(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
