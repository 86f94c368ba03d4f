"""Kernels that others wrote and measured, two of them ladders step by step, beside the model.

    python benchmarks/ladders.py --data DIR --nvcc DIR [--json OUT]
        [--sgemm CHECKOUT] [--fa2 CHECKOUT] [--h100 CHECKOUT [--cutlass INCLUDE]]

CHECKOUT is a working copy of siboehm/SGEMM_CUDA, sonnyli/flash_attention_from_scratch or
waynehacking8/blackwell-tensorcore-kernels at the commit that the times in --data (siboehm_a6000.csv, sonnyli_fa2.csv,
wayne_ncu_cycles.csv) name; another commit is refused. Of the last see benchmarks/h100_gemm.py. The kernels are compiled
as they stand by nvcc, as their authors did: NVRTC keeps arrays of kernels 8 to 16 of the second ladder in local memory,
where nvcc spills 16 to 56 bytes of registers, as the published machine code does. --nvcc holds it, INCLUDE CUTLASS's
headers:

    pip install --target DIR nvidia-cuda-nvcc nvidia-nvvm \\
        nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl
    pip install --target DIR --no-deps nvidia-cutlass==4.2.0.0  # its cutlass_library/source/include

JSON: a list as of benchmarks/hopper_accuracy.py. Exit code 1 where a kernel that has its text could not be predicted,
which is named. Kernels of libraries are listed and not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markdown import Markdown  # noqa: E402

from benchmarks import h100_gemm  # noqa: E402
from benchmarks.published import FAILURES, Missed, check_commit, compiled, find_nvcc, predicted, read_times  # noqa: E402
from evoengine.accuracy.page import Row, page  # noqa: E402
from evoengine.devices.base import ScalarArgument, StructArgument  # noqa: E402
from evoengine.errors import EvoengineError, UsageError  # noqa: E402
from evoengine.sass.chip import SUSTAINED, Clock  # noqa: E402
from evoengine.sass.launch import DrawnArgument, Geometry  # noqa: E402
from evoengine.sass.predict import Prediction  # noqa: E402

SIZE = 4096
"""of the matrices, and tokens of a sequence"""
BATCH, HEADS, DIM = 16, 16, 128


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel of SGEMM_CUDA as src/runner.cu launches it on an A6000: template arguments, tile, threads."""

    file: str
    instance: str
    rows: int
    columns: int
    threads: tuple[int, int]


SGEMM: Mapping[int, Step] = {
    1: Step("1_naive", "sgemm_naive", 32, 32, (32, 32)),
    2: Step("2_kernel_global_mem_coalesce", "sgemm_global_mem_coalesce<32>", 32, 32, (1024, 1)),
    3: Step("3_kernel_shared_mem_blocking", "sgemm_shared_mem_block<32>", 32, 32, (1024, 1)),
    4: Step("4_kernel_1D_blocktiling", "sgemm1DBlocktiling<64,64,8,8>", 64, 64, (512, 1)),
    5: Step("5_kernel_2D_blocktiling", "sgemm2DBlocktiling<128,128,8,8,8>", 128, 128, (256, 1)),
    6: Step("6_kernel_vectorize", "sgemmVectorize<128,128,8,8,8>", 128, 128, (256, 1)),
    7: Step("7_kernel_resolve_bank_conflicts", "sgemmResolveBankConflicts<128,128,8,8,8>", 128, 128, (256, 1)),
    8: Step("8_kernel_bank_extra_col", "sgemmResolveBankExtraCol<128,128,8,8,8>", 128, 128, (256, 1)),
    9: Step("9_kernel_autotuned", "sgemmAutotuned<128,128,16,8,8>", 128, 128, (256, 1)),
    10: Step("10_kernel_warptiling", "sgemmWarptiling<128,128,16,64,64,4,8,4,128>", 128, 128, (128, 1)),
    11: Step(
        "11_kernel_double_buffering", "sgemmDoubleBuffering<128,256,16,128,32,1,8,8,256>", 128, 256, (256, 1)
    ),
}  # fmt: skip
DATA = ("siboehm_a6000.csv", "sonnyli_fa2.csv")


def row_of(name: str, number: int, problem: str, gpu: str, measured_us: float, p: Prediction) -> Row:
    return Row(name, f"K{number}", problem, gpu, str(p.clock), measured_us, p.time_us, p.kernel_class, p.bound)


# ── SGEMM ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def sgemm_rows(data: Path, checkout: Path, nvcc: Path) -> Iterator[Row | Missed | str]:
    times = read_times(data, DATA[0])
    check_commit(checkout, times[0]["commit"])
    for given in times:
        number = int(given["kernel"].removeprefix("K"))
        if number not in SGEMM:
            yield f"sgemm ladder K{number}: {given['us']} µs, a library's"
            continue
        try:
            yield row_of(
                "sgemm ladder", number, f"{SIZE}^3", "a6000", float(given["us"]), sgemm(checkout, nvcc, number)
            )
        except FAILURES as error:
            yield Missed(f"sgemm ladder K{number}: {error}")


