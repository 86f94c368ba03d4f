"""Where NVIDIA's files lie: its wheels for Python first, then a CUDA toolkit."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def disassembler() -> str | None:
    """nvdisasm's path, or None: without it machine code can be run on a GPU and not be read."""
    for folder in wheel_folders():
        tool = folder / "bin" / "nvdisasm"
        if tool.is_file():
            return str(tool)
    installed = toolkit() / "bin" / "nvdisasm"
    return shutil.which("nvdisasm") or (str(installed) if installed.is_file() else None)


def wheel_folders() -> list[Path]:
    """cu13 of the CUDA 13 wheels; cuda_runtime, cuda_nvcc and cuda_cccl of those for CUDA 12."""
    spec = find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return [root / name for root in roots for name in ("cu13", "cuda_runtime", "cuda_nvcc", "cuda_cccl")]


def toolkit() -> Path:
    return Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
