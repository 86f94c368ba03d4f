"""The virtual GPU: execute launches, predict each once, and keep account of both.

In the loops of a profiler, results that nothing can read are not computed: a launch that repeats an executed one waits
until the program reads a tensor or launches again, and is dropped if its outputs no longer exist by then.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from evoengine.devices.base import KernelFailure, KernelRaced
from evoengine.errors import EvoengineError, UsageError
from evoengine.gpu import Gpu, find_gpu
from evoengine.sass import core
from evoengine.sass.chip import find_chip, why_unmodelled
from evoengine.sass.core import Program, Races
from evoengine.sass.cubin import Kernel, read_kernel
from evoengine.sass.grid import grid_of
from evoengine.sass.launch import Geometry, Launch, Memory, prepare, require_arch_of
from evoengine.sass.listing import line_table, linked_listing, names_an_instruction, with_source_lines
from evoengine.sass.model import count_block
from evoengine.sass.predict import MODEL_VERSION, Prediction, Unpredictable, predict
from evoengine.text import number, plain

if TYPE_CHECKING:
    from evoengine.virtual.arguments import Arguments

INSTRUCTIONS_PER_SECOND = 4e6
PRODUCTS_PER_SECOND = 7e8
"""warp instructions per second that the executor runs on one core with its checks, and products of tensor cores per
second that it adds in addition; from these, long launches are announced and sampled"""
SAMPLED_FROM, SAMPLED_SECONDS, SAMPLED_LATER = 60.0, 10.0, 1.0
"""seconds, with `sample`: estimated total of a kernel's launches above which only some blocks are executed, duration of
the first such execution, and of later ones"""
LONGEST = 3600.0
"""estimated seconds above which a launch that is not sampled is refused"""
LEAST_LIMIT, SPINS = 4_000_000, 100
"""warp instructions after which a block hangs: this number, or this multiple of what the model counts if that is more
"""
ESTIMATED_FROM = 20_000_000
"""limit of the warp instructions of a block from which the duration of a launch without a prediction is estimated"""
CORES = min(len(os.sched_getaffinity(0)), 16)
"""maximum number of threads that execute one launch"""
PATIENCE = 10.0
"""seconds after which a running launch is reported, and between reports"""


class VirtualGpuError(RuntimeError):
    """A failed launch on the virtual GPU, in place of a driver's error."""


class Unpredicted(str):
    """The reason why a launch has no predicted time."""

    counts: Mapping[str, float]
    """counts of an executed block; empty if unknown"""

    def __new__(cls, reason: str, counts: Mapping[str, float]) -> Self:
        found = super().__new__(cls, reason)
        found.counts = counts
        return found


class RaceWarning(UserWarning):
    """Two unordered accesses of a launch. A GPU would not report them, so the launch is completed without the check."""


@dataclass(eq=False, slots=True)
class LoadedKernel:
    """A kernel of a cubin, decoded."""

    kernel: Kernel
    program: Program
    cubin: bytes = field(repr=False)
    function: Any = None
    """the Python function with the kernel's text, if it is known"""

    @property
    def source_file(self) -> str:
        """Return the name of the file with the kernel's text; empty if it is unknown."""
        return os.path.basename(self.function.__code__.co_filename) if self.function else ""


class Instant(NamedTuple):
    """The virtual clock, and the events up to now."""

    us: float
    launches: int
    unpredicted: int


@dataclass(slots=True)
class Use:
    """The use of one kernel with one set of options."""

    name: str
    options: str
    executed: int = 0
    only_predicted: int = 0
    sampled: int = 0
    times_us: list[float] = field(default_factory=list)
    """of executed launches"""
    bounds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """µs, by what bounds them"""
    unpredictable: str = ""
    """why the model has no time, if it has none"""
    failures: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)


def virtual_gpu(gpu: str, sample: bool = False) -> VirtualGpu:
    """Return the GPU of that name as a virtual one. Raises UsageError if its machine code cannot be executed."""
    found = find_gpu(gpu)
    require_arch_of(found.capability)
    return VirtualGpu(found, sample)