def sgemm(checkout: Path, nvcc: Path, number: int) -> Prediction:
    step = SGEMM[number]
    files = [SGEMM[10].file] * (number == 11) + [step.file]  # the warp's size is defined in the former
    text = "".join(f'#include "{checkout}/src/kernels/{file}.cuh"\n' for file in files)
    # a launch instantiates a template, whatever its parameters' qualifiers are
    text += f"void launch(float* p) {{ {step.instance}<<<1, 1>>>(1, 1, 1, 1.0f, p, p, 1.0f, p); }}\n"
    cubin = compiled(nvcc, text, "sm_86", ())
    matrices = [DrawnArgument(name, 4 * SIZE * SIZE, "fp32", name == "C") for name in "ABC"]
    sizes = [ScalarArgument(name, np.int32(SIZE)) for name in "MNK"]
    alpha, beta = ScalarArgument("alpha", np.float32(0.5)), ScalarArgument("beta", np.float32(3.0))
    arguments = [*sizes, alpha, *matrices[:2], beta, matrices[2]]
    geometry = Geometry((SIZE // step.columns, SIZE // step.rows, 1), (*step.threads, 1), 0)
    return predicted(cubin, "a6000", Clock(SUSTAINED), 2.0 * SIZE**3, geometry, arguments)


# ── FlashAttention-2 ────────────────────────────────────────────────────────────────────────────────────────────────


def fa2_rows(data: Path, checkout: Path, nvcc: Path) -> Iterator[Row | Missed | str]:
    times = read_times(data, DATA[1])
    check_commit(checkout, times[0]["commit"])
    problem = f"b{BATCH},h{HEADS},s{SIZE},d{DIM},fp16"
    for given in times:
        found, configs = re.match(r"K(\d+) ", given["kernel"]), re.findall(r"\{(5[ \d]+)\}", given["config"])
        if not found or not configs:
            yield f"fa2 ladder {given['kernel']}: {given['us']} µs, a library's"
            continue
        number, clock = int(found[1]), re.search(r"-lgc (\d+)", given["clock_note"])
        try:
            assert clock, "its row states no clock"
            # of several configurations the fastest was taken, as a tuner would
            all_of_them = [fa2(checkout, nvcc, number, c, Clock("locked", int(clock[1]))) for c in configs]
            best = min(all_of_them, key=lambda p: p.time_us)
            yield row_of("fa2 ladder", number, problem, "a100", float(given["us"]), best)
        except FAILURES as error:
            yield Missed(f"fa2 ladder K{number}: {error}")


def fa2(checkout: Path, nvcc: Path, number: int, config: str, clock: Clock) -> Prediction:
    """`config` is dtype, D, B_r, B_c, warps, three flags, three numbers of tiles, two flags, as the times name it."""
    _, dim, rows, columns, warps, *rest = (int(word) for word in config.split())
    folder = "src" if number == 16 else f"previous_kernels/src_{'1-7' if number < 8 else number}"
    flags = [*(str(bool(n)).lower() for n in rest[:3]), *map(str, rest[3:6]), *(str(bool(n)).lower() for n in rest[6:])]
    values = ", ".join(["torch::kFloat16", *map(str, (dim, rows, columns, warps)), *flags])
    kind = f"flash::StaticForwardKernelConfig<FlashForwardKernelConfig{{{values}}}>"
    parameter = "__grid_constant__ const flash::ForwardKernelArgs"
    text = (
        f'#include <bit>\n#include <torch/torch.h>\n#include "forward_kernel.cuh"\n'
        f"template __global__ void flash::flash_forward_kernel<{kind}>({parameter});\n"
    )
    options = ("-std=c++20", "--use_fast_math", "--expt-relaxed-constexpr", f"-I{checkout / folder / 'include'}")
    cubin = compiled(nvcc, text, "sm_80", options)
    tensors = [DrawnArgument(name, 2 * BATCH * HEADS * SIZE * DIM, "fp16", name == "O") for name in "QKVO"]
    strides_and_sizes = (SIZE * HEADS * DIM, HEADS * DIM, DIM, SIZE, HEADS)
    parts = [
        *((8 * n, tensor) for n, tensor in enumerate(tensors)),
        *((32 + 8 * n, ScalarArgument(f"n{n}", np.int64(v))) for n, v in enumerate(strides_and_sizes)),
        (72, ScalarArgument("n_Q_blocks", np.int32(SIZE // rows))),
        (76, ScalarArgument("n_KV_blocks", np.int32(SIZE // columns))),
    ]
    geometry = Geometry((SIZE // rows, HEADS, BATCH), (32 * warps, 1, 1), 2 * dim * (rows + 2 * columns))
    flops = 4.0 * BATCH * HEADS * SIZE * SIZE * dim
    return predicted(cubin, "a100", clock, flops, geometry, [StructArgument("args", 80, tuple(parts))])


# ── all of them ─────────────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="measured times")
    parser.add_argument("--nvcc", type=Path, required=True, metavar="DIR", help="folder that holds bin/nvcc")
    parser.add_argument("--sgemm", type=Path, metavar="CHECKOUT", help="siboehm/SGEMM_CUDA")
    parser.add_argument("--fa2", type=Path, metavar="CHECKOUT", help="sonnyli/flash_attention_from_scratch")
    parser.add_argument("--h100", type=Path, metavar="CHECKOUT", help="waynehacking8/blackwell-tensorcore-kernels")
    parser.add_argument(
        "--cutlass", type=Path, metavar="INCLUDE", help="CUTLASS's headers, for --h100's CUTLASS kernel"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows here")
    options = parser.parse_args(arguments)
    rows, missed = [], []
    try:
        nvcc = find_nvcc(options.nvcc)
        h100_rows = partial(h100_gemm.rows, cutlass=options.cutlass)
        sets = ((options.sgemm, sgemm_rows), (options.fa2, fa2_rows), (options.h100, h100_rows))
        if not any(checkout for checkout, _ in sets):
            raise UsageError("name a checkout: --sgemm, --fa2 or --h100")
        found = [of_set(options.data, checkout.resolve(), nvcc) for checkout, of_set in sets if checkout]
        for row in (row for of_set in found for row in of_set):
            if isinstance(row, Row):
                rows.append(row)
            else:
                missed += [row] if isinstance(row, Missed) else []
                print(f"{'missed' if isinstance(row, Missed) else 'not counted'}: {row}", file=sys.stderr)
    except EvoengineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if rows:
        Console().print(Markdown(page(rows)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
