"""Where the CUDA pieces lie that need no GPU: NVRTC through CuPy, the headers, the disassembler."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from evoengine.errors import MachineError

REMEDY = "pip install 'evoengine[cuda13]' (or [cuda12] for a driver of CUDA 12)"


@cache
def nvrtc() -> ModuleType:
    """CuPy's low-level NVRTC module, which works without a driver; raises MachineError where it or the library lacks."""
    try:
        module = importlib.import_module("cupy.cuda").nvrtc
        module.getVersion()
    except Exception as error:  # CuPy answers a missing library with ImportError, RuntimeError or its own classes
        raise MachineError(f"NVRTC cannot be used ({_first_line(error)}): {REMEDY}") from error
    return module


def compiler_version() -> str:
    major, minor = nvrtc().getVersion()
    return f"nvrtc {major}.{minor}"


@cache
def include_folders() -> tuple[Path, ...]:
    """The folders that hold cuda_fp16.h and crt/mma.h: NVIDIA's wheels first, then a CUDA toolkit."""
    folders: list[Path] = []
    for header in ("cuda_fp16.h", "crt/mma.h"):
        found = next((f for f in _header_candidates() if (f / header).is_file()), None)
        if found is None:
            raise MachineError(f"the CUDA header {header} was not found: {REMEDY}")
        if found not in folders:
            folders.append(found)
    return tuple(folders)


@cache
def disassembler() -> str | None:
    """nvdisasm's path, or None: without it a binary's instruction mix stays unknown."""
    for folder in _wheel_folders():
        tool = folder / "bin" / "nvdisasm"
        if tool.is_file():
            return str(tool)
    return shutil.which("nvdisasm") or _existing(_toolkit() / "bin" / "nvdisasm")


def _header_candidates() -> list[Path]:
    wheels = [folder / "include" for folder in _wheel_folders()]
    return [*wheels, _toolkit() / "include"]


def _wheel_folders() -> list[Path]:
    """cu13 of the CUDA 13 wheels; cuda_runtime and cuda_nvcc of those for CUDA 12."""
    spec = find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return [root / name for root in roots for name in ("cu13", "cuda_runtime", "cuda_nvcc")]


def _toolkit() -> Path:
    return Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")


def _existing(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
