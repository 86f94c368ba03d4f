"""The correctness gate: a candidate runs every case of its workload and is compared with float64 before it is timed.

The outer rule is FlashAttention's (its tests): the largest error may be twice that of the same computation in the
candidate's own dtype on the same inputs, plus one rounding of the largest output; a workload may state other factors or
plain tolerances (`Tolerance`). It holds for each row by itself too, so that a row of small outputs is not judged by the
largest of all. Where the errors of many rows are independent, sums over rows and over all of them are judged besides:
such sums scatter by 1 / √n only and show what each error alone leaves open.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from evoengine.devices.base import (
    Argument,
    Arguments,
    ConstantArgument,
    ConstantParameter,
    KernelCall,
    KernelFailure,
    Parameter,
    RunRounds,
    ScratchArgument,
    ScratchParameter,
    TensorArgument,
    TensorParameter,
    Tensors,
    VisitKind,
)
from evoengine.records import GATE_VERSION, CaseResult, Coverage, Launch, Outcome, Plan, Verdict
from evoengine.workloads.base import AnyCase, AnyWorkload, Drawn, Inputs, Outputs, Problem, Tolerance, taken
from evoengine.workloads.coverage import COUNTED, SUMMED_ROWS, Cell
from evoengine.workloads.tensors import TORCH_DTYPES

LEAST_ROW = 8
"""elements of what is judged as a row: shorter ones are joined, as all few elements of one may cancel in the reference
and leave nothing that a right kernel's roundings could be a share of"""
RMS_ALLOWED = 1.15
"""times what the roundings that a kernel must do give (`Tensors.rounded_once`): one bit less of one of them gives
1.5"""
ROW_BIAS_ALLOWED = 2.25
"""times the error of those roundings, which for 32 rows chance alone exceeds once in 100,000 cases; a row's sum rounded
to the dtype gives three times as much in most cases"""
BIAS_ALLOWED = 1 / 32
"""of the spacing of the dtype's numbers, at 1; factors cut off instead of rounded give a tenth and more"""
BIAS_SIGMAS = 4.0
"""one case in 16,000 is as far off by chance alone"""


class CannotJudge(Exception):
    """A judge cannot judge a candidate, whatever the candidate does. The message is a clause that states why."""


class CaseIdentity(Protocol):
    """The fields of a case, small or at full size, that its result states."""

    @property
    def name(self) -> str: ...

    @property
    def problem(self) -> Problem: ...

    @property
    def part(self) -> str | None: ...


def verify(workload: AnyWorkload, plan: Plan, run: RunRounds, device: str, seed: int) -> Verdict:
    """Run the plan's cases with seeds drawn from `seed` and return the verdict on all of them.

    A crash or a hang ends the plan, a wrong result does not. Some cases are launched twice (`cases_to_repeat`).
    """
    twice, log = cases_to_repeat(workload, plan), CoverageLog(workload)

    def judge(case: AnyCase, launch: Launch, own_seed: int) -> CaseResult:
        again = next((1 if n else 2 for n, one in enumerate(twice) if one is case), 0)
        return check(workload, case, launch, run, own_seed, again, log)

    return replace(run_plan(plan, seed, device, judge), coverage=log.result())


def run_plan(plan: Plan, seed: int, device: str, judge: Callable[[Any, Launch, int], CaseResult | None]) -> Verdict:
    """Return the verdict on a plan from `judge` of each case, its launch and a seed of its own.

    `judge` may raise KernelFailure, which ends the plan, and returns None where a case asks nothing.
    """
    start = time.perf_counter()
    results: list[CaseResult] = []
    outcome: Outcome | None = None
    for (case, launch), case_seed in zip(plan, case_seeds(seed, len(plan)), strict=True):
        try:
            result = judge(case, launch, case_seed)
            if result is not None:
                results.append(replace(result, part=result.part or case.part))
        except KernelFailure as failure:
            results.append(failed(case, case_seed, str(failure)))
            outcome = failure.outcome
            break
    wrong = next((r for r in results if not r.correct), None)
    if wrong and outcome is None:
        outcome = Outcome.INCORRECT
    reason = f"{wrong.name}: {wrong.reason}" if wrong else None
    wall_ms = (time.perf_counter() - start) * 1e3
    return Verdict(device, outcome, reason, tuple(results), wall_ms, gate_version=GATE_VERSION)


