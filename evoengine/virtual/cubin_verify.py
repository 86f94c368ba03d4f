"""evoengine verify --cubin: execute, judge and predict a kernel of a binary with the launches of launch.json."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evoengine.devices.base import KernelFailure
from evoengine.errors import UsageError, did_you_mean
from evoengine.gpu import Gpu
from evoengine.records import Profile
from evoengine.sass.cubin import Kernel
from evoengine.sass.launch import Memory, prepare
from evoengine.sass.listing import disassemble
from evoengine.sass.predict import MODEL_VERSION, Prediction
from evoengine.stages.profile import REMARKS, figures_of
from evoengine.stages.verify import by_own_error
from evoengine.virtual.cubin_file import find
from evoengine.virtual.device import (
    LoadedKernel,
    Unpredicted,
    VirtualGpu,
    VirtualGpuError,
    explained,
    run_watched,
    seconds_to_execute,
    virtual_gpu,
)
from evoengine.virtual.launch_file import LaunchFile, Step, read_launch
from evoengine.workloads.base import Tolerance
from evoengine.workloads.folder_reference import all_in_float64
from evoengine.workloads.folder_tensors import LARGE, SHAPED

AS_GIVEN, BIG = "as given", "large"
DRAWS = (BIG, *SHAPED)
LONG_SECONDS = 2.0
"""estimated seconds of the launches above which they are executed only as given"""

Reference = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class LaunchVerdict:
    """One launch: its kernel and its prediction, or why there is none."""

    kernel: Kernel
    prediction: Prediction | Unpredicted
    figures: Mapping[str, float]
    sampled: int
    """number of executed blocks if not all were executed, otherwise 0"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of all launches with one draw of values."""

    draw: str
    reason: str | None = None
    """the reason if it is wrong"""
    share: float | None = None
    """the largest error over the allowed one; None if nothing was compared"""


@dataclass(slots=True)
class CubinVerdict:
    """The verdict on all launches."""

    launches: list[LaunchVerdict] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)
    """tensor → number of elements that the launches stored to, as given"""

    @property
    def wrong(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.reason), None)

    @property
    def worst_share(self) -> float | None:
        return max((a.share for a in self.attempts if a.share is not None), default=None)


class Wrong(Exception):
    """An attempt whose results are wrong; the message states why."""


def verify(
    file: Path, entry: str, launch: Path, reference: str | None, gpu: str, seed: int, sample: bool = False
) -> CubinVerdict:
    """Execute the launches of `launch`, judge what they write, and predict them.

    `reference`, FILE.py::FUNCTION, takes tensors by name and returns what is written; with it the launches are repeated
    with other values. Raises UsageError if a file is invalid, if a kernel is missing or made for another GPU, or if a
    launch does not fit.
    """
    plan = read_launch(launch, seed)
    truth = function_in(reference, "--reference") if reference else None
    names = names_of(truth, (*plan.tensors, *plan.scalars), str(launch)) if truth else ()
    device = virtual_gpu(gpu, sample)
    cubins = [find(file, step.entry or entry, device.gpu) for step in plan.steps]
    loaded = [device.load(c, step.entry or entry) for c, step in zip(cubins, plan.steps, strict=True)]
    return _Judge(device, plan, loaded, truth, names, seed, len(set(cubins)) == 1).judged()


