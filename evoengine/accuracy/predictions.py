"""Predict configurations of recorded kernels from their machine code: by the model and by simpler predictors.

A predictor gives a value to rank by, lowest first; those in ABSOLUTE give microseconds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool
from rich.console import Console
from rich.progress import track

from evoengine.accuracy.compilers import Compiled, compile_and_list, find_nvrtc
from evoengine.accuracy.dataset import RecordedKernel, Recording, read_kernel
from evoengine.devices.base import KernelFailure
from evoengine.errors import EvoengineError, MachineError, UsageError
from evoengine.sass.chip import Chip, Clock, find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import Kernel, kernel_names
from evoengine.sass.cubin import read_kernel as read_binary
from evoengine.sass.launch import Launch, prepare
from evoengine.sass.listing import disassemble, instructions
from evoengine.sass.predict import Prediction, Unpredictable, predict
from evoengine.stages.compile import CompileFailed

CANDIDATE_SECONDS = 600
"""time limit of compiling one configuration and predicting it on every GPU"""
PREDICTORS = ("occupancy", "static count", "roofline", "model")
ABSOLUTE = ("roofline", "model")
UNPREDICTED = math.inf


@dataclass(frozen=True)
class Task:
    """A configuration of a kernel to compile once for GPUs of one architecture."""

    folder: Path
    config: Mapping[str, Any]
    clocks: Mapping[str, Clock]
    """GPU → clock of the measurement there"""
    nvrtc: tuple[tuple[str, Path], ...]


@dataclass(frozen=True)
class Answer:
    """The result of one configuration."""

    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """GPU → predictor → value to rank by"""
    said: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """GPU → the class of the kernel and what bounds it, by the model"""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """GPU → CPU seconds of the model, including reading the listing"""
    problems: Mapping[str, str] = field(default_factory=dict)
    """GPU → why the model gave no figure"""
    failure: str | None = None
    """why there is no result: it does not compile, or took too long"""


@cache
def kernel_of(folder: Path) -> RecordedKernel:
    return read_kernel(folder)


def answer(task: Task) -> Answer:
    kernel, chips = kernel_of(task.folder), [find_chip(gpu) for gpu in task.clocks]
    try:
        compiled = _compiled(kernel, task, chips[0].gpu.arch)
    except CompileFailed as error:
        return Answer(failure=f"does not compile: {error}")
    start = time.process_time()
    binary = read_binary(compiled.cubin, entry_of(compiled.cubin, kernel.entry))
    program, launch, problem = None, None, None
    try:
        program = Program(compiled.listing, binary.entry)
        launch = launch_of(kernel, binary, task.config)
    except Exception as error:  # an invalid launch or an unreadable opcode is data, and counted
        problem = _reason(error)
    read_seconds = time.process_time() - start
    static = len(instructions(compiled.listing, binary.entry))
    predicted, said, seconds, problems = {}, {}, {}, {}
    for chip in chips:
        start = time.process_time()
        prediction = None
        try:
            if program is None or launch is None:
                raise Unpredictable(str(problem))
            prediction = predict(program, launch, chip, clock=task.clocks[chip.key])
            if not math.isfinite(prediction.time_us):
                raise Unpredictable(f"it gives {prediction.time_us} µs")
            said[chip.key] = prediction.kernel_class, prediction.bound
        except Exception as error:
            problems[chip.key] = _reason(error)
        seconds[chip.key] = read_seconds + time.process_time() - start
        predicted[chip.key] = _all_predictors(kernel, task.config, binary, static, prediction, chip)
    return Answer(predicted, said, seconds, problems)


def _compiled(kernel: RecordedKernel, task: Task, arch: str) -> Compiled:
    """Raise CompileFailed where the text does not compile, or the machine code is for another architecture."""
    if kernel.cubin is None:
        compiler = find_nvrtc(kernel.compiler, task.nvrtc)
        return compile_and_list(compiler, kernel.source(task.config), arch, kernel.options)
    own = read_binary(kernel.cubin, entry_of(kernel.cubin, kernel.entry)).arch
    if not arch.startswith(f"sm_{own}"):
        raise CompileFailed(f"kernel.cubin is for sm_{own}, the GPU is {arch}")
    return Compiled(kernel.cubin, disassemble(kernel.cubin, entry_of(kernel.cubin, kernel.entry)), 0.0)


def _reason(error: Exception) -> str:
    known = isinstance(error, EvoengineError | KernelFailure | Unpredictable)
    return str(error) if known else f"{type(error).__name__}: {error}"


def entry_of(cubin: bytes, entry: str) -> str:
    """Return the kernel's name in the binary, which C++ mangles unless the text says extern "C".

    Raises UsageError if the binary has no such kernel, or several.
    """
    names = kernel_names(cubin)
    if entry in names:
        return entry
    mangled = [name for name in names if name.startswith("_Z") and f"{len(entry)}{entry}" in name]
    if len(mangled) != 1:
        raise UsageError(f"the binary has no kernel {entry}: it has {', '.join(names) or 'none'}")
    return mangled[0]


def launch_of(kernel: RecordedKernel, binary: Kernel, config: Mapping[str, Any]) -> Launch:
    arguments = [argument.argument(config) for argument in kernel.arguments]
    # a configuration that does not use an array leaves it out of the binary
    contents = {c.name: c.contents(config, most=None) for c in kernel.constants if c.name in binary.constants}
    held = {name: c.tobytes() for name, c in contents.items()}
    mapped = [buffer.argument(config) for buffer in kernel.mapped]
    return prepare(binary, kernel.geometry(config), arguments, 0, held, mapped=mapped)


# ── simpler predictors ──────────────────────────────────────────────────────────────────────────────────────────────


def _all_predictors(
    kernel: RecordedKernel,
    config: Mapping[str, Any],
    binary: Kernel,
    static: int,
    prediction: Prediction | None,
    chip: Chip,
) -> dict[str, float]:
    geometry = kernel.geometry(config)
    threads, blocks = math.prod(geometry.threads), math.prod(geometry.grid)
    shared = binary.shared_bytes + geometry.shared_bytes
    warps = blocks * math.ceil(threads / 32)
    return {
        "occupancy": -chip.gpu.occupancy(threads, binary.registers, shared),
        "static count": float(static * warps),
        "roofline": roofline_us(prediction, blocks, kernel.buffer_bytes(config), chip) if prediction else UNPREDICTED,
        "model": prediction.time_us if prediction else UNPREDICTED,
    }


def roofline_us(prediction: Prediction, blocks: int, buffer_bytes: int, chip: Chip) -> float:
    """Return the lower bound in µs: the busiest pipe of all SMs or the memory, with no latency and no waves.

    Pipes are counted from the instructions that the blocks execute.
    """
    n, r = prediction.counts, chip.rates
    pipes = (
        n["instructions"],
        n["fma"] * r["fma_interval"] + n["imad"] * (r["imad_interval"] if r["fma_interval"] > 1 else 1),
        n["alu"] * r["alu_interval"],
        n["mufu"] * r["mufu_interval"],
        n["memory"] * r["memory_interval"],
    )
    sectors = 32 * (n["sectors_loaded"] + n["sectors_stored"])
    clocks_of_block = max(max(pipes) / 4, n["wavefronts"] * r["wavefront_clocks"], sectors / r["l2_bytes_per_clock"])
    return max(
        blocks * clocks_of_block / chip.sms / chip.gpu.clock_ghz / 1e3,
        buffer_bytes / (chip.dram * r["dram_efficiency"]) * 1e6,
    )


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────────


Key = tuple[Path, str, str]
"""kernel's folder, configuration as JSON, architecture"""