class VirtualGpu:
    """A GPU represented by its data sheet and the model of an SM. Not safe for concurrent use by threads."""

    def __init__(self, gpu: Gpu, sample: bool = False) -> None:
        self.gpu, self.sample = gpu, sample
        self.now = Instant(0.0, 0, 0)
        self.only_predicts = False
        """whether launches are timed and not executed, as in the loops of a benchmark"""
        self.repeats: Repeats | None = None
        """the launches that may wait; None if it is unknown when the program reads a tensor"""
        self.captured: list[Callable[[], object]] | None = None
        """where launches are recorded, to be repeated"""
        self.launched: Callable[[str, float], None] | None = None
        """called with the name and the predicted µs of each launch; infinite without a prediction"""
        self._uses: dict[tuple[str, str], Use] = {}
        self._predictions: dict[object, Prediction | Unpredicted] = {}
        self._spent: dict[str, float] = defaultdict(float)
        """kernel → estimated seconds for which its launches were executed"""

    def load(self, cubin: bytes, name: str) -> LoadedKernel:
        """Decode a kernel. Raises VirtualGpuError if it cannot be executed."""
        try:
            kernel, program = read_kernel(cubin, name), Program(linked_listing(cubin, name), name)
        except UsageError as error:
            raise VirtualGpuError(str(error)) from error
        if program.unknown:
            names = ", ".join(program.unknown)
            raise VirtualGpuError(f"kernel {name} cannot be executed: {names} in its machine code are not known")
        return LoadedKernel(kernel, program, cubin)

    def launch(self, loaded: LoadedKernel, geometry: Geometry, arguments: Arguments, options: str = "") -> None:
        """Predict the launch, and execute it unless `only_predicts`. Raises VirtualGpuError if the launch fails."""
        name = loaded.kernel.entry
        use = self._uses.setdefault((name, options), Use(name, options))
        self.settle()
        if self.captured is not None:
            self.captured.append(lambda: self.launch(loaded, geometry, arguments, options))
        with self._failures(loaded, use):
            prediction = self.predicted(loaded, geometry, arguments)
        self._pass(use, prediction)

        def execute() -> None:
            with self._failures(loaded, use):
                _note(use, prediction, bool(self._execute(use, loaded, geometry, arguments, prediction)))

        def drop() -> None:
            use.only_predicted += 1

        key = (loaded, geometry, arguments.key())
        if self.only_predicts:
            drop()
        elif self.repeats is not None and self.repeats.put_off(key, arguments.fresh, execute, drop):
            arguments.given.clear()  # no reference here keeps a tensor alive
        else:
            execute()

    def settle(self) -> None:
        """Execute a waiting launch if its outputs can still be read."""
        if self.repeats is not None:
            self.repeats.settle()

    @contextmanager
    def _failures(self, loaded: LoadedKernel, use: Use) -> Iterator[None]:
        """Convert failures to VirtualGpuError with source lines, and end any benchmark."""
        try:
            yield
        except (KernelFailure, UsageError, VirtualGpuError) as error:
            self.only_predicts = False
            use.failures.append(explained(error, loaded))
            raise VirtualGpuError(use.failures[-1]) from None

    def predicted(self, loaded: LoadedKernel, geometry: Geometry, arguments: Arguments) -> Prediction | Unpredicted:
        """Return the launch's prediction, or why there is none."""
        key = (loaded, geometry, arguments.key())
        if key not in self._predictions:
            launch = prepare(loaded.kernel, geometry, arguments.parameters, 0, mapped=arguments.for_model())
            hazards, _ = loaded.program.hazards(loaded.kernel.arch, loaded.kernel.registers)
            if hazards:
                raise VirtualGpuError(hazards[0])
            self._predictions[key] = self._prediction(loaded, launch)
        return self._predictions[key]

    def _prediction(self, loaded: LoadedKernel, launch: Launch) -> Prediction | Unpredicted:
        if unmodelled := why_unmodelled(self.gpu):
            return Unpredicted(unmodelled, _counted(loaded, launch))
        try:
            return predict(loaded.program, launch, find_chip(self.gpu.key))
        except Unpredictable as error:
            return Unpredicted(str(error), _counted(loaded, launch))

    def _execute(
        self,
        use: Use,
        loaded: LoadedKernel,
        geometry: Geometry,
        arguments: Arguments,
        prediction: Prediction | Unpredicted,
    ) -> Sequence[int]:
        """Execute the launch in the tensors' own memory; return the executed blocks if they are not all."""
        memory = Memory([(loaded.kernel, [*arguments.parameters, *arguments.mapped])], self.now.launches)
        watched = memory.watch([s.name for s in arguments.mapped]) if self.repeats is not None else {}
        launch = prepare(
            loaded.kernel, geometry, arguments.parameters, self.now.launches, memory=memory, mapped=arguments.mapped
        )
        seconds = seconds_to_execute(prediction, geometry)
        blocks = self.sampled(loaded, geometry, seconds)
        limit = limit_of(prediction)
        try:
            run_watched(loaded, launch, blocks, seconds, limit=limit)
        except KernelRaced as race:
            use.races.append(explained(race, loaded))
            _warn(use.races[-1])
            run_watched(loaded, launch, blocks, seconds, Races.NONE, limit)
        if self.repeats is not None:
            written = frozenset(name for name, stored in watched.items() if stored.any())
            self.repeats.note((loaded, geometry, arguments.key()), written)
        return blocks

    def sampled(self, loaded: LoadedKernel, geometry: Geometry, seconds: float) -> Sequence[int]:
        """Return the blocks to execute; none for all. Raises VirtualGpuError for a launch that would take hours."""
        spent = self._spent[loaded.kernel.entry]
        allowed = SAMPLED_LATER if spent > SAMPLED_FROM else SAMPLED_SECONDS
        if self.sample and spent + seconds > SAMPLED_FROM and seconds > allowed:
            self._spent[loaded.kernel.entry] += allowed
            total = math.prod(geometry.grid)
            count = max(1, int(total * allowed / seconds))
            return [int((n + 0.5) * total / count) for n in range(count)]
        self._spent[loaded.kernel.entry] += seconds
        if seconds > LONGEST:
            raise VirtualGpuError(
                f"executing it would take about {seconds / 3600:.1f} hours; with --sample (sample=True) only blocks "
                f"for about {SAMPLED_SECONDS:.0f} s of it are executed"
            )
        return ()

    def _pass(self, use: Use, prediction: Prediction | Unpredicted) -> None:
        """Advance the virtual clock by the launch's time."""
        us, launches, unpredicted = self.now
        if isinstance(prediction, Unpredicted):
            use.unpredictable = prediction
            self.now = Instant(us, launches + 1, unpredicted + 1)
        else:
            self.now = Instant(us + prediction.time_us, launches + 1, unpredicted)
        if self.launched is not None:
            self.launched(use.name, math.inf if isinstance(prediction, Unpredicted) else prediction.time_us)

    # ── benchmarks ──────────────────────────────────────────────────────────────────────────────────────────────────

    def pass_time(self, us: float) -> None:
        self.now = self.now._replace(us=self.now.us + us)

    def ms_between(self, start: Instant, end: Instant) -> float:
        """Return the predicted milliseconds of the launches between; infinite without one or if one has no time."""
        if end.launches == start.launches or end.unpredicted > start.unpredicted:
            return math.inf
        return (end.us - start.us) / 1e3

    @property
    def raced(self) -> bool:
        """Whether a launch had a race."""
        return any(use.races for use in self._uses.values())

    def summary(self) -> str:
        """Return a table of the kernels: launches, predicted µs, and what bounds each."""
        self.settle()
        return table(self.gpu, list(self._uses.values()))


