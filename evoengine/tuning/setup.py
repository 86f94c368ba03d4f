"""Prepare and check what tuning needs before anything is written: arguments, target, space, toolchain, device.

A search runs in a place: this machine, or a Ray cluster (fleet.py).
"""

from __future__ import annotations

import os
import reprlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Protocol, Union, get_args, get_origin, get_type_hints

from evoengine.devices.driver import GpuDevice, find_driver, lock_device, supports_arch
from evoengine.devices.nvml import other_processes, settings
from evoengine.errors import EvoengineError, MachineError, UsageError
from evoengine.gpu import DEFAULT, Gpu, find_gpu
from evoengine.paths import asset
from evoengine.records import Config, Device, Value
from evoengine.sandbox.host_compiler import cache_folder, find_compiler, remove_abandoned
from evoengine.sandbox.machine import machine_error
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import Workers
from evoengine.search.evaluators import single_worker
from evoengine.search.first_build import FirstBuild
from evoengine.search.reference import examine_triton
from evoengine.space.space import SearchSpace, load_space, space_from_text
from evoengine.stages.includes import unsupported_includes
from evoengine.stages.render import Fill, render
from evoengine.stages.toolchain import (
    compiled_capabilities,
    compiler_version,
    cuda_mismatch,
    cuda_parts,
    cuda_torch_command,
    include_folders,
    torch_cuda,
)
from evoengine.tuning.boards import Choice, choose_gpu, space_file_of
from evoengine.workloads import default_workload, parse_problem, register
from evoengine.workloads.base import AnyWorkload, Host, Target
from evoengine.workloads.triton_kernel import TRITON_FILE, read_folder

if TYPE_CHECKING:
    from evoengine.ledger.store import Ledger

Echo = Callable[[str], None]
"""receives a line for the user"""


def silent(line: str) -> None:
    """Ignore a message."""


def register_kernel(folder: Path) -> AnyWorkload:
    """Register the workload in the folder under its name. Raises UsageError.

    A Triton kernel's file is executed in a worker process.
    """
    from evoengine.workloads.folder import load_folder

    is_triton = (folder / TRITON_FILE).is_file()
    workload = examine_triton(read_folder(folder), find_gpu(DEFAULT)) if is_triton else load_folder(folder)
    register(workload)
    return workload


def require_name(workload: AnyWorkload, problem: str) -> None:
    """Raise UsageError if the problem names another workload. One without a name fits any."""
    name, colon, _ = problem.partition(":")
    if colon and name != workload.name:
        raise UsageError(f"the problem {problem} is of the workload {name}, and the kernel is {workload.name}")


def make_target(problem: str | None, gpu: Gpu, kernel: Path | None = None, host: Host | None = None) -> Target:
    """Return the target of a search.

    The problem is given as text, or it is the example of the workload in the folder `kernel`, of the Triton kernel of
    `host`, or of the default workload. A user's own is registered under its name. Raises UsageError.
    """
    if problem == "":
        raise UsageError("the problem is empty; evoengine problems describes the syntax")
    workload: AnyWorkload
    if host is not None:
        workload = examine_triton(host, gpu)
        register(workload)
    elif kernel is not None:
        workload = register_kernel(kernel)
    else:
        workload, parsed = parse_problem(problem or default_workload().example)
        return Target(workload, parsed, gpu)
    if problem is not None:
        require_name(workload, problem)
    return Target(workload, workload.parse(problem or workload.example), gpu)


def read_space(space_file: Path | None, target: Target, families: Sequence[str] = ()) -> SearchSpace:
    """Return the space in the file, or the workload's own, bound to the target. Raises UsageError."""
    workload = target.workload
    text = None if space_file else workload.space_text()
    if text is not None:
        return space_from_text(text, f"{workload.name}.toml", target.problem, target.gpu)
    space = load_space(space_file or space_file_of(workload), target.problem, target.gpu, families)
    if space.kernel != workload.name:
        raise UsageError(f"{space.name} is a space for {space.kernel}, and the problem is of {workload.name}")
    return space


def prepare_space(
    space_file: Path | None,
    templates: Path | None,
    target: Target,
    emulated: bool,
    fill: Fill,
    families: Sequence[str] = (),
) -> tuple[SearchSpace, Path]:
    """Return the bound space and the folder of templates. One configuration of every family is rendered as a check."""
    space = read_space(space_file, target, families)
    folder = templates or asset("templates")
    if not folder.is_dir():
        raise UsageError(
            f"there is no templates folder {folder}; --templates takes a folder with {space.kernel}/*.cu.j2"
        )
    for config in first_of_each_family(space):
        source = render(target, space, config, folder, fill)
        if unsupported := unsupported_includes(source.text, emulated):
            raise UsageError(
                f"the kernel of family {config['family']} cannot be compiled here: {'; '.join(unsupported)}"
            )
    return space, folder


