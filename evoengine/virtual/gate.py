"""Gate a Triton kernel: the user's own function launches it, and each launch is repeated with other values.

    the function, with its own sizes and odd ones ──▶ a launch ──▶ the tensors as given, then drawn again ──▶ compared

The function runs once for each configuration and sizes. Within its launch of the kernel the kernel's inputs are drawn
again, in place, and what it writes is compared with the reference in float64. At the end the tensors are as the first
attempt left them, so that the function goes on as if nothing had happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from evoengine.devices.base import KernelFailure
from evoengine.errors import UsageError
from evoengine.gpu import Gpu
from evoengine.records import Outcome
from evoengine.sass.launch import Geometry, Memory, prepare
from evoengine.sass.predict import Prediction
from evoengine.stages.verify import Bound, by_own_error
from evoengine.virtual.arguments import Arguments
from evoengine.virtual.device import (
    LoadedKernel,
    Unpredicted,
    VirtualGpu,
    VirtualGpuError,
    explained,
    limit_of,
    run_watched,
    seconds_to_execute,
)
from evoengine.workloads.base import Tolerance
from evoengine.workloads.folder_reference import all_in_float64
from evoengine.workloads.folder_tensors import LARGE, SHAPED

if TYPE_CHECKING:
    from evoengine.virtual.triton_file import Program

AS_GIVEN, NORMAL, BIG = "as given", "normal", "large"
DRAWS = (NORMAL, BIG, *SHAPED)
FP32 = float(torch.finfo(torch.float32).eps)
ROUNDED = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-11, torch.float8_e5m2: 2.0**-11}
"""relative error allowed for products on tensor cores: they cut off sums, those of FP8 to 13 bits, and a kernel rounds
operands, such as the weights of attention, to the type of its inputs"""
TF32 = 2.0**-11
MOST_DRAWN = 1 << 24
"""limit of the elements of floating-point tensors that a search's gate draws: each draw takes seconds in float64"""
OFTEN_DRAWN = 1 << 22
"""limit of the elements for which a search's gate makes every draw; for more, only the first"""
LONG_SECONDS = 2.0
"""estimated seconds of an attempt above which only the first draw is made"""

Outputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of a launch, with one draw of values."""

    sizes: str
    draw: str
    reason: str | None = None
    """the reason if it is wrong"""
    outcome: Outcome | None = None
    """the outcome if it is wrong"""
    bound: Bound | None = None
    """the error closest to its limit; None without a reference"""
    difference: float | None = None
    """the largest difference from the first configuration's outputs; None for that one itself"""

    @property
    def share(self) -> float | None:
        """Return the largest error over the allowed one; None without a reference."""
        return None if self.bound is None else share_of(self.bound)


@dataclass(slots=True)
class ConfigVerdict:
    """The gate's verdict on one configuration."""

    config: str
    attempts: list[Attempt] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """sizes → why the function or Triton refused them"""
    inexact: list[str] = field(default_factory=list)
    """sizes for which Triton's exact algebra gives other results than for the first configuration, or the reference"""
    with_reference: bool = False
    """whether exact results are compared with the reference, because it launches Triton kernels"""
    unbuilt: dict[str, str] = field(default_factory=dict)
    """sizes → why the build in exact algebra could not be executed"""
    prediction: Prediction | Unpredicted | None = None
    """prediction of the first launch with the function's own sizes, or why there is none"""

    @property
    def wrong(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.reason), None)

    @property
    def outcome(self) -> str:
        """Return correct, wrong, or refused if no attempt was possible."""
        return "wrong" if self.wrong else "correct" if self.attempts else "refused"

    @property
    def worst_share(self) -> float | None:
        """Return the largest error over the allowed one; None if nothing was compared."""
        return max((a.share for a in self.attempts if a.share is not None), default=None)

    @property
    def largest_difference(self) -> float | None:
        """Return the largest difference from the first configuration's outputs; None for that one itself."""
        return max((a.difference for a in self.attempts if a.difference is not None), default=None)