def answer_all(
    recordings: Sequence[tuple[Path, Recording]], nvrtc: tuple[tuple[str, Path], ...], jobs: int
) -> dict[Key, Answer]:
    """Predict every configuration in `jobs` processes; one that dies or exceeds its time costs only itself.

    Raises MachineError if a part is missing that all need.
    """
    tasks = tasks_of(recordings, nvrtc)
    with ProcessPool(max_workers=jobs) as pool:
        futures = {key: pool.schedule(answer, (task,), timeout=CANDIDATE_SECONDS) for key, task in tasks.items()}
        console = Console(stderr=True)
        shown = track(
            futures.items(), "configurations", console=console, transient=True, disable=not console.is_terminal
        )
        try:
            return {key: _outcome(future) for key, future in shown}
        except BaseException:
            pool.stop()
            raise


def tasks_of(recordings: Sequence[tuple[Path, Recording]], nvrtc: tuple[tuple[str, Path], ...]) -> dict[Key, Task]:
    """Return one task per configuration and architecture, so that it is compiled once for all GPUs of it."""
    clocks: dict[Key, dict[str, Clock]] = {}
    configs = {}
    for folder, recording in recordings:
        for row in recording.rows:
            key = key_of(folder, row.config, recording.gpu)
            configs[key] = row.config
            clocks.setdefault(key, {})[recording.gpu] = recording.clock
    return {key: Task(key[0], configs[key], of_gpus, nvrtc) for key, of_gpus in clocks.items()}


def key_of(folder: Path, config: Mapping[str, Any], gpu: str) -> Key:
    return folder, json.dumps(config, sort_keys=True), find_chip(gpu).gpu.arch


def _outcome(future: Any) -> Answer:
    try:
        found: Answer = future.result()
        return found
    except MachineError:
        raise
    except TimeoutError:
        return Answer(failure=f"took longer than {CANDIDATE_SECONDS} s")
    except ProcessExpired as error:
        return Answer(failure=f"its process ended: {error}")
    except Exception as error:
        return Answer(failure=_reason(error))