def first_of_each_family(space: SearchSpace) -> list[Config]:
    """Return a valid configuration of each family, its start point if there is one."""
    found: dict[Value, Config] = {}
    for config in chain(space.starts, space.enumerate()):
        found.setdefault(config["family"], config)
        if len(found) == len(space.families) - len(space.empty_families):
            break
    return list(found.values())


def require_compilers(gpu: Gpu, emulated: bool) -> None:
    """Require an NVRTC that supports the GPU, its headers, and a C++ compiler if the emulator gates.

    Raises MachineError that names what is missing.
    """
    if gpu.capability not in (known := compiled_capabilities()):
        able = ", ".join(f"sm_{each}" for each in known)
        raise MachineError(
            f"{compiler_version()} cannot compile for {gpu.arch}, which {gpu.key} needs, only for {able}: evoengine "
            "gpus lists the GPUs"
        )
    include_folders()
    if emulated:
        find_compiler()
        remove_abandoned(cache_folder("emulator"))


@contextmanager
def recording_failure(ledger: Ledger, run: int) -> Iterator[None]:
    """Record in the ledger the error that ends a run. Raises MachineError for any OSError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (EvoengineError, OSError) as error:
        found = machine_error(error) if isinstance(error, OSError) else error
        with suppress(EvoengineError):  # the ledger itself may have failed
            ledger.finish_run(run, f"stopped: {found}")
        raise found from error


def require_seed(seed: int | None) -> None:
    """Raise UsageError if the seed is not one that NumPy and Optuna take."""
    if seed is not None and not 0 <= seed < 1 << 32:
        raise UsageError(f"--seed is {seed}; it must be from 0 to {(1 << 32) - 1}")


def drawn_seed(given: int | None = None) -> int:
    """Return the seed that was given, or a random one."""
    return secrets.randbelow(2**31) if given is None else given


def begin_build(emulated: bool, echo: Echo, begun: FirstBuild | None = None) -> FirstBuild:
    """Start building the judges that this machine lacks, or continue a build that has `begun`."""
    build = begun or FirstBuild()
    if emulated:
        build.add_emulator()
    if build.is_running:
        echo(f"building {'executor and emulator' if emulated else 'the executor'}, once for this machine and compiler")
    return build


def why_no_predictions(gpu: Gpu, build: FirstBuild | None) -> str | None:
    """Return what is missing for predictions on the GPU, after waiting for `build` if it is given."""
    from evoengine.stages.predict import why_no_model

    try:
        if build:
            build.wait(both=False)
    except MachineError as error:
        return str(error)
    return why_no_model(gpu)


def choose_device(requested: str, gpu: Gpu, echo: Echo) -> GpuDevice | None:
    """Return the GPU that times the candidates, or None for the CPU judges.

    Raises MachineError if `cuda` is requested and there is no GPU, and if the GPU's driver cannot run what is installed
    here, because every candidate would fail.
    """
    if requested == "emulator":
        return None
    found = find_driver()
    if isinstance(found, str):
        if requested == "cuda":
            raise MachineError(f"--device cuda: {found}; --device emulator gates on the CPU and ranks by estimate")
        return None
    driver, devices = found
    fitting = [d for d in devices if supports_arch(d, gpu.arch)]
    if not fitting:
        device = devices[0]
        if requested == "cuda":
            raise MachineError(
                f"this machine's GPU is {device.name} (sm_{device.capability}), not the {gpu.key} ({gpu.arch}) of "
                "--gpu; name this machine's, or use --device emulator"
            )
        return None
    if torch_cuda() is None:
        missing = f"{fitting[0].name} is here, but torch is a CPU-only build: {cuda_torch_command(driver)}"
        if requested == "cuda":
            raise MachineError(f"--device cuda: {missing}")
        echo(f"{missing}; candidates are gated on the CPU until then")
        return None
    require_driver(driver, cuda_parts())
    return next((d for d in fitting if d.name == gpu.name), fitting[0])


def require_driver(driver: str, parts: Mapping[str, str]) -> None:
    """Raise MachineError if the driver cannot run these parts.

    Each is given with the CUDA version for which it was built.
    """
    if why := cuda_mismatch(driver, parts):
        raise MachineError(f"{why}; --device emulator needs no driver")


@contextmanager
def lock_gpu(device: GpuDevice | None, echo: Echo) -> Iterator[None]:
    """Lock the GPU that times for this process. Waits for the lock, and names other programs that use the GPU."""
    if device is None:
        yield
        return
    with lock_device(device, echo):
        if others := other_processes(device.uuid):
            named = ", ".join(map(str, others))
            echo(f"other processes use {device.name} ({named}): times will be longer and less stable than alone")
        yield


def require_gpus(compilers: Iterable[str]) -> list[GpuDevice]:
    """Return this machine's GPUs, on which torch and binaries of these compilers (such as nvrtc 13.0) can run.

    Raises MachineError if there is no GPU, or if its driver cannot run them.
    """
    found = find_driver()
    if isinstance(found, str):
        raise MachineError(f"no GPU to time on: {found}; evoengine doctor describes this machine")
    driver, devices = found
    torch = torch_cuda()
    if torch is None:
        raise MachineError(f"{devices[0].name} is here, but torch is a CPU-only build: {cuda_torch_command(driver)}")
    made = {f"a binary by {c}": c.removeprefix("nvrtc ") for c in compilers if c.startswith("nvrtc ")}
    require_driver(driver, {"torch": torch, **made})
    return devices


def ledger_device(timing: GpuDevice | None) -> Device:
    """Return the device that judges the candidates, as stored in the ledger."""
    if timing is None:
        return Device("emulator")
    found = find_driver()
    assert not isinstance(found, str)  # it found `timing`
    driver, _ = found
    versions = {name: version(name) for name in ("torch", "numpy")} | settings(timing.uuid)
    return Device(timing.name, timing.uuid, f"sm_{timing.capability}", f"CUDA {driver}", versions)


RESERVED_CORES = 2
"""for the process that launches on the GPU, which must not fall behind it, and for the coordinator"""


def default_jobs(timed: bool) -> int:
    """Return one compile worker per core, or two fewer if a GPU is timed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - RESERVED_CORES) if timed else cores