class _Judge:
    """The launches of a file on a virtual GPU."""

    def __init__(
        self, device: VirtualGpu, plan: LaunchFile, loaded: Sequence[LoadedKernel], reference: Reference | None,
        names: Sequence[str], seed: int, one_module: bool,
    ) -> None:  # fmt: skip
        self._device, self._plan, self._reference, self._names = device, plan, reference, names
        self._seed, self._one_module = seed, one_module
        self._steps = list(zip(plan.steps, loaded, strict=True))
        self._blocks: list[Sequence[int]] = []
        """blocks to execute, for each launch; none for all"""
        self._seconds: list[float] = []

    def judged(self) -> CubinVerdict:
        """Execute and judge the launches as given, then, with a reference, with each draw until one is wrong."""
        verdict = CubinVerdict(launches=[self._predicted(step, kernel) for step, kernel in self._steps])
        given = {name: tensor.clone() for name, tensor in self._plan.tensors.items()}
        self._attempt(AS_GIVEN, verdict)
        if self._reference is None or sum(self._seconds) > LONG_SECONDS:
            return verdict
        for draw in DRAWS:
            if verdict.wrong:
                break
            for name, tensor in given.items():
                self._plan.tensors[name].copy_(tensor)
            if self._redraw(draw):
                self._attempt(draw, verdict)
        return verdict

    def _predicted(self, step: Step, loaded: LoadedKernel) -> LaunchVerdict:
        _require_fits(self._device.gpu, step, loaded.kernel)
        prediction = self._device.predicted(loaded, step.geometry, self._plan.arguments(step))
        seconds = seconds_to_execute(prediction, step.geometry)
        try:
            blocks = self._device.sampled(loaded, step.geometry, seconds)
        except VirtualGpuError as error:
            raise UsageError(str(error)) from None
        self._blocks.append(blocks)
        self._seconds.append(0.0 if blocks else seconds)
        listing = disassemble(loaded.cubin, loaded.kernel.entry)
        figures = figures_of(prediction, listing, loaded.kernel.entry) if isinstance(prediction, Prediction) else {}
        return LaunchVerdict(loaded.kernel, prediction, figures, len(blocks))

    # ── one attempt ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _attempt(self, draw: str, verdict: CubinVerdict) -> None:
        before = {name: tensor.clone() for name, tensor in self._plan.tensors.items()}
        try:
            stored = self._run()
            if draw == AS_GIVEN:
                verdict.written = {name: int(mask.sum()) for name, mask in stored.items()}
            share = self._compared(draw, before, stored)
        except Wrong as wrong:
            verdict.attempts.append(Attempt(draw, str(wrong)))
        else:
            verdict.attempts.append(Attempt(draw, None, share))

    def _run(self) -> Mapping[str, torch.Tensor]:
        """Execute the launches in order; return tensor → the elements that were stored to. Raises Wrong."""
        found = [self._plan.arguments(step) for step, _ in self._steps]
        everything = [
            (loaded.kernel, [*arguments.parameters, *arguments.mapped])
            for (_, loaded), arguments in zip(self._steps, found, strict=True)
        ]
        memory = Memory(everything if self._one_module else everything[:1], self._seed)
        stored: dict[str, torch.Tensor] = {}
        for n, ((step, loaded), arguments) in enumerate(zip(self._steps, found, strict=True)):
            memory = memory if self._one_module else Memory(everything[n : n + 1], self._seed)
            watched = memory.watch([storage.name for storage in arguments.mapped])
            try:
                launch = prepare(
                    loaded.kernel, step.geometry, arguments.parameters, self._seed + n, memory=memory,
                    mapped=arguments.mapped,
                )  # fmt: skip
                run_watched(loaded, launch, self._blocks[n], self._seconds[n])
            except KernelFailure as failure:
                raise Wrong(explained(failure, loaded)) from None
            for name, mask in self._masks(watched).items():
                stored[name] = stored[name] | mask if name in stored else mask
        return {name: stored[name] for name in self._plan.tensors if name in stored}

    def _masks(self, watched: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Return the tensors that were stored to, and which of their elements."""
        found = {}
        for name, words in watched.items():
            if not words.any():
                continue
            tensor = self._plan.tensors[name]
            of_bytes = np.unpackbits(words[:, None], axis=1, count=4, bitorder="little").reshape(-1)[: tensor.nbytes]
            found[name] = (
                torch.from_numpy(of_bytes.astype(bool)).reshape(-1, tensor.element_size()).all(1).reshape(tensor.shape)
            )
        return found

    # ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _compared(
        self, draw: str, given: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]
    ) -> float | None:
        """Return the largest error over the allowed one; None without a reference and expected values. Raises Wrong."""
        if not stored:
            raise Wrong("the launches write to none of the tensors")
        partly = any(self._blocks)
        shares = []
        if self._reference is not None:
            shares += self._shares(given, stored, partly)
        for name, right in self._plan.expected.items() if draw == AS_GIVEN else ():
            if name not in stored:
                raise Wrong(f"the launches write nothing to {name}, which has expected values")
            exact = right.double()
            # the expected values are rounded to the dtype, which is unavoidable
            rough = exact.to(self._plan.tensors[name].dtype).double()
            shares.append(self._share(name, exact, [rough, right.to(torch.float32)], stored[name] if partly else None))
        if not shares:
            for name, mask in stored.items():
                tensor = self._plan.tensors[name]
                if tensor.is_floating_point() and (missing := int(tensor[mask].isnan().sum())):
                    raise Wrong(f"{missing} elements of {name} are NaN")
        return max(shares, default=None)

    def _shares(
        self, given: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], partly: bool
    ) -> list[float]:
        exact, own = self._expected(given, True), self._expected(given)
        if len(exact) != len(stored):
            raise UsageError(
                f"the reference returns {len(exact)} tensors; the launches write {len(stored)}: {', '.join(stored)}"
            )
        shares = []
        for (name, mask), right, rough in zip(stored.items(), exact, own, strict=True):
            if right.shape != mask.shape:
                raise UsageError(
                    f"the reference returns {name} in the shape {tuple(right.shape)}; it is {tuple(mask.shape)}"
                )
            shares.append(self._share(name, right.double(), [rough.double()], mask if partly else None))
        return shares

    def _share(self, name: str, exact: torch.Tensor, rough: Sequence[torch.Tensor], mask: torch.Tensor | None) -> float:
        """Return an output's largest error over the allowed one, only for the elements in the mask if there is one.

        Raises Wrong if it is larger than allowed.
        """
        output = self._plan.tensors[name]
        values, own = output.double(), torch.stack([each.double() - exact for each in rough]).abs().amax(0)
        if mask is not None:
            values, own = torch.where(mask, values, exact), torch.where(mask, own, 0.0)
        missing = int((values.isnan() & ~exact.isnan()).sum())
        if missing:
            raise Wrong(f"{missing} of {values.numel()} elements of {name} are NaN or were never written")
        error = torch.where(values == exact, 0.0, values - exact)  # infinities too
        eps = torch.finfo(output.dtype).eps if output.dtype.is_floating_point else 0.0
        bounds = by_own_error(f" of {name}", error, exact, own, eps, Tolerance())
        for bound in bounds:
            if not bound.error <= bound.allowed:
                raise Wrong(f"{bound.name} {bound.error:.2e} where {bound.allowed:.2e} is allowed")
        return max((bound.error / bound.allowed for bound in bounds if bound.allowed), default=0.0)

    def _expected(self, given: Mapping[str, torch.Tensor], exactly: bool = False) -> list[torch.Tensor]:
        """Return the reference's outputs, in float64 with `exactly`. Raises UsageError if the reference raises."""
        assert self._reference is not None  # callers have a reference
        values = {**self._plan.scalars, **{name: tensor.clone() for name, tensor in given.items()}}
        if exactly:
            values |= {
                n: t.double() for n, t in values.items() if isinstance(t, torch.Tensor) and t.is_floating_point()
            }
        try:
            with torch.no_grad():
                if exactly:
                    with all_in_float64():
                        found = self._reference(*(values[name] for name in self._names))
                else:
                    found = self._reference(*(values[name] for name in self._names))
        except Exception as error:
            raise UsageError(f"the reference raises {type(error).__name__}: {error}") from None
        return list(found) if isinstance(found, tuple | list) else [found]

    # ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _redraw(self, draw: str) -> bool:
        """Draw the tensors of normal values again; return whether the reference is finite for them."""
        drawn = {name: self._plan.tensors[name].clone() for name in self._plan.normal}
        for factor in LARGE if draw == BIG else (1.0,):
            for name, tensor in drawn.items():
                generator = torch.Generator().manual_seed(self._seed)
                values = tensor.float() if draw == BIG else SHAPED[draw](tensor.float(), generator)
                self._plan.tensors[name].copy_(values * factor)
            if drawn and all(bool(t.double().isfinite().all()) for t in self._expected(self._plan.tensors)):
                return True
        return False


def _require_fits(gpu: Gpu, step: Step, kernel: Kernel) -> None:
    """Raise UsageError for a launch that the GPU's driver would refuse for any binary."""
    shared = kernel.shared_bytes + step.geometry.shared_bytes
    if shared > gpu.shared_per_block:
        raise UsageError(
            f"kernel {kernel.entry} takes {shared} bytes of shared memory per block; {gpu.key} has "
            f"{gpu.shared_per_block}"
        )


def profile_of(one: LaunchVerdict, gpu: str) -> Profile:
    """Return the model's profile of a launch."""
    return Profile("model", f"{gpu} (model version {MODEL_VERSION})", dict(one.figures), REMARKS)


def function_in(target: str, option: str) -> Callable[..., Any]:
    """Return the function that FILE.py::FUNCTION names, executing the file. Raises UsageError if there is none."""
    file, separator, name = target.partition("::")
    path = Path(file)
    if not separator or not name or not path.is_file():
        raise UsageError(f"{option} takes FILE.py::FUNCTION, and {target!r} is none")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{option}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{option}: {path} cannot be imported: {type(error).__name__}: {error}") from None
    found = getattr(module, name, None)
    if not callable(found):
        names = [own for own, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(f"{option}: {path} has no function {name!r}{did_you_mean(name, names)}")
    function: Callable[..., Any] = found
    return function


def names_of(function: Callable[..., Any], known: Collection[str], of: str) -> tuple[str, ...]:
    """Return the function's parameters. Raises UsageError for an unknown one."""
    names = tuple(inspect.signature(function).parameters)
    for name in names:
        if name not in known:
            raise UsageError(
                f"the reference has the parameter {name}, which {of} does not name: it names "
                f"{', '.join(known)}{did_you_mean(name, known)}"
            )
    return names