def case_seeds(seed: int, count: int) -> list[int]:
    """Return one seed per case, unlike for every candidate and case, and the same again from the same `seed`."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count, np.uint32)]


def cases_to_repeat(workload: AnyWorkload, plan: Plan) -> list[AnyCase]:
    """Return the cases that are launched twice, and first the one that is launched three times.

    These are all cases of a kernel with scratch memory: which blocks leave flags, counters and partial results there
    depends on the sizes. Of any other kernel it is the first one alone, by which an early return on a repeated launch
    and a cached result show: the short case of several blocks with the smallest tensors; where no case has several
    blocks, the smallest one. Tensors with dimensions of one element are left to the last.
    """
    keep = [case for case, _ in plan if any(isinstance(p, ScratchParameter) for p in _parameters(workload, case))]
    short = [(case, launch) for case, launch in plan if not case.long]
    several = [(case, launch) for case, launch in short if prod(launch.grid) > 1]
    first = sorted((case for case, _ in several or short), key=lambda case: _size(workload, case))[:1]
    return [*first, *(case for case in keep if case not in first)]


def _parameters(workload: AnyWorkload, case: AnyCase) -> tuple[Parameter, ...]:
    return workload.parameters(case.problem, case.config)


def _size(workload: AnyWorkload, case: AnyCase) -> tuple[int, int]:
    """Return how many dimensions of a case's tensors have a single element, and their bytes."""
    tensors = [p for p in _parameters(workload, case) if isinstance(p, TensorParameter)]
    return sum(p.shape.count(1) for p in tensors), sum(p.bytes for p in tensors)


def check(
    workload: AnyWorkload,
    case: AnyCase,
    launch: Launch,
    run: RunRounds,
    seed: int,
    again: int = 0,
    log: CoverageLog | None = None,
) -> CaseResult:
    """Draw a case, launch it and compare its outputs. Raises KernelFailure where there is no result.

    If it is launched `again`, a second launch gets new inputs and finds outputs and scratch memory as the first left
    them. If that is done twice and inputs can be changed in part, a third launch gets most elements as they were: a
    kernel that tells by some of them whether there is work to do is wrong.
    """
    seeds = [seed, *case_seeds(seed, 1)] if again else [seed]
    drawn = [workload.tensors().draw(case, own) for own in seeds]
    if again > 1:
        third = workload.tensors().changed_in_part(case, drawn[1].inputs, seed)
        drawn += [Drawn(third, third)] if third is not None else []
    parameters = workload.parameters(case.problem, case.config)
    arguments = [make_arguments(parameters, one.inputs) for one in drawn]
    done = run([make_round(workload, launch, given) for given in arguments], seed)
    if log is not None:
        log.add(case, launch, done.visits, drawn[0])
    if reason := unwritten_reason(parameters, done.unwritten) or _outside_reason(parameters, done.tensors[0]):
        return failed(case, seed, reason)
    results = []
    for one, given, after in zip(drawn, arguments, done.tensors, strict=True):
        changed = _changed_input(given, after)
        results.append(
            failed(case, seed, f"the kernel changed its input {changed}")
            if changed
            else compare(workload, case, one, read_outputs(parameters, after), seed)
        )
        if not results[-1].correct:
            break
    for n, result in enumerate(results[1:]):
        which = ("second", "third")[n]
        results[n + 1] = replace(result, reason=result.reason and f"in the {which} launch {result.reason}")
    return max(results, key=_badness)


def _changed_input(arguments: Arguments, after: Tensors) -> str | None:
    inputs = [a for a in arguments if isinstance(a, TensorArgument) and not a.output]
    # a tensor of a single element may have no dimension
    flat = ((after[a.name].reshape(-1).view(np.uint8), a.data.reshape(-1).view(np.uint8)) for a in inputs)
    same = (np.array_equal(found, given) for found, given in flat)
    return next((a.name for a, kept in zip(inputs, same, strict=True) if not kept), None)


