"""FlashAttention-3's own machine code for a paged cache under the performance model, beside this project's decoding.

    python benchmarks/flash_attention_3_paged.py --library FILE

FILE is a library, fatbin or cubin with Dao-AILab/flash-attention's `hopper/` kernels: the wheel of flash-attn3-jax
0.2.3 has 72 of them with a page table. Predicted is the kernel for sequences of one length, with as many splits as
FlashAttention-3's own heuristic takes, and behind it the kernel that combines them. The kernels that serving calls take
each sequence's length from memory and a list of tiles that another kernel makes; both would add to these times. Of this
project each start point of the space is predicted, and the fastest shown. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.flash_attention_3 import CHIP, SMS, divisor  # noqa: E402
from evoengine.devices.base import ScalarArgument, StructArgument, TensorArgument  # noqa: E402
from evoengine.errors import UsageError  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import CompiledCandidate, Config  # noqa: E402
from evoengine.sass.chip import find_chip  # noqa: E402
from evoengine.sass.core import Program  # noqa: E402
from evoengine.sass.cubin import Kernel, kernel_names, read_kernel  # noqa: E402
from evoengine.sass.fatbin import Kind, images  # noqa: E402
from evoengine.sass.launch import DrawnArgument, Geometry, Launch, prepare  # noqa: E402
from evoengine.sass.listing import disassemble  # noqa: E402
from evoengine.sass.predict import predict  # noqa: E402
from evoengine.space.space import load_space  # noqa: E402
from evoengine.stages.compile import compile_source  # noqa: E402
from evoengine.stages.predict import predict_figure  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402
from evoengine.workloads.decode.problem import DecodeProblem  # noqa: E402

DIM = 128
ROWS = KEYS = 128
"""of a tile: the kernels with a page table and head dimension 128 have no other"""
PROBLEMS = tuple(f"decode:b{batch},h32,kv8,s8192,d128,bf16,page16" for batch in (32, 4, 1))
SHARED = 2 * DIM * (ROWS + 4 * KEYS) + 3072
"""bytes of Q, two tiles of K and of V, empty arrays before and behind them by their alignment, and barriers"""
COMBINED_ROWS, COMBINE_THREADS, MOST_SPLITS = 8, 256, 32
COMBINE_SHARED = 4 * (MOST_SPLITS * COMBINED_ROWS + COMBINED_ROWS + 4 * COMBINED_ROWS * DIM) + 128
"""bytes of the splits' LSE, a number for each row, four tiles of parts, and alignment"""

# Offsets in the kernel's one parameter, flash::FlashAttnFwdSm90::Params with heads of a group packed into rows: they
# follow from the order and sizes of its members. What is not named stays zero: tensor maps, which these kernels do not
# read, variable lengths, rotary embeddings, descaling.
_Q, _SHAPE_Q, _STRIDE_Q, _SHAPE_Q_PACKED, _STRIDE_Q_PACKED = 0x000, 0x008, 0x018, 0x030, 0x048
_K, _SHAPE_K, _STRIDE_K, _V, _DIM_V, _STRIDE_V = 0x068, 0x070, 0x080, 0x098, 0x0A0, 0x0A8
_TABLE, _SHAPE_TABLE, _STRIDE_TABLE, _DIVISORS = 0x198, 0x1A0, 0x1A8, 0x1B0
_SCALE_LOG2, _WINDOW, _SPLITS = 0x5C8, 0x61C, 0x630
_O, _SHAPE_O, _STRIDE_O, _SHAPE_O_PACKED, _STRIDE_O_PACKED = 0x680, 0x688, 0x6A0, 0x6C0, 0x6D8
_PART, _STRIDE_PART, _STRIDE_PART_PACKED = 0x700, 0x708, 0x728
_LSE, _STRIDE_LSE, _SHAPE_LSE_PACKED, _STRIDE_LSE_PACKED = 0x750, 0x758, 0x770, 0x788
_LSE_PART, _STRIDE_LSE_PART, _STRIDE_LSE_PART_PACKED, _GROUP = 0x7A8, 0x7B0, 0x7C8, 0x7E8
_STATIC_SCHEDULER, _SINGLE_SCHEDULER = 0x834, 0x838

