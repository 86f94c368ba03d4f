"""Kernels that others published as text: their times, and nvcc to compile them."""

from __future__ import annotations

import csv
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from evoengine.devices.base import KernelFailure
from evoengine.errors import EvoengineError, UsageError
from evoengine.sass.chip import Clock, find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import kernel_names, read_kernel
from evoengine.sass.launch import AnyArgument, Geometry, prepare
from evoengine.sass.listing import disassemble
from evoengine.sass.predict import Prediction, Unpredictable, predict
from evoengine.stages.compile import CompileFailed

COMPILE_SECONDS = 900
TORCH = """#pragma once
namespace torch {
enum class ScalarType : signed char { Half = 5, BFloat16 = 15 };
constexpr ScalarType kFloat16 = ScalarType::Half, kBFloat16 = ScalarType::BFloat16;
}
"""
"""what FlashAttention's headers use of PyTorch's"""
FAILURES = (EvoengineError, CompileFailed, KernelFailure, Unpredictable, OSError)


class Missed(Exception):
    """A kernel that has its text and could not be predicted."""


def read_times(data: Path, name: str) -> list[dict[str, str]]:
    try:
        with (data / name).open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise UsageError(f"cannot read {data / name}: {error.strerror}") from None


def check_commit(checkout: Path, wanted: str) -> None:
    """Raise UsageError where the working copy is at another commit."""
    asked = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    if asked.returncode:
        raise UsageError(f"{checkout} is no working copy of git: {asked.stderr.strip()}")
    if (found := asked.stdout.strip()) != wanted:
        raise UsageError(f"{checkout} is at commit {found[:12]}, the times are of {wanted[:12]}: check that out")


# ── nvcc ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_nvcc(folder: Path) -> Path:
    found = sorted(path for path in folder.rglob("bin/nvcc") if path.is_file())
    if not found:
        raise UsageError(f"{folder} holds no bin/nvcc; pip install --target {folder} nvidia-cuda-nvcc … makes one")
    return found[0]


def compiled(nvcc: Path, text: str, arch: str, options: Sequence[str]) -> bytes:
    """Return the cubin; raise CompileFailed with the compiler's first error."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "torch").mkdir()
        (folder / "torch" / "torch.h").write_text(TORCH)
        (folder / "cublas_v2.h").write_text("#pragma once\n")
        (folder / "kernel.cu").write_text(text)
        command = [str(nvcc), "-cubin", f"-arch={arch}", "-O3", "-DNDEBUG", f"-I{scratch}", *options]
        done = subprocess.run(
            [*command, str(folder / "kernel.cu"), "-o", str(folder / "kernel.cubin")],
            capture_output=True, text=True, timeout=COMPILE_SECONDS,
        )  # fmt: skip
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise CompileFailed(lines[0] if lines else f"nvcc ended with {done.returncode}")
        return (folder / "kernel.cubin").read_bytes()


def predicted(
    cubin: bytes, gpu: str, clock: Clock, flops: float, geometry: Geometry, arguments: Sequence[AnyArgument],
    entry: str = "",
) -> Prediction:  # fmt: skip
    """Predict `entry`, or the only kernel."""
    entry = entry or kernel_names(cubin)[0]
    launch = prepare(read_kernel(cubin, entry), geometry, arguments, 0)
    return predict(Program(disassemble(cubin, entry), entry), launch, find_chip(gpu), flops, clock=clock)
