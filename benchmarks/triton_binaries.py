"""Compile kernels of Triton for several architectures, and record how they are launched.

    pip install triton==3.9.0 liger-kernel==0.8.5
    python -m benchmarks.triton_binaries [--out tests/sass/data/triton]

Most are in `triton_kernels.py`. Those of others are compiled as their packages have them; README.md beside the binaries
has their origins and licences. No GPU is needed. `tests/sass/test_triton_kernels.py` executes what this writes and
compares it with torch.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ARCHITECTURES = (80, 86, 89, 90)
FP32, FP16, INT = "*fp32", "*fp16", "i32"


class Kernel(NamedTuple):
    name: str
    constants: dict[str, int]
    warps: int
    stages: int
    grid: tuple[int, int, int]
    parameters: dict[str, tuple[str, Any]]
    """Triton's type of each, and its shape or value"""
    module: str = "benchmarks.triton_kernels"
    architectures: tuple[int, ...] = ARCHITECTURES


ROWS = {"x": (FP32, [5, 777]), "out": (FP32, [5, 777]), "cols": (INT, 777)}
KERNELS = (
    Kernel("softmax", {"BLOCK": 1024}, 4, 1, (5, 1, 1), ROWS),
    Kernel(
        "layer_norm",
        {"BLOCK": 512},
        8,
        1,
        (4, 1, 1),
        {"x": (FP32, [4, 500]), "gain": (FP32, [500]), "out": (FP32, [4, 500]), "cols": (INT, 500)},
    ),
    Kernel(
        "cumsum", {"BLOCK": 512}, 4, 1, (3, 1, 1), {"x": (FP32, [3, 500]), "out": (FP32, [3, 500]), "cols": (INT, 500)}
    ),
    Kernel("sort", {"BLOCK": 256}, 4, 1, (3, 1, 1), {"x": (FP32, [3, 256]), "out": (FP32, [3, 256])}),
    Kernel(
        "transpose",
        {"BLOCK": 32},
        4,
        1,
        (3, 4, 1),
        {"x": (FP32, [70, 101]), "out": (FP32, [101, 70]), "rows": (INT, 70), "cols": (INT, 101)},
    ),
    Kernel(
        "matmul",
        {"M": 64, "N": 64, "K": 32},
        4,
        3,
        (2, 2, 1),
        {
            "a": (FP16, [100, 200]),
            "b": (FP16, [200, 120]),
            "out": (FP32, [100, 120]),
            "m": (INT, 100),
            "n": (INT, 120),
            "k": (INT, 200),
        },
    ),
    Kernel(
        "attention",
        {"M": 64, "N": 64, "D": 64},
        4,
        2,
        (2, 1, 1),
        {
            "q": (FP16, [128, 64]),
            "k": (FP16, [300, 64]),
            "v": (FP16, [300, 64]),
            "out": (FP32, [128, 64]),
            "keys": (INT, 300),
            "scale": ("fp32", 0.125),
        },
    ),
    Kernel(
        "column_sums",
        {"ROWS": 16, "BLOCK": 128},
        4,
        1,
        (6, 1, 1),
        {
            "x": (FP32, [90, 100]),
            "out": (FP32, [100]),
            "partial": (FP32, [100]),
            "lock": ("*i32", [2]),
            "rows": (INT, 90),
            "cols": (INT, 100),
        },
    ),
    Kernel(
        "_swiglu_forward_kernel",
        {"n_cols": 777, "BLOCK_SIZE": 1024},
        4,
        1,
        (5, 1, 1),
        {
            "a_ptr": (FP16, [5, 777]),
            "b_ptr": (FP16, [5, 777]),
            "c_ptr": (FP16, [5, 777]),
            "stride": (INT, 777),
            "gate_multiplier": ("fp32", 1.0),
        },
        "liger_kernel.ops.swiglu",
        (80, 90),
    ),
    Kernel(
        "_softmax_single_block_forward_kernel",
        {"BLOCK_SIZE": 1024},
        8,
        1,
        (5, 1, 1),
        {
            "Y_ptr": (FP32, [5, 777]),
            "Y_row_stride": (INT, 777),
            "X_ptr": (FP32, [5, 777]),
            "X_row_stride": (INT, 777),
            "n_cols": (INT, 777),
        },
        "liger_kernel.ops.softmax",
        (80, 90),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/sass/data/triton"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    records = [_record(out, arch, kernel) for kernel in KERNELS for arch in kernel.architectures]
    (out / "launches.json").write_text(json.dumps(records, indent=1) + "\n", "utf-8")


def _record(out: Path, arch: int, kernel: Kernel) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: kind for name, (kind, _) in kernel.parameters.items()}
    source = ASTSource(
        getattr(import_module(kernel.module), kernel.name),
        {**signature, **dict.fromkeys(kernel.constants, "constexpr")},
        constexprs=kernel.constants,
    )
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin: bytes = made.asm["cubin"]
    file = f"{kernel.name}_{arch}.cubin.gz"
    (out / file).write_bytes(gzip.compress(cubin, 9, mtime=0))
    print(f"{file}: {len(cubin):,} bytes, {made.metadata.shared} of shared memory", flush=True)
    return {
        "file": file,
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "triton": triton.__version__,
        "kernel": kernel.name,
        "entry": made.metadata.name,
        "threads": 32 * kernel.warps,
        "grid": kernel.grid,
        "shared": made.metadata.shared,
        "scratch": made.metadata.global_scratch_size,
        "parameters": [[name, kind, given] for name, (kind, given) in kernel.parameters.items()],
    }


if __name__ == "__main__":
    main()
