"""Find NVIDIA's files: in its Python wheels first, then in Triton's, then in a CUDA toolkit."""

from __future__ import annotations

import os
import shutil
import struct
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def disassembler() -> str | None:
    """Return nvdisasm's path, or None: without it machine code can run on a GPU but cannot be read."""
    return _tool("nvdisasm")


@cache
def assembler() -> str | None:
    """Return ptxas's path, or None: only PTX needs it."""
    return _tool("ptxas")


def _tool(name: str) -> str | None:
    for folder in (*wheel_folders(), *_triton_folders()):
        tool = folder / "bin" / name
        if tool.is_file():
            return str(tool)
    installed = toolkit() / "bin" / name
    return shutil.which(name) or (str(installed) if installed.is_file() else None)


_WHEELS = ("cu13", "cuda_nvrtc", "cuda_runtime", "cuda_nvcc", "cuda_cccl")
"""the first is the folder of the CUDA 13 wheels, the others are of those for CUDA 12"""


def wheel_folders() -> list[Path]:
    spec = find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return [root / name for root in roots for name in _WHEELS]


def _triton_folders() -> list[Path]:
    """Return where Triton's wheel holds NVIDIA's tools."""
    spec = find_spec("triton")
    return [Path(root, "backends", "nvidia") for root in (spec.submodule_search_locations or [])] if spec else []


def broken_compiler() -> str | None:
    """Return which file of NVRTC is unreadable or incomplete; None if all are whole, or NVRTC is absent."""
    folders = [*(folder / "lib" for folder in wheel_folders()), toolkit() / "lib64"]
    libraries = next((found for folder in folders if (found := sorted(folder.glob("libnvrtc*.so*")))), [])
    for library in libraries:
        try:
            size, wanted = library.stat().st_size, _bytes_to_load(library)
        except OSError as error:
            return f"{library} cannot be read: {error.strerror}"
        except (ValueError, struct.error):
            return f"{library} is not a library"
        if size < wanted:
            return f"{library} is damaged: it has {size:,} of {wanted:,} bytes"
    return None


def _bytes_to_load(library: Path) -> int:
    """Return where the last segment of a 64-bit ELF file ends. Raises ValueError or struct.error if it is none."""
    with library.open("rb") as file:
        header = file.read(64)
        if not header.startswith(b"\x7fELF\x02\x01"):
            raise ValueError
        (table,), (entry, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
        file.seek(table)
        segments = file.read(entry * count)
    ends: list[int] = [table + entry * count]
    for place in range(0, entry * count, entry):
        offset, size = struct.unpack_from("<8xQ16xQ", segments, place)
        ends.append(offset + size)
    return max(ends)


def toolkit() -> Path:
    return Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