# The same of flash::FlashAttnFwdCombine.
_C_PART, _C_SHAPE, _C_STRIDE, _C_LSE_PART, _C_SHAPE_LSE, _C_STRIDE_LSE = 0x00, 0x08, 0x20, 0x40, 0x48, 0x58
_C_O, _C_STRIDE_O, _C_LSE, _C_STRIDE_OUT, _C_DIVISORS = 0x70, 0x78, 0x90, 0x98, 0xA8


def splits_of(p: DecodeProblem) -> int:
    """Return as num_splits_heuristic of FlashAttention-3's heuristics.h the fewest with 0.85 of the fullest waves."""
    tiles, steps = p.batch * p.kv_heads * -(-p.group // ROWS), -(-p.seq_k // KEYS)
    if tiles >= 0.8 * SMS or steps <= 4:
        return 1
    waves = [tiles * splits / SMS for splits in range(1, min(128, SMS, steps) + 1)]
    filled = [number / math.ceil(number) for number in waves]
    return 1 + next(i for i, part in enumerate(filled) if part >= 0.85 * max(filled))


def kernel_of(names: Sequence[str], split: bool) -> str:
    """Return the first kernel with a page table for bf16, head dimension 128, and no mask, cap or variable lengths."""
    flags = "Sm90" + "".join(f"ELb{int(f)}" for f in (0, 0, 0, 0, 1, 0, 0, 1, 1, 1, split, 0)) + "E"
    return _first(names, "25CollectiveMainloopFwdSm90I", "EELi128ENS_10bfloat16_tEf", flags)


def combine_of(names: Sequence[str]) -> str:
    """Return the first kernel that combines up to 32 splits of fp32 into bf16 and knows no variable lengths."""
    return _first(names, "19FlashAttnFwdCombineI", "ILi8EEENS5_ILi128EEEEEELi5ELi256ELi1ELb0ELb0ENS_10bfloat16_tEf")


def _first(names: Sequence[str], *parts: str) -> str:
    found = [name for name in names if all(part in name for part in parts)]
    if not found:
        raise UsageError(f"the file has no kernel whose name has {' and '.join(parts)}")
    return found[0]


def read(file: Path) -> dict[str, bytes]:
    """Return the kernels' names in the file and the cubin of each, of several alike the first."""
    found: dict[str, bytes] = {}
    for image in images(memoryview(file.read_bytes())):
        if image.kind == Kind.CUBIN and image.arch == 90:
            cubin = image.unpack()
            found = {**dict.fromkeys(kernel_names(cubin), cubin), **found}
    return found


Part = DrawnArgument | TensorArgument
Inputs = Mapping[str, np.ndarray]
"""q [batch, 1, heads, dim], k and v [pages, page, kv_heads, dim] bf16 as uint16, table [batch, pages] int32"""


def _struct(kernel: Kernel, numbers: Mapping[int, bytes], tensors: Mapping[int, Part]) -> StructArgument:
    parts: list[tuple[int, object]] = [(at, ScalarArgument(f"at {at:#x}", np.void(x))) for at, x in numbers.items()]
    return StructArgument("params", kernel.parameters[0][1], (*parts, *tensors.items()))


def _results(p: DecodeProblem, splits: int, given: Inputs | None) -> tuple[Part, Part, Part, Part]:
    """Return the memory of O, LSE, and the fp32 parts of both [splits, batch, heads, dim or none]."""
    rows = p.batch * p.heads
    if given:
        shapes = (
            (rows * DIM, np.uint16),
            (rows, np.float32),
            (splits * rows * DIM, np.float32),
            (splits * rows, np.float32),
        )
        o, lse, part, lse_part = (np.zeros(shape, dtype) for shape, dtype in shapes)
        return (
            TensorArgument("o", o, True), TensorArgument("lse", lse, True),
            TensorArgument("part", part, True), TensorArgument("lse_part", lse_part, True),
        )  # fmt: skip
    return (
        DrawnArgument("o", 2 * rows * DIM, "bf16", output=True),
        DrawnArgument("lse", 4 * rows, "fp32", output=True),
        DrawnArgument("part", 4 * splits * rows * DIM, "fp32", output=True),
        DrawnArgument("lse_part", 4 * splits * rows, "fp32", output=True),
    )


def _inputs(p: DecodeProblem, given: Inputs | None) -> dict[int, Part]:
    places = {_Q: "q", _K: "k", _V: "v", _TABLE: "table"}
    if given:
        return {at: TensorArgument(name, given[name]) for at, name in places.items()}
    pool = 2 * p.pages * p.page * p.kv_heads * DIM
    sizes = {"q": 2 * p.batch * p.heads * DIM, "k": pool, "v": pool, "table": 4 * p.pages}
    order = np.random.default_rng(0).permutation(p.pages).astype(np.int32)
    return {
        at: DrawnArgument(
            name, sizes[name], "int32" if name == "table" else "bf16", contents=order if name == "table" else None
        )
        for at, name in places.items()
    }


def parameter(kernel: Kernel, p: DecodeProblem, splits: int, given: Inputs | None = None) -> StructArgument:
    """Return the parameter of a kernel with a page table; all inputs and the order of pages are drawn unless given."""
    row, row_k, page = p.heads * DIM, p.kv_heads * DIM, p.page * p.kv_heads * DIM
    of_group, rows = p.group * DIM, p.batch * p.heads
    of_k = struct.pack("<3q", row_k, DIM, page)
    packed = struct.pack("<5i", p.group, 1, DIM, p.kv_heads, p.batch)
    scheduler = (
        {_SINGLE_SCHEDULER: struct.pack("<6i", 1, p.kv_heads, p.batch, splits, p.group, 1) + divisor(splits)}
        if splits > 1
        else {
            _STATIC_SCHEDULER: struct.pack("<i", p.kv_heads * p.batch) + divisor(1) + divisor(p.kv_heads) + divisor(1)
        }
    )
    numbers = {
        _SHAPE_Q: struct.pack("<4i", 1, DIM, p.heads, p.batch), _STRIDE_Q: struct.pack("<3q", row, DIM, row),
        _SHAPE_Q_PACKED: packed, _STRIDE_Q_PACKED: struct.pack("<4q", DIM, row, of_group, row),
        _SHAPE_K: struct.pack("<4i", p.page, DIM, p.kv_heads, p.pages), _STRIDE_K: of_k,
        _DIM_V: struct.pack("<i", DIM), _STRIDE_V: of_k,
        _SHAPE_TABLE: struct.pack("<2i", p.batch, p.table_width), _STRIDE_TABLE: struct.pack("<q", p.table_width),
        _DIVISORS: divisor(p.page) + divisor(1) + divisor(p.group),
        _SCALE_LOG2: struct.pack("<f", DIM**-0.5 * math.log2(math.e)), _WINDOW: struct.pack("<2i", -1, -1),
        _SPLITS: struct.pack("<i", splits),
        _SHAPE_O: struct.pack("<5i", 1, DIM, p.heads, p.batch, splits), _STRIDE_O: struct.pack("<4q", row, DIM, row, 0),
        _SHAPE_O_PACKED: packed + struct.pack("<i", splits),
        _STRIDE_O_PACKED: struct.pack("<5q", DIM, row, of_group, row, 0),
        _STRIDE_PART: struct.pack("<4q", row, DIM, row, rows * DIM),
        _STRIDE_PART_PACKED: struct.pack("<5q", DIM, row, of_group, row, rows * DIM),
        _STRIDE_LSE: struct.pack("<3q", 1, p.heads, 0),
        _SHAPE_LSE_PACKED: struct.pack("<5i", p.group, 1, p.kv_heads, p.batch, splits),
        _STRIDE_LSE_PACKED: struct.pack("<4q", 1, p.group, p.heads, 0),
        _STRIDE_LSE_PART: struct.pack("<3q", 1, p.heads, rows),
        _STRIDE_LSE_PART_PACKED: struct.pack("<4q", 1, p.group, p.heads, rows),
        _GROUP: divisor(p.group), **scheduler,
    }  # fmt: skip
    places = dict(zip((_O, _LSE, _PART, _LSE_PART), _results(p, splits, given), strict=True))
    return _struct(kernel, numbers, {**_inputs(p, given), **places})


def combine_parameter(kernel: Kernel, p: DecodeProblem, splits: int, parts: Inputs | None = None) -> StructArgument:
    """Return the parameter of the kernel that combines `parts`, part and lse_part as the kernel before left them."""
    row, rows = p.heads * DIM, p.batch * p.heads
    numbers = {
        _C_SHAPE: struct.pack("<5i", 1, DIM, splits, p.heads, p.batch),
        _C_STRIDE: struct.pack("<4q", row, rows * DIM, DIM, row),
        _C_SHAPE_LSE: struct.pack("<4i", 1, splits, p.heads, p.batch),
        _C_STRIDE_LSE: struct.pack("<3q", rows, 1, p.heads),
        _C_STRIDE_O: struct.pack("<3q", row, DIM, row), _C_STRIDE_OUT: struct.pack("<2q", 1, p.heads),
        _C_DIVISORS: divisor(1) + divisor(p.heads),
    }  # fmt: skip
    o, lse, part, lse_part = _results(p, splits, parts)
    if parts:
        part, lse_part = (TensorArgument(name, parts[name]) for name in ("part", "lse_part"))
    return _struct(kernel, numbers, {_C_O: o, _C_LSE: lse, _C_PART: part, _C_LSE_PART: lse_part})


def launches(
    binaries: Mapping[str, bytes], p: DecodeProblem, splits: int, given: Inputs | None = None
) -> Iterator[tuple[Program, Launch]]:
    """Yield the kernels of a problem with their launches, the later ones on what `run` left of the former."""
    entry = kernel_of(list(binaries), splits > 1)
    program, kernel = Program(disassemble(binaries[entry], entry), entry), read_kernel(binaries[entry], entry)
    grid = (1, splits * p.kv_heads, p.batch) if splits > 1 else (SMS, 1, 1)
    first = prepare(kernel, Geometry(grid, (384, 1, 1), SHARED), [parameter(kernel, p, splits, given)], 0)
    yield program, first
    if splits > 1:
        entry = combine_of(list(binaries))
        program, kernel = Program(disassemble(binaries[entry], entry), entry), read_kernel(binaries[entry], entry)
        grid = (-(-p.heads // COMBINED_ROWS), 1, p.batch)
        own = combine_parameter(kernel, p, splits, first.results() if given else None)
        yield program, prepare(kernel, Geometry(grid, (COMBINE_THREADS, 1, 1), COMBINE_SHARED), [own], 0)


def theirs(binaries: Mapping[str, bytes], p: DecodeProblem) -> list[float]:
    """Return the predicted microseconds of each of their kernels, each with an empty L2."""
    return [
        predict(program, launch, find_chip(CHIP)).time_us for program, launch in launches(binaries, p, splits_of(p))
    ]


def ours(target: Target) -> tuple[float, Config]:
    """Return the predicted microseconds of the fastest start point, and its knobs."""
    space = load_space(
        asset("search_spaces") / "decode.toml", target.problem, target.gpu, ("two_kernels", "last_block")
    )
    found = []
    for config in space.starts:
        source = render(target, space, config, asset("templates"))
        binary = compile_source(source, target.gpu.arch)
        figure = predict_figure(target, CompiledCandidate(0, source, binary, config), {}).figure
        found.append((figure.median_us, str(config), config))
    time_us, _, config = min(found)
    return time_us, config


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, metavar="FILE")
    asked = parser.parse_args(arguments)
    try:
        binaries = read(asked.library)
        for text in PROBLEMS:
            workload, problem = parse_problem(text)
            target = Target(workload, problem, find_gpu(CHIP))
            own, config = ours(target)
            other, splits = theirs(binaries, problem), splits_of(problem)
            rates = [target.min_dram_bytes / us / 1e3 for us in (own, sum(other))]
            each = " + ".join(f"{us:.1f}" for us in other)
            print(
                f"{text}, predicted: ours {own:.1f} us, {rates[0]:.0f} GB/s "
                f"({config['family']}, {config['splits']} splits)"
            )
            print(f"  FlashAttention-3 {each} us, {rates[1]:.0f} GB/s ({splits} splits)")
    except (OSError, UsageError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