def unwritten_reason(parameters: Sequence[Parameter], unwritten: Mapping[str, int]) -> str | None:
    """Return a sentence where stores do not cover the outputs, whatever is at the places that were left out.

    Of an output that is written in part only the elements of that part count; what an in-out tensor held before may
    stay.
    """
    outputs = [p for p in parameters if isinstance(p, TensorParameter) and p.output]
    for p in outputs:
        whole, part = prod(p.shape), prod(map(len, p.writes)) if p.writes else prod(p.shape)
        missing = unwritten.get(p.name, 0) - (whole - part)
        if missing > 0 and not p.inout:
            of = f" of {p.name}" if len(outputs) > 1 else ""
            return f"{missing} of {part} outputs{of} were never written"
    return None


def _outside_reason(parameters: Sequence[Parameter], after: Tensors) -> str | None:
    """Return a sentence where a kernel wrote an output outside of the part that it is said to write."""
    for p in parameters:
        if not isinstance(p, TensorParameter) or p.writes is None:
            continue
        held = np.ascontiguousarray(after[p.name]).view(np.uint8).reshape(*p.shape, -1)
        changed = (held != POISON).any(axis=-1)
        changed[np.ix_(*p.writes)] = False
        if changed.any():
            at = ", ".join(str(int(i)) for i in np.argwhere(changed)[0])
            return f"the kernel wrote {p.name}[{at}], outside of the part that problem.json says it writes"
    return None


def _badness(result: CaseResult) -> tuple[bool, float]:
    """Order results: wrong ones last, then by the share of the allowed error."""
    return not result.correct, share_of_allowed(result)


def share_of_allowed(result: CaseResult) -> float:
    """Return the largest error over what is allowed; 0 where nothing was compared."""
    if result.max_error is None or not result.allowed:
        return 0.0
    return result.max_error / result.allowed


@dataclass(frozen=True, slots=True)
class Bound:
    """One measure of a result's error and its allowed maximum, in the unit of the outputs."""

    name: str
    error: float
    allowed: float


def compare(
    workload: AnyWorkload, case: AnyCase, drawn: Drawn, results: Outputs, seed: int, expected: Outputs | None = None
) -> CaseResult:
    """Apply the rules to results of any device; `expected` is the reference's where it is known."""
    tensors = workload.tensors()
    expected = expected or tensors.reference(case.problem, drawn.expected)
    for name, result in results.items():
        if reason := _special_reason(result, expected[name]):
            return failed(case, seed, reason.format(of=f" of {name}" if len(results) > 1 else ""))
    special = {
        name: ~exact.isfinite()
        for name, exact in expected.items()
        if exact.is_floating_point() and not exact.isfinite().all()
    }
    results, expected = (_without(special, values) for values in (results, expected))
    errors = {name: _difference(result, expected[name]) for name, result in results.items()}
    found = bounds(workload, case, drawn, results, errors, expected)
    broken = _broken(found)
    if broken and (nudged := tensors.nudged(case, drawn.expected)) is not None:
        least = {name: value.masked_fill(~value.isfinite(), 0) for name, value in nudged.items()}
        found = bounds(workload, case, drawn, results, errors, expected, _without(special, least))
        broken = _broken(found)
    reason = f"{broken.name} {broken.error:.2e} where {broken.allowed:.2e} is allowed" if broken else None
    worst = max(found, key=lambda name: float(errors[name].abs().max()))
    largest, mean, allowed = (
        float(errors[worst].abs().max()),
        float(errors[worst].abs().mean()),
        found[worst][0].allowed,
    )
    return CaseResult(case.name, str(case.problem), seed, broken is None, largest, mean, allowed, reason)


