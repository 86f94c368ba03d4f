"""Check what a search needs on this machine, with remedies for what is missing."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evoengine.errors import MachineError

if TYPE_CHECKING:
    from evoengine.devices.driver import GpuDevice


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one requirement."""

    name: str
    here: bool
    what: str
    """what was found, or what is missing"""
    remedy: str | None = None
    needed: bool = True
    """whether a search on this machine needs it"""


def check_machine() -> list[Finding]:
    return [check() for check in CHECKS]


def _python() -> Finding:
    return Finding("Python", True, f"{platform.python_version()} on {platform.machine()} {platform.system()}")


def _nvrtc() -> Finding:
    from evoengine.stages.toolchain import compiler_version, include_folders

    try:
        return Finding("CUDA compiler", True, f"{compiler_version()}, headers in {include_folders()[0]}")
    except MachineError as error:
        what, _, remedy = str(error).rpartition(": ")
        return Finding("CUDA compiler", False, what, remedy)


def _disassembler() -> Finding:
    from evoengine.cuda_files import disassembler

    tool = disassembler()
    without = "without it no machine code is read, and times are estimated by formula"
    remedy = None if tool else f"pip install nvidia-cuda-nvdisasm ({without})"
    return Finding("disassembler", bool(tool), tool or "nvdisasm is missing", remedy, needed=False)


def _host_compiler() -> Finding:
    from evoengine.sandbox.host_compiler import find_compiler

    try:
        return Finding("C++ compiler", True, find_compiler())
    except MachineError as error:
        what, _, remedy = str(error).partition(": ")
        return Finding("C++ compiler", False, what, remedy)


def _torch() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding("torch", True, version("torch"))
    except PackageNotFoundError:
        return Finding("torch", False, "torch is not installed", "pip install torch")


def _gpu() -> Finding:
    from evoengine.devices.driver import find_driver

    found = find_driver()
    if isinstance(found, str):
        remedy = "not needed for predictions; to time, install the GPU's driver"
        return Finding("GPU", False, found, remedy, needed=False)
    cuda, devices = found
    listed = ", ".join(f"{d.name} ({', '.join(_described(d))})" for d in devices)
    return Finding("GPU", True, f"{listed}, driver for CUDA {cuda}", needed=False)


def _described(device: GpuDevice) -> list[str]:
    from evoengine.devices.nvml import settings

    own = settings(device.uuid)
    power = [f"power limit {own['power limit']}"] if "power limit" in own else []
    mig = ["MIG on"] if own.get("MIG") == "on" else []
    return [f"sm_{device.capability}", f"{device.memory_bytes / 2**30:.0f} GiB", *power, *mig]


def _cuda_versions() -> Finding:
    """Check whether the driver can run what NVRTC compiles and what torch contains."""
    from evoengine.devices.driver import find_driver
    from evoengine.stages.toolchain import cuda_mismatch, cuda_parts, cuda_torch_command, torch_cuda

    name, found = "CUDA versions", find_driver()
    try:
        parts = cuda_parts()
    except MachineError:
        parts = {}
    listed = ", ".join(f"{part} {built}" for part, built in parts.items()) or "no part of CUDA is installed"
    if isinstance(found, str):
        return Finding(name, True, f"{listed}; no driver to run them", needed=False)
    driver, _ = found
    if torch_cuda() is None:
        return Finding(name, False, "torch is a CPU-only build", cuda_torch_command(driver), needed=False)
    if why := cuda_mismatch(driver, parts):
        what, _, remedy = why.partition(": ")
        return Finding(name, False, what, remedy)
    return Finding(name, True, f"{listed}, driver {driver}", needed=False)


def _baselines() -> Finding:
    """Name the packages whose kernels a search on a GPU times beside torch's."""
    from evoengine.workloads.packages import DISTRIBUTIONS, installed_version, is_installed

    here = [f"{package} {installed_version(package)}" for package in DISTRIBUTIONS if is_installed(package)]
    return Finding("baselines", True, f"kernels of {', '.join(['torch', *here])}", needed=False)


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _nvrtc,
    _disassembler,
    _host_compiler,
    _torch,
    _gpu,
    _cuda_versions,
    _baselines,
)