def _note(use: Use, prediction: Prediction | Unpredicted, sampled: bool) -> None:
    """Count a launch that was executed."""
    use.executed += 1
    use.sampled += sampled
    if not isinstance(prediction, Unpredicted):
        use.times_us.append(prediction.time_us)
        use.bounds[prediction.bound] += prediction.time_us


def _counted(loaded: LoadedKernel, launch: Launch) -> Mapping[str, float]:
    """Return the counts of the block in the middle of the grid; empty if it cannot be run alone."""
    grid = grid_of(launch)
    try:
        return count_block(loaded.program, launch, grid.block(grid.clusters // 2), ESTIMATED_FROM)
    except KernelFailure:
        return {}


def seconds_to_execute(prediction: Prediction | Unpredicted, geometry: Geometry) -> float:
    """Return an estimate of how long the executor takes in seconds; 0 if nothing was counted."""
    counts = prediction.counts
    if not counts:
        return 0.0
    products = 256 * counts["tensor_clock_columns"] + 16 * 8 * 16 * (counts["hmma"] + counts["hmma_fp16"])
    of_block = counts["instructions"] / INSTRUCTIONS_PER_SECOND + products / PRODUCTS_PER_SECOND
    return of_block * math.prod(geometry.grid)


def limit_of(prediction: Prediction | Unpredicted) -> int:
    """Return the number of warp instructions after which a block hangs."""
    if isinstance(prediction, Unpredicted):
        return core.LIMIT
    return int(min(max(SPINS * prediction.counts["instructions"], LEAST_LIMIT), core.LIMIT))


def explained(error: Exception, loaded: LoadedKernel) -> str:
    """Return the failure with the kernel's name and the lines of its source."""
    message, entry = str(error), loaded.kernel.entry
    if names_an_instruction(message):
        message = with_source_lines(message, line_table(loaded.cubin, entry), loaded.source_file)
    return message if entry in message else f"kernel {entry}: {message}"


def _warn(message: str) -> None:
    """Warn at the program's line that launched, outside Triton and this package."""
    frame = sys._getframe(1)  # noqa: SLF001 # `warnings` itself takes the frame by it
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "evoengine",
        "triton",
        "contextlib",
    ):
        frame = frame.f_back
    warnings.warn_explicit(message, RaceWarning, frame.f_code.co_filename, frame.f_lineno)


def run_watched(
    loaded: LoadedKernel,
    launch: Launch,
    blocks: Sequence[int] = (),
    seconds: float = 0.0,
    races: Races = Races.NO_REPLICAS,
    limit: int = core.LIMIT,
) -> None:
    """Execute, on all cores if blocks cannot communicate, and print the kernel's output.

    After a race the memory is restored. Raises as `core.run` does.
    """
    before = [(a.held, a.held.copy()) for a in launch.allocations if a.writable] if races else []
    try:
        try:
            _watched(loaded, launch, blocks, seconds, races, limit, CORES)
        except core.RacedInParallel as race:
            _restore(before)
            _watched(loaded, launch, blocks, seconds, races, limit, 1)  # names the first race of all, or finds none
            if names_an_instruction(str(race)):
                raise
    except KernelRaced:
        _restore(before)
        raise


def _restore(before: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for held, contents in before:
        held[:] = contents


def _watched(
    loaded: LoadedKernel, launch: Launch, blocks: Sequence[int], seconds: float, races: Races, limit: int, threads: int
) -> None:
    """Execute in another thread, so that Ctrl-C works, and report progress every ten seconds."""
    failures: list[BaseException] = []
    printed: list[str] = []

    def work() -> None:
        try:
            core.run(loaded.program, launch, blocks, limit=limit, races=races, threads=threads)
            printed.append(core.printed())
        except (KernelFailure, EvoengineError) as error:
            failures.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(PATIENCE)
    passed, total = 0.0, len(blocks) or math.prod(launch.grid)
    while worker.is_alive():
        passed += PATIENCE
        about = f" of about {seconds:.0f}" if seconds > passed else ""
        done = min(core.blocks_ended(launch), total)
        print(
            f"evoengine: executing kernel {loaded.kernel.entry}: {passed:.0f} s{about}, {done} of {total} blocks",
            file=sys.stderr,
            flush=True,
        )
        worker.join(PATIENCE)
    if failures:
        raise failures[0]
    if printed and printed[0]:
        print(printed[0], end="", flush=True)


HEADINGS = ("kernel", "launches", "µs each", "µs in all", "bound by", "options")
_LEFT = (0, 4, 5)


def table(gpu: Gpu, uses: Sequence[Use]) -> str:
    """Return a line for each executed kernel, then for those that failed, were sampled or have no time."""
    executed = [_cells(use) for use in uses if use.executed]
    if not uses:
        return f"virtual {gpu.key}: no Triton kernel was launched"
    rows = [HEADINGS, *executed] if executed else []
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(HEADINGS))]
    lines = [
        "  ".join(c.ljust(w) if i in _LEFT else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    head = f"virtual {gpu.key}: predicted times of the kernels that were executed (model version {MODEL_VERSION})"
    return "\n".join(line.rstrip() for line in (head, *lines, *_remarks(uses)))


def _cells(use: Use) -> tuple[str, ...]:
    times = use.times_us
    if not times:
        return plain(use.name), str(use.executed), "?", "?", "?", plain(use.options)
    low, high = number(min(times)), number(max(times))
    each = low if low == high else f"{low} to {high}"
    bound = max(use.bounds, key=use.bounds.__getitem__)
    return plain(use.name), str(use.executed), each, number(sum(times)), bound, plain(use.options)


def _remarks(uses: Sequence[Use]) -> list[str]:
    timed = sum(use.only_predicted for use in uses)
    found = (
        [f"{timed} launches of benchmarks, of autotuners, or without an effect were predicted and not executed"]
        if timed
        else []
    )
    for use in uses:
        found += [f"{use.name} ({use.options}): failed: {failure}" for failure in use.failures]
        found += [f"{use.name} ({use.options}): race: {race}" for race in dict.fromkeys(use.races)]
        if use.sampled:
            found.append(f"{use.name}: {use.sampled} launches were sampled: most of their blocks were not executed")
        if use.unpredictable:
            found.append(f"{use.name} ({use.options}): no time is predicted: {use.unpredictable}")
    return [plain(line) for line in found]


OWN_REFERENCES = 2
"""number of references to a storage by a waiting launch: its handle, and the tensor below its memory"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A deferred launch."""

    written: Sequence[torch.UntypedStorage]
    execute: Callable[[], object]
    drop: Callable[[], object]

    @property
    def is_of_use(self) -> bool:
        """Return whether the program still has a tensor in the launch's outputs."""
        return any(references(storage) > OWN_REFERENCES for storage in self.written)


class Repeats:
    """Record the outputs of launches by launch, and the waiting launch."""

    def __init__(self) -> None:
        self._written: dict[object, frozenset[str]] = {}
        self._waiting: Waiting | None = None

    def note(self, key: object, written: frozenset[str]) -> None:
        """Record the names of the storages that a launch has written."""
        self._written[key] = written

    def put_off(
        self,
        key: object,
        fresh: Mapping[str, torch.UntypedStorage],
        execute: Callable[[], None],
        drop: Callable[[], None],
    ) -> bool:
        """Defer a launch, and return whether it may wait: an equal one was executed, and wrote only to new memory."""
        names = self._written.get(key)
        if not names or not names <= fresh.keys():
            return False
        self.wait(Waiting([fresh[name] for name in names], execute, drop))
        return True

    def wait(self, waiting: Waiting) -> None:
        """Defer a function that writes to storages of PyTorch."""
        self.settle()
        self._waiting = waiting

    def settle(self) -> None:
        """Execute the waiting launch, or drop it if nothing can read its outputs."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            (waiting.execute if waiting.is_of_use else waiting.drop)()


def references(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and handles that share a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001 # there is no public one
