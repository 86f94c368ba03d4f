"""What a search or a verify needs before anything is written: space, templates, toolchain, device; each checked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from evoengine.devices.driver import GpuDevice, find_driver, hold, takes
from evoengine.errors import MachineError, UsageError
from evoengine.gpu import Gpu, find_gpu
from evoengine.ledger.runs import Device
from evoengine.paths import asset
from evoengine.problem import Problem, parse_problem
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages.render import render
from evoengine.stages.toolchain import include_folders, nvrtc

if TYPE_CHECKING:
    from evoengine.ledger.store import Ledger


def prepare_space(
    space_file: Path | None, templates: Path | None, problem: Problem, gpu: Gpu, families: Sequence[str] = ()
) -> tuple[SearchSpace, Path]:
    """The bound space and the folder of templates; one configuration of every family is rendered as a trial."""
    space = load_space(space_file or asset("search_spaces") / "attention.toml", problem, gpu, families)
    folder = templates or asset("templates")
    if not folder.is_dir():
        raise UsageError(f"the templates folder {folder} is not there; --templates takes a folder of {space.kernel}/*.cu.j2")
    for config in first_of_each_family(space):
        render(space, config, problem, folder)
    return space, folder


def first_of_each_family(space: SearchSpace) -> list[dict]:
    """A valid configuration per family, the start points' where there is one."""
    found: dict[str, dict] = {}
    for config in chain(space.starts, space.enumerate()):
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
    """The GPU that will time the candidates, or None for the emulator.

    Raises MachineError where `cuda` is asked for in vain.
    """
    if wish == "emulator":
        return None
    found = find_driver()
    if isinstance(found, str):
        if wish == "cuda":
            raise MachineError(f"--device cuda: {found}; --device emulator gates on the CPU and ranks by estimate")
        return None
    _, devices = found
    fitting = [d for d in devices if takes(d, gpu.arch)]
    if fitting:
        return next((d for d in fitting if d.name == gpu.name), fitting[0])
    device = devices[0]
    if wish == "cuda":
        raise MachineError(
            f"this machine's GPU is {device.name} (sm_{device.capability}), not the {gpu.key} ({gpu.arch}) named by --gpu; "
            "name the one that is here, or --device emulator"
        )
    return None


def turn(device: GpuDevice | None, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """The GPU for this process alone, where one is to time; waits for it."""
    return hold(device, say) if device else nullcontext()


def require_gpus() -> list[GpuDevice]:
    """This machine's GPUs; raises MachineError with the doctor's finding where there is none."""
    found = find_driver()
    if isinstance(found, str):
        raise MachineError(f"no GPU to time on: {found}; evoengine doctor says what else this machine has")
    return found[1]


def ledger_device(timing: GpuDevice | None) -> Device:
    """What judges the candidates, as the ledger keeps it."""
    if timing is None:
        return Device("emulator")
    driver, _ = find_driver()
    versions = {name: version(name) for name in ("torch", "numpy")}
    return Device(timing.name, timing.uuid, f"sm_{timing.capability}", f"CUDA {driver}", versions)


def target(ledger: Ledger, gpu: Gpu | None, problem: Problem | str | None) -> tuple[Gpu, Problem]:
    """What is given, and where nothing is, what the last run was for."""
    key, text = ledger.last_target(gpu.key if gpu else None, str(problem) if problem else None)
    return find_gpu(key), parse_problem(text)


def stop_on_signal(stop: Callable[[], None]) -> Callable[[], bool]:
    """The first Ctrl-C or SIGTERM ends with what there is, a second Ctrl-C at once; gives whether there was one."""
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        seen.append(number)
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return lambda: bool(seen)


def default_jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
