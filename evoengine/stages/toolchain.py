"""Find the CUDA parts that need no GPU: NVRTC through CuPy, and the headers.

Also tell whether they and torch match the version of the GPU's driver, and give them to a stage in a jail, where what
reads a proposal's text and its machine code reaches nothing of the user's.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from evoengine.cuda_files import broken_compiler, disassembler, toolkit, wheel_folders
from evoengine.errors import MachineError
from evoengine.sandbox.jailed_call import call
from evoengine.sass import build

REMEDY = "pip install 'evoengine[cuda13]' (or [cuda12] for a driver of CUDA 12)"


CCCL_HEADER = "cuda/std/version"
DRIVER_FOR_13 = 580
"""the first driver branch that supports CUDA 13 (CUDA Toolkit release notes, CUDA Driver)"""
TORCH_FOR_12 = "2.9.1"
"""a torch whose wheel on PyPI is a build for CUDA 12 (12.8); that of 2.13.0 is for 13.0"""
FOR_12 = f"in a new environment, without constraints.txt: pip install 'torch=={TORCH_FOR_12}' 'evoengine[cuda12]'"


@cache
def nvrtc() -> ModuleType:
    """Return CuPy's low-level NVRTC module, which works without a driver.

    Raises MachineError if it or the library is missing or damaged.
    """
    if why := broken_compiler():
        raise MachineError(f"NVRTC cannot be used ({why}): {REMEDY}")
    try:
        module: ModuleType = importlib.import_module("cupy.cuda").nvrtc
        module.getVersion()
    except Exception as error:  # CuPy answers a missing library with ImportError, RuntimeError or its own classes
        raise MachineError(f"NVRTC cannot be used ({_first_line(error)}): {REMEDY}") from error
    return module


def compiler_version() -> str:
    major, minor = nvrtc().getVersion()
    return f"nvrtc {major}.{minor}"


def uncached() -> tuple[str, ...]:
    """Return the option that keeps NVRTC from answering out of its cache, which exists since CUDA 12.9.

    What comes out of the cache, on a machine with a driver, has no log, and so no report on registers and spills.
    """
    return ("--no-cache",) if nvrtc().getVersion() >= (12, 9) else ()


def compiled_capabilities() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC supports, 90 for 9.0, in order."""
    return tuple(sorted(nvrtc().getSupportedArchs()))


def torch_cuda() -> str | None:
    """Return the CUDA version (13.0) of torch, None for a CPU-only build. Does not import torch."""
    spec = find_spec("torch")
    text = Path(spec.origin).with_name("version.py").read_text("utf-8") if spec and spec.origin else ""
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def cuda_parts() -> dict[str, str]:
    """Return the parts that need a driver of at least their CUDA version, with that version."""
    compiler = {"NVRTC": compiler_version().removeprefix("nvrtc ")}
    built = torch_cuda()
    return {**compiler, "torch": built} if built else compiler


def cuda_mismatch(driver: str, parts: Mapping[str, str]) -> str | None:
    """Return which parts are of a later CUDA version than the driver (12.4) supports, with the remedy; None if all run.

    A driver runs what was built for its own major version, whatever the minor one, and for earlier ones.
    """
    newer = {name: built for name, built in parts.items() if _major(built) > _major(driver)}
    if not newer:
        return None
    named = " and ".join(f"{name} of CUDA {built}" for name, built in newer.items())
    update = f"update it to {DRIVER_FOR_13} or later"
    recipe = f"{update}, or {FOR_12}" if _major(driver) == 12 else update
    return f"the GPU's driver is for CUDA {driver} and cannot run {named}: {recipe}"


def cuda_torch_command(driver: str) -> str:
    """Return the command that installs a torch with CUDA from the default index, whatever pip's settings."""
    wanted = version("torch").partition("+")[0] if _major(driver) >= 13 else TORCH_FOR_12
    return f"PIP_CONFIG_FILE=/dev/null pip install --force-reinstall 'torch=={wanted}'"


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0])


@cache
def include_folders() -> tuple[Path, ...]:
    """Return the folders that hold cuda_fp16.h, crt/mma.h and, if installed, CCCL (cuda/std, CUB).

    NVIDIA's wheels come first, then a CUDA toolkit. Raises MachineError if the first two are missing.
    """
    folders: list[Path] = []
    for header in ("cuda_fp16.h", "crt/mma.h"):
        found = next((f for f in _header_candidates() if (f / header).is_file()), None)
        if found is None:
            raise MachineError(f"the CUDA header {header} was not found: {REMEDY}")
        if found not in folders:
            folders.append(found)
    folders += [folder for folder in [_cccl_folder()] if folder and folder not in folders]
    return tuple(folders)


def _cccl_folder() -> Path | None:
    """Return the folder of CCCL. CUDA 13 keeps it beside the other headers, CUDA 12 among them."""
    places = [place for folder in _header_candidates() for place in (folder / "cccl", folder)]
    return next((place for place in places if (place / CCCL_HEADER).is_file()), None)


def _header_candidates() -> list[Path]:
    wheels = [folder / "include" for folder in wheel_folders()]
    return [*wheels, toolkit() / "include"]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


T = TypeVar("T")


def in_jail(
    stage: Callable[..., T], *args: object, returns: Any, raises: tuple[type[Exception], ...], executes: bool = True
) -> T:
    """Call a stage in a jail and return its answer, a `returns`. Raises as `jailed_call.call` does.

    A stage that `executes` machine code has the executor there, which is built here before. Raises MachineError where
    it cannot be.
    """
    library = build.build() if executes else None
    tool = Path(disassembler() or "/usr/bin/nvdisasm")
    needed = [*include_folders(), toolkit(), tool, *([library] if library else [])]
    readable = [path for path in needed if path.exists()]
    environment = {"CUDA_HOME": str(toolkit()), "PATH": f"/usr/bin:/bin:{tool.parent}"}
    answer: T = call(
        _run, library, stage, args, returns=returns, raises=raises, readable=readable, environment=environment
    )
    return answer


def _run(library: Path | None, stage: Callable[..., T], args: tuple[object, ...]) -> T:
    if library:
        build.use(library)
    return stage(*args)
