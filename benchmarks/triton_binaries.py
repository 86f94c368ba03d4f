"""Compile the kernels of `triton_kernels.py` for several architectures, and record how they are launched.

    pip install triton==3.9.0
    python -m benchmarks.triton_binaries [--out tests/sass/data/triton]

No GPU is needed. `tests/sass/test_triton_kernels.py` executes what this writes and compares it with torch.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 86, 89, 90)
FP32, FP16, INT = "*fp32", "*fp16", "i32"
# name, signature, constants, num_warps, num_stages, grid, and a shape or a value for each parameter
KERNELS: tuple[tuple[str, dict[str, str], dict[str, int], int, int, tuple[int, int], dict[str, Any]], ...] = (
    ("softmax", {"x": FP32, "out": FP32, "cols": INT}, {"BLOCK": 1024}, 4, 1, (5, 1), {"x": [5, 777], "out": [5, 777], "cols": 777}),
    ("layer_norm", {"x": FP32, "gain": FP32, "out": FP32, "cols": INT}, {"BLOCK": 512}, 8, 1, (4, 1), {"x": [4, 500], "gain": [500], "out": [4, 500], "cols": 500}),
    ("cumsum", {"x": FP32, "out": FP32, "cols": INT}, {"BLOCK": 512}, 4, 1, (3, 1), {"x": [3, 500], "out": [3, 500], "cols": 500}),
    ("sort", {"x": FP32, "out": FP32}, {"BLOCK": 256}, 4, 1, (3, 1), {"x": [3, 256], "out": [3, 256]}),
    ("transpose", {"x": FP32, "out": FP32, "rows": INT, "cols": INT}, {"BLOCK": 32}, 4, 1, (3, 4), {"x": [70, 101], "out": [101, 70], "rows": 70, "cols": 101}),
    ("matmul", {"a": FP16, "b": FP16, "out": FP32, "m": INT, "n": INT, "k": INT}, {"M": 64, "N": 64, "K": 32}, 4, 3, (2, 2), {"a": [100, 200], "b": [200, 120], "out": [100, 120], "m": 100, "n": 120, "k": 200}),
    ("attention", {"q": FP16, "k": FP16, "v": FP16, "out": FP32, "keys": INT, "scale": "fp32"}, {"M": 64, "N": 64, "D": 64}, 4, 2, (2, 1), {"q": [128, 64], "k": [300, 64], "v": [300, 64], "out": [128, 64], "keys": 300, "scale": 0.125}),
    ("column_sums", {"x": FP32, "out": FP32, "partial": FP32, "lock": "*i32", "rows": INT, "cols": INT}, {"ROWS": 16, "BLOCK": 128}, 4, 1, (6, 1), {"x": [90, 100], "out": [100], "partial": [100], "lock": [2], "rows": 90, "cols": 100}),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/sass/data/triton"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    records = [_record(out, arch, *kernel) for kernel in KERNELS for arch in ARCHITECTURES]
    (out / "launches.json").write_text(json.dumps(records, indent=1) + "\n", "utf-8")


def _record(
    out: Path, arch: int, name: str, signature: dict[str, str], constants: dict[str, int], warps: int, stages: int,
    grid: tuple[int, int], given: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks import triton_kernels

    source = ASTSource(
        getattr(triton_kernels, name), {**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants
    )
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin: bytes = made.asm["cubin"]
    file = f"{name}_{arch}.cubin.gz"
    (out / file).write_bytes(gzip.compress(cubin, 9, mtime=0))
    print(f"{file}: {len(cubin):,} bytes, {made.metadata.shared} of shared memory", flush=True)
    return {
        "file": file, "sha256": hashlib.sha256(cubin).hexdigest(), "triton": triton.__version__, "kernel": name,
        "entry": made.metadata.name, "threads": 32 * warps, "grid": [*grid, 1], "shared": made.metadata.shared,
        "scratch": made.metadata.global_scratch_size, "parameters": [[key, signature[key], given[key]] for key in signature],
    }  # fmt: skip


if __name__ == "__main__":
    main()