def _difference(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return float64 differences; those of integers are not lost beyond 2^53."""
    if result.is_floating_point() or exact.is_floating_point():
        return result.double() - exact.double()
    return (result.long() - exact.long()).double()


def _special_reason(result: torch.Tensor, exact: torch.Tensor) -> str | None:
    """Return a sentence, with `{of}` for the output's name, where NaN, infinities or truth values are wrong.

    A kernel must return NaN and infinities where the reference does. A truth value is a byte of 0 or 1.
    """
    if result.dtype == torch.bool:
        bad = int((result.view(torch.uint8) > 1).sum())
        return f"{bad} of {result.numel()} outputs{{of}} are bytes other than 0 and 1" if bad else None
    undefined = exact.isnan()
    if bad := int((result.isnan() & ~undefined).sum()):
        return f"{bad} of {result.numel()} outputs{{of}} are NaN or were never written"
    if bad := int((~result.isnan() & undefined).sum()):
        return f"{bad} outputs{{of}} are not the NaN that the reference gives"
    infinite = exact.isinf()
    if bad := int((result.double() != exact.double())[infinite].sum()):
        return f"{bad} outputs{{of}} are not the infinities that the reference gives"
    return None


def _without(masks: Outputs, values: Outputs) -> Outputs:
    """Return outputs with zeros at the masks' places."""
    return {name: value.masked_fill(masks[name], 0) if name in masks else value for name, value in values.items()}


def _broken(found: Mapping[str, Sequence[Bound]]) -> Bound | None:
    return next((bound for own in found.values() for bound in own if not bound.error <= bound.allowed), None)


def bounds(
    workload: AnyWorkload,
    case: AnyCase,
    drawn: Drawn,
    results: Outputs,
    errors: Outputs,
    expected: Outputs,
    nudged: Outputs | None = None,
) -> dict[str, list[Bound]]:
    """Return the bounds of each output, that on its largest error first.

    `errors` and `expected` are float64 [..., rows, columns]. Errors of the `nudged` outputs add to own ones.
    """
    tensors, tolerance = workload.tensors(), workload.tolerance
    of = {name: f" of {name}" if len(results) > 1 else "" for name in results}
    if tolerance.rtol is not None or tolerance.atol is not None:
        return {n: [_elementwise(f"error{of[n]}", e, expected[n].double(), tolerance)] for n, e in errors.items()}
    own = {
        name: value.masked_fill(~value.isfinite() & (expected[name] == 0), 0) if value.is_floating_point() else value
        for name, value in tensors.own_dtype(case.problem, drawn.expected).items()
    }
    independent = case.draw in tensors.independent
    rounded = tensors.rounded_once(case.problem, drawn.expected) if independent else {}
    found: dict[str, list[Bound]] = {}
    for name, error in errors.items():
        eps = torch.finfo(results[name].dtype).eps if results[name].dtype.is_floating_point else 0.0
        exact = expected[name].double()
        own_error = own[name].double() - exact
        if nudged is not None and name in nudged:
            near = (nudged[name].double() - exact).abs()
            own_error = own_error.abs() + near
            if not eps:
                error = error.masked_fill(near > 0, 0)
        found[name] = by_own_error(of[name], error, exact, own_error, eps, tolerance)
        if name in rounded and _rows(error).numel() >= SUMMED_ROWS:
            found[name] += _by_sums(of[name], error, exact, rounded[name].double() - exact, eps)
    return found


def _rows(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each row; of all elements, where they make up no rows of LEAST_ROW."""
    length, axes = 1, [*values.shape]
    while axes and length < LEAST_ROW:
        length *= axes.pop()
    return values.reshape(-1, max(length, 1)).abs().amax(-1)


def _elementwise(name: str, error: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> Bound:
    """Return the error that the share `matched` of all elements must not exceed.

    It is relative to the allowed error at that element.
    """
    allowed = (tolerance.atol or 0.0) + (tolerance.rtol or 0.0) * expected.abs()
    excess = (error.abs() - allowed).flatten()
    rank = min(excess.numel(), max(1, int(np.ceil(tolerance.matched * excess.numel()))))
    at = int(excess.argsort()[rank - 1])
    return Bound(name, float(error.abs().flatten()[at]), float(allowed.flatten()[at]))


def by_own_error(
    of: str, error: torch.Tensor, expected: torch.Tensor, own_error: torch.Tensor, eps: float, tolerance: Tolerance
) -> list[Bound]:
    """Return the bounds on the largest error of all and of one row: FlashAttention's rule. Tensors are float64.

    `own_error` is that of the same computation in the kernel's own dtypes, `eps` the spacing of their numbers at 1.
    """
    own, size, largest = _rows(own_error), _rows(expected), _rows(error)
    spacing = tolerance.spacings(eps) * eps
    allowed = tolerance.own * own + spacing * size
    worst = int((largest / allowed.clamp(min=torch.finfo(allowed.dtype).tiny)).argmax())
    whole = tolerance.own * own.max() + spacing * size.max()
    return [
        Bound(f"error{of}", float(largest.max()), float(whole)),
        Bound(f"error of one row{of}", float(largest[worst]), float(allowed[worst])),
    ]


def _by_sums(
    of: str, error: torch.Tensor, expected: torch.Tensor, rounded_once: torch.Tensor, eps: float
) -> list[Bound]:
    own_biases, biases = _row_biases(rounded_once, expected), _row_biases(error, expected)
    return [
        Bound(f"root mean square error{of}", _rms(error), RMS_ALLOWED * _rms(rounded_once)),
        Bound(f"bias of rows{of}", _rms(biases), ROW_BIAS_ALLOWED * _rms(own_biases)),
        _bias(f"bias{of}", error, expected, eps),
    ]


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _row_biases(error: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return how much too large each row is relative to its size: the slope of its errors over its outputs.

    An error of a row as a whole, such as of its sum, adds up over its columns; rounding errors do not. A
    row of zeros has none.
    """
    return (error * expected).sum(-1) / expected.square().sum(-1).clamp(min=torch.finfo(expected.dtype).tiny)


def _bias(name: str, error: torch.Tensor, expected: torch.Tensor, eps: float) -> Bound:
    """Return the outputs' common relative error: the slope of the errors over the outputs.

    The sum over a row's columns is one sample. Rounding errors of different rows are independent, so that their sum
    scatters by the square root of the sum of squares.
    """
    rows = (error * expected).sum(-1)
    scatter = float(rows.square().sum().sqrt())
    size = float(expected.square().sum())
    return Bound(name, abs(float(rows.sum())) / size, eps * BIAS_ALLOWED + BIAS_SIGMAS * scatter / size)


def failed(case: CaseIdentity, seed: int, reason: str) -> CaseResult:
    """Return the result of a case that has no outputs to compare."""
    return CaseResult(case.name, str(case.problem), seed, False, None, None, None, reason, case.part)


# Create a kernel's arguments from host memory, tensors as bit patterns, outputs poisoned, and read outputs back.

POISON = 0xFF
"""bytes of NaN in every floating-point type, of -1 in signed integers"""


def make_arguments(parameters: Sequence[Parameter], inputs: Inputs) -> tuple[Argument, ...]:
    """Return all parameters with contents: inputs by name, outputs filled with POISON, scratch memory by its size."""
    return tuple(_argument(p, inputs) for p in parameters)


def make_round(workload: AnyWorkload, launch: Launch, arguments: Sequence[Argument]) -> list[KernelCall]:
    """Return the kernels of a launch in stream order, each with those of a candidate's arguments that it takes."""
    return [
        KernelCall(entry, geometry, taken(workload, entry, arguments))
        for entry, geometry in launch.kernels(workload.entry)
    ]


def _argument(parameter: Parameter, inputs: Inputs) -> Argument:
    if isinstance(parameter, ConstantParameter):
        return ConstantArgument(parameter.name, as_bytes(inputs[parameter.name]))
    if isinstance(parameter, ScratchParameter):
        return ScratchArgument(parameter.name, parameter.bytes, parameter.zeroed, parameter.passed)
    if not isinstance(parameter, TensorParameter):
        return parameter
    poisoned = parameter.output and not parameter.inout
    data = np.full(parameter.bytes, POISON, np.uint8) if poisoned else as_bytes(inputs[parameter.name])
    shaped = data.view(_NUMPY[parameter.dtype]).reshape(parameter.shape)
    return TensorArgument(parameter.name, shaped, parameter.output, parameter.inout, parameter.passed)


_NUMPY = {
    "fp64": "f8", "fp32": "f4", "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1", "uint8": "u1", "bool": "u1",
    "fp16": "u2", "bf16": "u2", "fp8_e4m3": "u1", "fp8_e5m2": "u1",
}  # fmt: skip # a table


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's contents, uint8 [bytes], wherever it lies."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def read_outputs(parameters: Sequence[Parameter], after: Tensors) -> Outputs:
    """Return the outputs after a launch as torch tensors."""
    outputs = [p for p in parameters if isinstance(p, TensorParameter) and p.output]
    return {p.name: written_part(p, _tensor(p, after[p.name])) for p in outputs}


def written_part(parameter: TensorParameter, tensor: torch.Tensor) -> torch.Tensor:
    """Return an output with zeros where the kernel does not write it, so that this is not compared."""
    if parameter.writes is None:
        return tensor
    kept = torch.zeros_like(tensor)
    at = np.ix_(*parameter.writes)
    kept[at] = tensor[at]
    return kept


def _tensor(parameter: TensorParameter, data: np.ndarray) -> torch.Tensor:
    flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy())
    return flat.view(TORCH_DTYPES[parameter.dtype]).reshape(parameter.shape)


# Measure which cells of a configuration the gate's cases visit.


class CoverageLog:
    """Collects the cells that the cases of one plan visit, all of one problem and configuration."""

    def __init__(self, workload: AnyWorkload) -> None:
        self._workload, self._tensors = workload, workload.tensors()
        self._cells: frozenset[Cell] = frozenset()
        self._visited: set[Cell] = set()
        self._votes: frozenset[Cell] = frozenset()
        self._counted = False

    def add(self, case: AnyCase, launch: Launch, visits: np.ndarray, drawn: Drawn) -> None:
        """Add a case that was launched, by the device's count of visits and the inputs that it got."""
        if case.whole is None:
            return
        self._cells = self._cells or self._workload.cells(case.whole, case.config)
        self._counted |= bool(len(visits)) or not any(cell.kind in COUNTED for cell in self._cells)
        if not any(cell.kind == "votes" for cell in self._cells - self._votes):
            self._see_votes(visits)
        self._visited |= self._workload.visited(case, launch, visits)
        self._visited |= self._tensors.shown(case, drawn)

    def _see_votes(self, visits: np.ndarray) -> None:
        """Take every vote that some warp made for two cells, true and false, where the workload knows of none."""
        sites = dict(_votes_by_site(visits))
        self._votes |= {Cell("votes", f"at {site}, {sign}") for site in sites for sign in ("true", "false")}
        self._cells |= self._votes
        for site, at in sites.items():
            if at["true"].any():
                self._visited.add(Cell("votes", f"at {site}, true"))
            if (at["count"] > at["true"]).any():
                self._visited.add(Cell("votes", f"at {site}, false"))

    def result(self) -> Coverage | None:
        """Return the coverage.

        None for a workload without cells, and where some need a count that the device does not keep.
        """
        return coverage_of(self._cells, self._visited) if self._counted and self._cells else None


def _votes_by_site(visits: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    votes = visits[visits["kind"] == VisitKind.VOTE]
    for site in np.unique(votes["site"]):
        yield int(site), votes[votes["site"] == site]


def coverage_of(cells: frozenset[Cell], visited: set[Cell]) -> Coverage:
    """Return how many cells of each kind there are and were visited, and the names of all others."""
    missing = sorted(cells - visited)
    counts, left = Counter(cell.kind for cell in cells), Counter(cell.kind for cell in missing)
    kinds = sorted(counts)
    return Coverage(
        {kind: counts[kind] for kind in kinds},
        {kind: counts[kind] - left[kind] for kind in kinds},
        tuple(map(str, missing)),
    )


def joined(first: Coverage | None, second: Coverage | None) -> Coverage | None:
    """Return the coverage of two plans of one configuration together, each with all of its missing cells."""
    if first is None or second is None:
        return first or second
    both = set(first.missing) & set(second.missing)
    left = Counter(cell.partition(": ")[0] for cell in both)
    missing = tuple(cell for cell in first.missing if cell in both)
    return Coverage(first.cells, {kind: count - left[kind] for kind, count in first.cells.items()}, missing)


def without_missing(coverage: Coverage | None, cells: Set[Cell]) -> Coverage | None:
    """Return the coverage without those of its missing cells that are among `cells`."""
    if coverage is None:
        return None
    names = set(map(str, cells)) & set(coverage.missing)
    counts = Counter(name.partition(": ")[0] for name in names)
    return Coverage(
        {kind: count - counts[kind] for kind, count in coverage.cells.items()},
        coverage.visited,
        tuple(cell for cell in coverage.missing if cell not in names),
    )
