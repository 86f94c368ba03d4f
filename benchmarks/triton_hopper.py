"""Compile Triton kernels as Hopper runs them: tiles for wgmma, aligned pointers and sizes that are multiples of 16.

    pip install triton==3.9.0
    python -m benchmarks.triton_hopper --out DIR

The folder's launches.json is what benchmarks/measured_kernels.py takes, beside the binaries. No GPU is needed.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import triton_kernels

FP32, FP16, INT = "*fp32", "*fp16", "i32"


class Case(NamedTuple):
    kernel: str
    constants: dict[str, int]
    warps: int
    stages: int
    grid: tuple[int, int, int]
    parameters: dict[str, tuple[str, Any]]


def cases() -> Iterator[Case]:
    for n in (1024, 4096):
        for m_tile, n_tile, k_tile, warps, stages in (
            (128, 128, 64, 4, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4), (64, 64, 32, 4, 3),
            (128, 64, 32, 4, 5), (128, 128, 32, 4, 2),
        ):  # fmt: skip
            matrices = {name: (FP32 if name == "out" else FP16, [n, n]) for name in ("a", "b", "out")}
            sizes = {name: (INT, n) for name in "mnk"}
            constants = {"M": m_tile, "N": n_tile, "K": k_tile}
            yield Case("matmul", constants, warps, stages, (n // m_tile, n // n_tile, 1), {**matrices, **sizes})
    for rows, keys in ((16384, 4096), (65536, 2048)):
        for m_tile, n_tile, d, warps, stages in (
            (128, 64, 64, 4, 2), (128, 128, 64, 8, 2), (64, 64, 64, 4, 3), (128, 64, 128, 8, 2), (128, 128, 128, 8, 2)
        ):  # fmt: skip
            tensors = {"q": (FP16, [rows, d]), "k": (FP16, [keys, d]), "v": (FP16, [keys, d]), "out": (FP32, [rows, d])}
            parameters = {**tensors, "keys": (INT, keys), "scale": ("fp32", 0.125)}
            yield Case(
                "attention", {"M": m_tile, "N": n_tile, "D": d}, warps, stages, (rows // m_tile, 1, 1), parameters
            )
    for rows, cols, warps in ((4096, 4096, 4), (4096, 4096, 8), (512, 1024, 4), (16384, 8192, 16)):
        tensors = {"x": (FP32, [rows, cols]), "out": (FP32, [rows, cols]), "cols": (INT, cols)}
        yield Case("softmax", {"BLOCK": cols}, warps, 1, (rows, 1, 1), tensors)
        yield Case("layer_norm", {"BLOCK": cols}, warps, 1, (rows, 1, 1), {
            "x": tensors["x"], "gain": (FP32, [cols]), "out": tensors["out"], "cols": (INT, cols)})  # fmt: skip


def record_of(out: Path, number: int, case: Case) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: kind for name, (kind, _) in case.parameters.items()}
    divisible = {
        (at,): [["tt.divisibility", 16]]
        for at, (kind, value) in enumerate(case.parameters.values())
        if kind.startswith("*") or (kind == INT and value % 16 == 0)
    }
    function = getattr(triton_kernels, case.kernel)
    names = {name: function.arg_names.index(name) for name in case.parameters}
    divisible = {(names[name],): divisible[at,] for at, name in enumerate(case.parameters) if (at,) in divisible}
    source = ASTSource(
        function,
        {**signature, **dict.fromkeys(case.constants, "constexpr")},
        constexprs=case.constants,
        attrs=divisible,
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": case.warps, "num_stages": case.stages}
    )
    file = f"{number:02}_{case.kernel}.cubin.gz"
    (out / file).write_bytes(gzip.compress(made.asm["cubin"], 9, mtime=0))
    constants = "x".join(map(str, case.constants.values()))
    print(f"{file}: {constants}, {made.metadata.shared} of shared memory", flush=True)
    assert made.metadata.global_scratch_size == 0
    return {
        "file": file, "triton": triton.__version__, "kernel": case.kernel, "entry": made.metadata.name,
        "label": f"{case.kernel} {constants} w{case.warps} s{case.stages}", "threads": 32 * case.warps,
        "grid": case.grid, "shared": made.metadata.shared, "sizes": {n: v for n, (_, v) in case.parameters.items()},
        "parameters": [[name, kind, given] for name, (kind, given) in case.parameters.items()],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    records = []
    for number, case in enumerate(cases()):
        try:
            records.append(record_of(out, number, case))
        except Exception as error:  # a tile that does not fit is left out
            print(f"left out {case.kernel} {case.constants}: {str(error)[:200]}")
    (out / "launches.json").write_text(json.dumps(records, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
