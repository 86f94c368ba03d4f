"""FlashAttention-3's own backward machine code under the performance model, beside this project's kernels.

    python benchmarks/flash_attention_3_backward.py --cubin FILE

FILE is `flash_bwd_hdim128_fp16_sm90.sm_90a.cubin` of Dao-AILab/flash-attention's `hopper/` kernels; the wheel of
flash-attn3-jax 0.2.3 has it (cuobjdump -xelf). Predicted is the kernel of dK, dV and the sums of dQ alone: the passes
before and behind it, which zero the sums and convert them, would add to it. Of this project each start point of the
wgmma family is predicted with all of its kernels, and the fastest shown. Nothing is measured here.

The blocks of their causal kernel are unlike in length and handed out in an order of its own. It is predicted once more
with twice as many keys, of which those of the launched blocks are seen by all queries: then its blocks are alike, and
what they reach bounds what the kernel can.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.flash_attention_3 import CHIP, TOKENS, WIDTH, divisor  # noqa: E402
from evoengine.devices.base import ScalarArgument, StructArgument, TensorMapArgument  # noqa: E402
from evoengine.errors import UsageError  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import CompiledCandidate  # noqa: E402
from evoengine.sass.chip import find_chip  # noqa: E402
from evoengine.sass.core import Program  # noqa: E402
from evoengine.sass.cubin import Kernel, kernel_names, read_kernel  # noqa: E402
from evoengine.sass.launch import DrawnArgument, Geometry, Launch, prepare  # noqa: E402
from evoengine.sass.listing import disassemble  # noqa: E402
from evoengine.sass.predict import predict  # noqa: E402
from evoengine.space.space import load_space  # noqa: E402
from evoengine.stages.compile import compile_source  # noqa: E402
from evoengine.stages.predict import predict_figure  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

DIM, SEQLEN, KEYS = 128, 8192, 128
HEADS, BATCH = WIDTH // DIM, TOKENS // SEQLEN
ROWS = {False: 80, True: 64}
"""rows of Q of a step, by causal"""
PUBLISHED = {False: 559.0}
"""TFLOPS of the whole backward pass on an H100 SXM (arXiv:2407.08608), which has no causal row"""
SHARED = {False: 232_448, True: 204_800}
"""bytes, rounded up: one block fits an SM either way"""
L2_OF_SECTION = 40 << 20
"""bytes of Q, dO and sums of dQ that the causal scheduler means to keep in the L2"""

# Offsets in the kernel's one parameter, flash::FlashAttnBwdSm90::Params: they follow from the order and sizes of its
# members and agree with every constant that the machine code reads. What is not named stays zero.
_SHAPES, _SUMS, _STRIDES_SUMS, _GROUP = 0x00, 0x40, 0x58, 0x68
_MAPS = {"q": 0x80, "dout": 0x140, "k": 0x200, "v": 0x2C0, "dk": 0x4C0, "dv": 0x580}
_LSE, _STRIDES_LSE, _DELTA, _STRIDES_DELTA, _SCALES = 0x380, 0x398, 0x3A8, 0x3B0, 0x3C0
_DK, _SHAPE_DK, _STRIDE_DK, _DV, _SHAPE_DV, _STRIDE_DV = 0x440, 0x448, 0x458, 0x470, 0x478, 0x488
_BATCH, _UNREAD, _SCHEDULER = 0x3E0, 0x3F0, 0x6A8


def kernel_of(cubin: bytes, causal: bool) -> str:
    """Return the name of the kernel without windows, caps, variable lengths, grouped heads or an order of additions."""
    flags = "Sm90" + "".join(f"ELb{int(flag)}" for flag in (causal, 0, 0, 0, 0, 1)) + "E"
    tile = f"ILi{ROWS[causal]}EEE"
    found = [n for n in kernel_names(cubin) if flags in n and tile in n and "21CollectiveEpilogueBwdI" in n]
    if len(found) != 1:
        raise UsageError(f"the cubin has {len(found)} kernels of tile {ROWS[causal]} x {KEYS}; it takes one")
    return found[0]


def parameter(kernel: Kernel, causal: bool, seq_k: int) -> StructArgument:
    """Return the kernel's parameter for tensors [batch, seqlen or seq_k, heads, dim] fp16 that are drawn."""
    row, rows = HEADS * DIM, ROWS[causal]
    rounded, whole, of_keys = -(-SEQLEN // rows) * rows, SEQLEN * row, seq_k * row
    shape, shape_k = (struct.pack("<4i", length, DIM, HEADS, BATCH) for length in (SEQLEN, seq_k))
    stride_k = struct.pack("<3q", row, DIM, of_keys)
    blocks, section = SEQLEN // KEYS, 1
    while 2 * section * SEQLEN * DIM * 8 <= L2_OF_SECTION:
        section *= 2
    by = (blocks, HEADS, section, section * blocks, HEADS * BATCH % section or 1)
    scheduler = struct.pack("<i", blocks * HEADS * BATCH) + b"".join(map(divisor, by))
    numbers = {
        _SHAPES: shape + shape_k * 2 + shape,
        _STRIDES_SUMS: struct.pack("<2q", rounded * DIM, rounded * DIM * HEADS),
        _GROUP: divisor(1),
        _STRIDES_LSE: struct.pack("<2q", rounded, rounded * HEADS),
        _STRIDES_DELTA: struct.pack("<2q", rounded, rounded * HEADS),
        _SCALES: struct.pack("<2f", DIM**-0.5, DIM**-0.5 * 1.4426950408889634),
        _BATCH: struct.pack("<i", BATCH),
        _SHAPE_DK: shape_k, _STRIDE_DK: stride_k, _SHAPE_DV: shape_k, _STRIDE_DV: stride_k,
        **({_SCHEDULER: scheduler + struct.pack("<i", HEADS * BATCH // section)} if causal else {}),
    }  # fmt: skip
    parts: list[tuple[int, object]] = [(at, ScalarArgument(f"at {at:#x}", np.void(x))) for at, x in numbers.items()]
    floats = 4 * rounded * HEADS * BATCH
    parts += [(_SUMS, DrawnArgument("sums", floats * DIM, "fp32", output=True))]
    parts += [(_LSE, DrawnArgument("lse", floats, "fp32")), (_DELTA, DrawnArgument("delta", floats, "fp32"))]
    parts += [(_DK, DrawnArgument("dk", 2 * BATCH * of_keys, "fp16", output=True))]
    parts += [(_DV, DrawnArgument("dv", 2 * BATCH * of_keys, "fp16", output=True))]
    for name, at in _MAPS.items():
        of_queries = name in ("q", "dout")
        length, box = (SEQLEN if of_queries else seq_k), (64, rows if of_queries else KEYS, 1, 1)
        dims, strides = (DIM, length, HEADS, BATCH), (2 * row, 2 * DIM, 2 * length * row)
        parts += [(at, TensorMapArgument(f"map_{name}", name, "fp16", dims, strides, box, 128))]
    # What maps alone point to stands where variable lengths would, which this kernel does not read.
    mapped = enumerate((("q", whole), ("k", of_keys), ("v", of_keys), ("dout", whole)))
    parts += [(_UNREAD + 8 * i, DrawnArgument(name, 2 * BATCH * size, "fp16")) for i, (name, size) in mapped]
    return StructArgument("params", kernel.parameters[0][1], tuple(parts))


def launch(kernel: Kernel, causal: bool, seq_k: int) -> Launch:
    blocks = SEQLEN // KEYS
    grid = (blocks * HEADS * BATCH, 1, 1) if causal else (blocks, HEADS, BATCH)
    return prepare(kernel, Geometry(grid, (384, 1, 1), SHARED[causal]), [parameter(kernel, causal, seq_k)], 0)


def theirs(cubin: bytes, causal: bool, flops: float, seq_k: int = SEQLEN) -> float:
    """Return the predicted TFLOPS of their main kernel, of whose keys the first SEQLEN are computed."""
    name = kernel_of(cubin, causal)
    program, kernel = Program(disassemble(cubin, name), name), read_kernel(cubin, name)
    return flops / predict(program, launch(kernel, causal, seq_k), find_chip(CHIP), flops).time_us / 1e6


def ours(target: Target) -> tuple[float, str]:
    """Return the predicted TFLOPS of the fastest start point of the wgmma family, and its knobs."""
    file = asset("search_spaces") / "attention-backward.toml"
    space = load_space(file, target.problem, target.gpu, ("wgmma",))
    found = []
    for config in space.starts:
        source = render(target, space, config, asset("templates"))
        binary = compile_source(source, target.gpu.arch)
        figure = predict_figure(target, CompiledCandidate(0, source, binary, config), {}).figure
        found.append((figure.tflops, f"{config['tile_m']}x{config['tile_n']}, {config['stages']} stages"))
    return max(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubin", type=Path, required=True, metavar="FILE")
    asked = parser.parse_args(arguments)
    try:
        cubin = asked.cubin.read_bytes()
        for causal in (False, True):
            text = f"attention-backward:b{BATCH},h{HEADS},s{SEQLEN},d{DIM},fp16{',causal' if causal else ''}"
            workload, problem = parse_problem(text)
            target = Target(workload, problem, find_gpu(CHIP))
            own, knobs = ours(target)
            other = theirs(cubin, causal, workload.flops(problem))
            print(
                f"{text}: ours {own:.0f} ({knobs}), FlashAttention-3's main kernel {other:.0f} TFLOPS, both predicted"
            )
            if causal:
                alike = theirs(cubin, causal, 2 * workload.flops(problem), 2 * SEQLEN)
                print(f"the same kernel where all queries see its blocks' keys: {alike:.0f} TFLOPS, predicted")
    except (OSError, UsageError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
