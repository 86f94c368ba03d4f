"""What a search or a verify needs before anything is written: space, templates, toolchain, device; each checked."""

from __future__ import annotations

import os
from pathlib import Path

from evoengine.devices.driver import GpuDevice, find_driver
from evoengine.errors import MachineError, UsageError
from evoengine.gpu import Gpu
from evoengine.paths import asset
from evoengine.problem import Problem
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages.render import render
from evoengine.stages.toolchain import include_folders, nvrtc


def prepare_space(
    space_file: Path | None, templates: Path | None, problem: Problem, gpu: Gpu
) -> tuple[SearchSpace, Path]:
    """The bound space and the folder of templates; one configuration of every family is rendered as a trial."""
    space = load_space(space_file or asset("search_spaces") / "attention.toml", problem, gpu)
    folder = templates or asset("templates")
    if not folder.is_dir():
        raise UsageError(f"the templates folder {folder} is not there; --templates takes a folder of {space.kernel}/*.cu.j2")
    for config in first_of_each_family(space):
        render(space, config, problem, folder)
    return space, folder


def first_of_each_family(space: SearchSpace) -> list[dict]:
    """A valid configuration per family, the start points' where there is one."""
    found: dict[str, dict] = {}
    for config in (*space.starts, *space.enumerate()):
        found.setdefault(config["family"], config)
        if len(found) == len(space.families) - len(space.empty_families):
            break
    return list(found.values())


def require_compilers(emulated: bool) -> None:
    """NVRTC with its headers, and the C++ compiler where the emulator is to gate; raises MachineError naming the lack."""
    nvrtc()
    include_folders()
    if emulated:
        from evoengine.devices.emulator.build import find_compiler

        find_compiler()


def choose_device(wish: str, gpu: Gpu) -> GpuDevice | None:
    """The GPU that will time the candidates, or None for the emulator. Raises MachineError where `cuda` is asked for in vain."""
    if wish == "emulator":
        return None
    found = find_driver()
    if isinstance(found, str):
        if wish == "cuda":
            raise MachineError(f"--device cuda: {found}; --device emulator gates on the CPU and ranks by estimate")
        return None
    _, devices = found
    device = devices[0]
    wanted = int("".join(c for c in gpu.arch if c.isdigit()))
    if device.capability == wanted:
        return device
    if wish == "cuda":
        raise MachineError(
            f"this machine's GPU is {device.name} (sm_{device.capability}), not the {gpu.key} ({gpu.arch}) named by --gpu; "
            "name the one that is here, or --device emulator"
        )
    return None


def default_jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