class Wrong(Exception):
    """An attempt whose results are wrong; the message states why."""

    def __init__(self, message: str, outcome: Outcome = Outcome.INCORRECT) -> None:
        super().__init__(message)
        self.outcome = outcome


class TooLarge(BaseException):
    """An attempt would exceed its time or memory. A BaseException, which no user's handler for Exception stops."""


class GatingGpu(VirtualGpu):
    """A virtual GPU that repeats the launches of one kernel with other values and judges each."""

    def __init__(self, gpu: Gpu, program: Program, seed: int) -> None:
        super().__init__(gpu)
        self._function = program.kernel.function
        self._reference, self._names, self._seed = program.reference, program.names, seed
        self._first: dict[object, Outputs] = {}
        self._with_reference = False
        self.exact = False
        """whether launches are of Triton's build in exact algebra: executed as given, and compared bit by bit"""
        self.longest = math.inf
        """estimated seconds of an attempt above which TooLarge is raised before it"""
        self.most = math.inf
        """number of elements of floating-point tensors above which it is raised too"""
        self.verdict = ConfigVerdict("")
        self.products: frozenset[str] = frozenset()
        """opcodes of tensor cores in the kernel"""
        self.sizes = ""
        self.launches = 0
        """number of launches of the kernel in this call of the function"""
        self._computed: set[int] = set()
        """addresses of storages that launches of this call have written"""

    def begin(self, sizes: str) -> None:
        """Begin a call of the function, with these sizes."""
        self.sizes, self.launches = sizes, 0
        self._computed.clear()

    def launch(self, loaded: LoadedKernel, geometry: Geometry, arguments: Arguments, options: str = "") -> None:
        if loaded.function is not self._function:
            before = _contents(arguments)
            super().launch(loaded, geometry, arguments, options)
            self._note_computed(arguments, before)
            return
        if self.exact:
            self._compare_bits(loaded, geometry, arguments)
            return
        self.products = loaded.program.products
        drawn = sum(t.numel() for t in _tensors(arguments).values() if t.is_floating_point())
        if drawn > self.most:
            raise TooLarge(f"draw {drawn:,} numbers")
        before = _contents(arguments)
        try:
            prediction = self.predicted(loaded, geometry, arguments)
        except VirtualGpuError as hazard:
            self._refute(AS_GIVEN, Wrong(explained(hazard, loaded), Outcome.CRASHED))
        if self.verdict.prediction is None:
            self.verdict.prediction = prediction
        seconds = seconds_to_execute(prediction, geometry)
        if seconds > self.longest:
            raise TooLarge(f"take about {seconds:.0f} s")
        self._attempt(AS_GIVEN, loaded, geometry, arguments)
        after = _contents(arguments)
        often = seconds < LONG_SECONDS and (self.most == math.inf or drawn <= OFTEN_DRAWN)
        for draw in DRAWS if often else DRAWS[:1]:
            _restore(arguments, before)
            if self._redraw(draw, arguments):
                self._attempt(draw, loaded, geometry, arguments)
        _restore(arguments, after)
        self._note_computed(arguments, before)
        self.launches += 1

    def _note_computed(self, arguments: Arguments, before: Sequence[np.ndarray]) -> None:
        """Record the storages whose contents a launch has changed."""
        for storage, data in zip(arguments.mapped, before, strict=True):
            if not np.array_equal(storage.data, data):
                self._computed.add(storage.data.ctypes.data)

    def _attempt(self, draw: str, loaded: LoadedKernel, geometry: Geometry, arguments: Arguments) -> None:
        """Execute once and judge.

        Raises VirtualGpuError if the result is wrong, which ends the function's call, and UsageError if the reference
        cannot decide.
        """
        given = {name: _copied(value) for name, value in arguments.given.items()}
        try:
            outputs, stored = self._outputs(loaded, geometry, arguments)
            bound, difference = self._judge(draw, given, outputs, stored)
        except Wrong as wrong:
            self._refute(draw, wrong)
        self.verdict.attempts.append(Attempt(self.sizes, draw, bound=bound, difference=difference))

    def _refute(self, draw: str, wrong: Wrong) -> NoReturn:
        """Record the fault, and raise VirtualGpuError, which ends the function's call."""
        self.verdict.attempts.append(Attempt(self.sizes, draw, str(wrong), wrong.outcome))
        raise VirtualGpuError(str(wrong)) from None

    def _compare_bits(self, loaded: LoadedKernel, geometry: Geometry, arguments: Arguments) -> None:
        """Execute once, and record whether the results differ in any bit.

        They are compared with the reference's if it launches Triton kernels too, otherwise with those of the first
        configuration.
        """
        given = {name: _copied(value) for name, value in arguments.given.items()}
        outputs, _ = self._outputs(loaded, geometry, arguments)
        key = (self.sizes, self.launches, "exact")
        if key not in self._first:
            own = self._by_tritons_reference(given)
            self._first[key] = outputs if own is None else dict(zip(outputs, own, strict=False))
            self._with_reference |= own is not None
        first = self._first[key]
        self.verdict.with_reference |= self._with_reference
        same = first.keys() == outputs.keys() and all(_same_bits(first[name], outputs[name]) for name in outputs)
        if not same and self.sizes not in self.verdict.inexact:
            self.verdict.inexact.append(self.sizes)
        self.launches += 1

    def _by_tritons_reference(self, given: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """Return the reference's outputs; None if it launches no Triton kernel, so that its algebra is not exact."""
        if self._reference is None:
            return None
        before = self.now.launches
        found = self._expected(given)
        return found if self.now.launches > before else None

    def _outputs(
        self, loaded: LoadedKernel, geometry: Geometry, arguments: Arguments
    ) -> tuple[Outputs, Mapping[str, torch.Tensor]]:
        """Execute, and return the tensors that were written, and which of their elements. Raises Wrong."""
        try:
            stored = self._run(loaded, geometry, arguments)
        except (KernelFailure, UsageError) as failure:
            outcome = failure.outcome if isinstance(failure, KernelFailure) else Outcome.CRASHED
            raise Wrong(explained(failure, loaded), outcome) from None
        tensors = _tensors(arguments)
        found = {name: mask for name, tensor in tensors.items() if (mask := _mask(tensor, stored)).any()}
        return {name: tensors[name].detach().clone() for name in found}, found

    def _run(self, loaded: LoadedKernel, geometry: Geometry, arguments: Arguments) -> Mapping[int, np.ndarray]:
        """Execute in place, and return what was stored: a storage's address → [bytes] bool."""
        everything = [*arguments.parameters, *arguments.mapped]
        memory = Memory([(loaded.kernel, everything)], self._seed + len(self.verdict.attempts))
        watched = memory.watch([storage.name for storage in arguments.mapped])
        seed = self._seed + len(self.verdict.attempts)
        launch = prepare(loaded.kernel, geometry, arguments.parameters, seed, memory=memory, mapped=arguments.mapped)
        run_watched(loaded, launch, limit=limit_of(self.predicted(loaded, geometry, arguments)))
        return {
            storage.data.ctypes.data: np.unpackbits(watched[storage.name][:, None], axis=1, count=4, bitorder="little")
            .reshape(-1)[: storage.bytes]
            .astype(bool)
            for storage in arguments.mapped
        }

    def require_reference(self, arguments: Arguments) -> None:
        """Call the reference with the arguments of a launch. Raises UsageError if it raises."""
        if self._reference is not None:
            self._expected(arguments.given)

    def seed_of(self, case: int) -> int:
        """Return the seed of a case, the same for every configuration."""
        return self._seed + 1000 * case

    # ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _redraw(self, draw: str, arguments: Arguments) -> bool:
        """Draw the values of the inputs again, and return whether the reference is finite for them.

        Inputs are floating-point tensors whose elements are not all equal: others are counters or parameters of the
        function. Tensors without negative values keep this property, and values keep their magnitude. If an earlier
        launch has computed one of the tensors, nothing is drawn, because they would not be consistent; a tensor of
        zeros counts as an output.
        """
        if any(storage.data.ctypes.data in self._computed and storage.data.any() for storage in arguments.mapped):
            return False
        inputs = {n: t.detach() for n, t in _tensors(arguments).items() if t.is_floating_point() and _varies(t)}
        given = {name: tensor.clone() for name, tensor in inputs.items()}
        for factor in LARGE if draw == BIG else (1.0,):
            generator = torch.Generator().manual_seed(self._seed + self.launches)
            for name, tensor in inputs.items():
                tensor.copy_(_values(draw, given[name], generator) * factor)
            if inputs and self._is_finite(arguments.given):
                return True
        return False

    def _is_finite(self, given: Mapping[str, Any]) -> bool:
        if self._reference is None:
            return True
        try:
            own = self._expected(given)
        except UsageError:
            return False
        return all(bool(output.isfinite().all()) for output in own)

    # ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _judge(
        self, draw: str, given: Mapping[str, Any], outputs: Outputs, stored: Mapping[str, torch.Tensor]
    ) -> tuple[Bound | None, float | None]:
        """Return the largest error, and the difference from the first configuration. Raises Wrong."""
        if not outputs:
            raise Wrong("it writes to none of its tensors")
        bound = None if self._reference is None else self._compared(given, outputs)
        key = (self.sizes, self.launches, draw)
        first = self._first.setdefault(key, outputs)
        if self._reference is None:
            for name, output in outputs.items():
                if output.is_floating_point() and output[stored[name]].float().isnan().any():
                    raise Wrong(f"{int(output[stored[name]].float().isnan().sum())} elements of {name} are NaN")
        return bound, None if first is outputs else _difference(first, outputs)

    def _compared(self, given: Mapping[str, Any], outputs: Outputs) -> Bound:
        exact, own = self._expected_exactly(given), self._expected(given)
        nudged = self._expected_exactly(given, torch.Generator().manual_seed(self._seed))
        if len(exact) != len(outputs):
            said = f"the reference returns {len(exact)} tensors; the kernel writes {len(outputs)}: {', '.join(outputs)}"
            if len(exact) > len(outputs) or self._first:
                raise Wrong(said)
            raise UsageError(said)  # it may have scratch memory; only the reference tells
        bounds = []
        for (name, output), right, *rough in zip(outputs.items(), exact, own, nudged, strict=True):
            if output.shape != right.shape:
                raise UsageError(f"the reference returns {name} in the shape {_shape(right)}; it is {_shape(output)}")
            bounds.append(_worst(name if len(outputs) > 1 else "", output, right, rough))
        return max(bounds, key=share_of)

    def _expected_exactly(
        self, given: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> list[torch.Tensor]:
        """Return the reference's outputs in float64; with a generator, for inputs with random rounding errors."""
        with all_in_float64():
            found = self._expected({name: self._widened(given[name], generator) for name in self._names})
        return [output.double() for output in found]

    def _widened(self, value: Any, generator: torch.Generator | None) -> Any:
        """Return a floating-point tensor in float64, with rounding errors given a generator; other values unchanged."""
        if isinstance(value, list):
            return [self._widened(each, generator) for each in value]
        value = getattr(value, "base", value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        wide = value.detach().double()
        return (
            wide
            if generator is None
            else wide * (1 + self._rounding(value) * torch.randn(wide.shape, generator=generator))
        )

    def _rounding(self, tensor: torch.Tensor) -> float:
        """Return the relative error that a number of a tensor may have in a correct computation."""
        if tensor.dtype == torch.float32 and any("TF32" in opcode for opcode in self.products):
            return TF32
        return ROUNDED.get(tensor.dtype, FP32) if self.products else FP32

    def _expected(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the reference's outputs. Raises UsageError if it raises."""
        assert self._reference is not None  # callers have a reference
        try:
            with torch.no_grad():
                found = self._reference(*(_copied(given[name]) for name in self._names))
        except Exception as error:
            raise UsageError(f"the reference raises {type(error).__name__}: {error}") from None
        values = list(found.values()) if isinstance(found, Mapping) else found
        return list(values) if isinstance(values, tuple | list) else [values]


def _tensors(arguments: Arguments) -> dict[str, torch.Tensor]:
    """Return the launch's tensors by parameter name; for a descriptor its tensor, for a table each tensor."""
    found = []
    for name, value in arguments.given.items():
        each = {f"{name}[{n}]": one for n, one in enumerate(value)} if isinstance(value, list) else {name: value}
        found += [(key, getattr(one, "base", one)) for key, one in each.items()]
    return {name: value for name, value in found if isinstance(value, torch.Tensor) and value.numel()}


def _contents(arguments: Arguments) -> list[np.ndarray]:
    return [storage.data.copy() for storage in arguments.mapped]


def _restore(arguments: Arguments, contents: Sequence[np.ndarray]) -> None:
    for storage, data in zip(arguments.mapped, contents, strict=True):
        storage.data[:] = data


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, a descriptor's tensor or those of a table; other values unchanged."""
    if isinstance(value, list):
        return [_copied(each) for each in value]
    value = getattr(value, "base", value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _mask(tensor: torch.Tensor, stored: Mapping[int, np.ndarray]) -> torch.Tensor:
    """Return which elements of a tensor were stored to, as bool in its shape."""
    of_bytes = stored[tensor.untyped_storage().data_ptr()]
    size = tensor.element_size()
    of_elements = torch.from_numpy(of_bytes[: len(of_bytes) // size * size].reshape(-1, size).all(1))
    return of_elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _varies(tensor: torch.Tensor) -> bool:
    """Return whether the elements are numbers, not all equal, each at an address of its own."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return False
    plain = tensor if tensor.element_size() > 1 else tensor.float()
    return bool(plain.isfinite().all()) and bool((plain != plain.reshape(-1)[0]).any())


def _values(draw: str, given: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return float32 values in the shape of a tensor, of its magnitude, and never negative if it never is."""
    plain = given.float()
    positive = bool((plain >= 0).all())
    values = torch.randn(given.shape, generator=generator) * plain.square().mean().sqrt()
    if draw in SHAPED:
        values = SHAPED[draw](values, generator)
    return values.abs() if positive else values


def share_of(bound: Bound) -> float:
    """Return an error over its allowed value; 0 if nothing is allowed, in which case there is no error."""
    return bound.error / bound.allowed if bound.allowed else 0.0


def _worst(of: str, output: torch.Tensor, exact: torch.Tensor, rough: Sequence[torch.Tensor]) -> Bound:
    """Return the error closest to its limit. Raises Wrong if one exceeds it.

    `rough` are other computations of the outputs; the largest of their errors counts as that of the kernel's own
    dtypes, because for a sum that nearly cancels a single one may be exact by chance.
    """
    named = f" of {of}" if of else ""
    missing = int((output.float().isnan() & ~exact.isnan()).sum()) if output.is_floating_point() else 0
    if missing:
        raise Wrong(f"{missing} of {output.numel()} outputs{named} are NaN or were never written")
    error = torch.where(output.double() == exact, 0.0, output.double() - exact)  # infinities too
    # a kernel that stores a sum of FP16 products in FP32 rounds as its reference does, which returns FP16
    eps = max((torch.finfo(t.dtype).eps for t in (output, *rough) if t.is_floating_point()), default=0.0)
    eps = eps if output.is_floating_point() else 0.0
    own = torch.stack([each.double() - exact for each in rough]).abs().amax(0)
    if output.is_floating_point():  # a reference in wider types has finite values where the kernel has infinities
        above = (exact.abs() > torch.finfo(output.dtype).max) & (output.double() == exact.sign() * torch.inf)
        error, exact, own = (t.masked_fill(above, 0) for t in (error, exact, own))
    found = by_own_error(named, error, exact, own, eps, Tolerance())
    for bound in found:
        if not bound.error <= bound.allowed:
            raise Wrong(f"{bound.name} {bound.error:.2e} where {bound.allowed:.2e} is allowed")
    return max(found, key=share_of)


def _difference(first: Outputs, outputs: Outputs) -> float:
    both = ((first[name].double(), output.double()) for name, output in outputs.items() if name in first)
    return max((float(torch.where(a == b, 0.0, a - b).abs().max()) for a, b in both), default=0.0)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "()"