class Place(Protocol):
    def choose_gpu(self, requested: str, file: Path | None, find: Callable[[str], Gpu]) -> Choice:
        """Return the target GPU as boards.choose_gpu does."""

    def choose_device(self, requested: str, gpu: Gpu, echo: Echo) -> GpuDevice | None:
        """Return the GPU that times, as setup.choose_device does."""

    def begin_build(self, emulated: bool, echo: Echo) -> FirstBuild | None:
        """Begin to build the judges as setup.begin_build does; None if the workers do so themselves."""

    def default_jobs(self, timed: bool) -> int:
        """Return how many tasks run at once, not counting those on GPUs."""

    def lock_gpu(self, device: GpuDevice | None, echo: Echo) -> AbstractContextManager[None]:
        """Lock the GPU as setup.lock_gpu does."""

    def ledger_device(self, timing: GpuDevice | None) -> Device:
        """Return the device that judges the candidates, as setup.ledger_device does."""

    def runners(self, limits: WorkerLimits) -> Workers:
        """Return the workers that time on GPUs."""

    def compilers(self, jobs: int, limits: WorkerLimits) -> Workers | None:
        """Return the workers that compile and gate; None if these are processes of this machine."""


class ThisMachine:
    choose_gpu = staticmethod(choose_gpu)
    choose_device = staticmethod(choose_device)
    default_jobs = staticmethod(default_jobs)
    lock_gpu = staticmethod(lock_gpu)
    ledger_device = staticmethod(ledger_device)
    runners = staticmethod(single_worker)

    def __init__(self, begun: FirstBuild | None = None) -> None:
        """Create the place of a search whose build of the judges has `begun`, if it has."""
        self._begun = begun

    def begin_build(self, emulated: bool, echo: Echo) -> FirstBuild | None:
        return begin_build(emulated, echo, self._begun)

    def compilers(self, jobs: int, limits: WorkerLimits) -> Workers | None:
        return None


_NAMES = {
    str: "a string", int: "a whole number", float: "a number", bool: "True or False", Path: "a path",
    os.PathLike: "a path", tuple: "a sequence of strings", Mapping: "a mapping of knobs and values",
    dict: "a mapping of knobs and values", type(None): "None",
}  # fmt: skip # a table


def checked(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a function's or a class's parameters with paths as Path and sequences as tuples.

    Raises UsageError for a value that its parameter's annotation does not allow.
    """
    kinds = _kinds(function)
    return {name: _checked(name, value, kinds[name]) if name in kinds else value for name, value in values.items()}


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """Map each parameter to the types that it accepts, where all of them are known here."""
    found = {}
    for name, hint in get_type_hints(function).items():
        parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
        kinds = tuple(get_origin(part) or part for part in parts)
        if all(kind in _NAMES for kind in kinds):
            found[name] = kinds
    return found


def _checked(name: str, value: object, kinds: tuple[type, ...]) -> object:
    if Path in kinds and isinstance(value, str | os.PathLike):
        return Path(value)
    if str in kinds and isinstance(value, os.PathLike):
        return os.fspath(value)
    if tuple in kinds and isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(value)
    is_flag = isinstance(value, bool)
    numbers = not is_flag and isinstance(value, int) and (int in kinds or float in kinds)
    others = tuple(kind for kind in kinds if kind not in (int, tuple))
    if numbers or (isinstance(value, others) and (not is_flag or bool in kinds)):
        return value
    wanted = " or ".join(dict.fromkeys(_NAMES[kind] for kind in kinds))
    raise UsageError(f"{name} is {reprlib.repr(value)}, of type {type(value).__name__}; it takes {wanted}")
