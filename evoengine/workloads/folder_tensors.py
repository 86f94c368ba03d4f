"""Draw the inputs of a folder's workload as problem.json states, and compute outputs by its reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import torch

from evoengine.errors import UsageError
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.folder_definition import WIDE, Definition, Draw, FolderProblem, Item, shape_of
from evoengine.workloads.folder_reference import (
    NotDouble,
    loaded,
    off_by_roundings,
    reference_call,
    run_as_is,
    run_in_float64,
    runs_torch,
    said,
    same_in_int64,
)
from evoengine.workloads.tensors import TORCH_DTYPES

BASELINE = "reference"
MOST_INTEGER = 128
"""limit of the integers of a `random` input, and of their magnitude if the dtype has a sign"""
LARGE = (1024.0, 64.0, 8.0)
"""factors of inputs in the pattern `large`: the first one for which the reference's outputs stay finite is used"""


class FolderTensors(Tensors[FolderProblem]):
    def __init__(self, definition: Definition) -> None:
        self._definition = definition

    def draw(self, case: Case[FolderProblem], seed: int, device: str = "cpu") -> Drawn:
        """Draw a case's inputs; as in `normal` if the reference leaves its dtype's range under the pattern."""
        for strength in {"large": LARGE, "wide": (-1, 0, 1)}.get(case.draw, (1.0,)):
            inputs = self._draw(case, seed, device, strength)
            if case.draw == "normal" or case.draw.startswith("case ") or self._is_in_range(case, inputs):
                return Drawn(inputs, inputs)
        plain = self._draw(Case(case.name, case.problem, config=case.config), seed, device, 1.0)
        return Drawn(plain, plain)

    def changed_in_part(self, case: Case[FolderProblem], inputs: Inputs, seed: int) -> Inputs | None:
        """Return the inputs with an eighth of the elements of `random` ones taken from another draw.

        The first, the middle and the last element of each stay. None if no element would change.
        """
        other = self._draw(case, seed, "cpu", 1.0)
        generator = torch.Generator().manual_seed(seed)
        found, changes = dict(inputs), False
        for item, draw in self._draws(case):
            count = inputs[item.name].numel()
            if draw.kind == "random" and count > 3:
                again = torch.rand(count, generator=generator) < 1 / 8
                again[[0, count // 2, -1]] = False
                found[item.name] = torch.where(
                    again.reshape(inputs[item.name].shape), other[item.name], inputs[item.name]
                )
                changes |= bool(again.any())
        return found | {symbol: found[name] for symbol, name in self._definition.constants.items()} if changes else None

    def reference(self, problem: FolderProblem, inputs: Inputs) -> Outputs:
        """Return float64 outputs: computed in float64 if the reference can, or else its own outputs converted."""
        try:
            return run_in_float64(self._definition, problem, inputs)
        except NotDouble:
            found = run_as_is(self._definition, problem, inputs)
            return {name: output.double() for name, output in found.items()}

    def own_dtype(self, problem: FolderProblem, inputs: Inputs) -> Outputs:
        return run_as_is(self._definition, problem, inputs)

    def nudged(self, case: Case[FolderProblem], inputs: Inputs) -> Outputs | None:
        """Return the outputs of floating-point dtypes from nudged inputs; in `ties`, all outputs of exact inputs.

        In `ties` intermediate results are changed instead, by as much: if values are compared as drawn, a tie stays a
        tie.
        """
        if case.draw == "ties":
            return off_by_roundings(self._definition, case.problem, inputs)
        generator = torch.Generator().manual_seed(1)
        moved = {}
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
                half = torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).eps / 2
                moved[name] = tensor.double() * (1 + signs * half)
        try:
            found = run_in_float64(self._definition, case.problem, {**inputs, **moved})
        except NotDouble:
            return None
        floating = {item.name for item in self._definition.outputs if TORCH_DTYPES[item.dtype].is_floating_point}
        return {name: output for name, output in found.items() if name in floating}

    def shown(self, case: Case[FolderProblem], drawn: Drawn) -> frozenset[Cell]:
        """Return the draw of a case; if the reference is not finite under it, inputs were drawn as usual."""
        return frozenset({Cell("values", case.draw)})

    def baselines(self, problem: FolderProblem) -> tuple[str, ...]:
        """Return the reference, if it uses torch; NumPy code and kernels run only on the CPU."""
        return (BASELINE,) if runs_torch(self._definition) else ()

    def baseline(self, name: str, problem: FolderProblem, inputs: Inputs) -> Callable[[], object]:
        call = reference_call(self._definition, problem, inputs)

        def run() -> object:
            try:
                with torch.no_grad():
                    return call()
            except RuntimeError:
                raise
            except Exception as error:
                raise RuntimeError(f"the reference raises {type(error).__name__}: {error}") from error

        return run

    def check_bytes(self, problem: FolderProblem) -> int:
        """Return the bytes of inputs and outputs in float64, times three for the reference's intermediates."""
        items = (*self._definition.inputs, *self._definition.outputs)
        return 3 * 8 * sum(prod(shape_of(item, problem)) for item in items)

    def _is_in_range(self, case: Case[FolderProblem], inputs: Inputs) -> bool:
        """Return whether outputs are numbers, infinite only where the exact ones are, finite in `large` and `wide`.

        With wide integers they are less than a quarter of their dtype's range, or the same with 64-bit integers: this
        distinguishes them from those that wrapped around or were cut off by a conversion.
        """
        if case.draw == "special":
            return True
        if case.draw == "ties" and not runs_torch(self._definition):
            return False  # it is unknown which ties roundings may decide
        try:
            outputs = run_as_is(self._definition, case.problem, inputs)
        except UsageError:
            return False
        small = all(map(_is_small, outputs.values()))
        if case.draw == "wide" and not small and not same_in_int64(self._definition, case.problem, inputs, outputs):
            return False
        if case.draw in ("large", "wide"):
            return all(bool(output.isfinite().all()) for output in outputs.values())
        exact = self.reference(case.problem, inputs)
        same = all(torch.equal(output.isinf(), exact[name].isinf()) for name, output in outputs.items())
        return same and not any(bool(output.isnan().any()) for output in outputs.values())

    def draw_some(self, case: Case[FolderProblem], seed: int, without: Collection[str]) -> Inputs:
        """Return the inputs of a case except those named in `without`."""
        return self._draw(case, seed, "cpu", 1.0, without)

    def _draw(
        self, case: Case[FolderProblem], seed: int, device: str, strength: float, without: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Draw inputs: floating-point numbers times `strength` or, in the pattern `wide`, integers of as many bits."""
        generator = torch.Generator(device=device).manual_seed(seed)
        found: dict[str, torch.Tensor] = {}
        draws = list(self._draws(case))
        without = {*without} - {draw.over for _, draw in draws}
        for item, draw in draws:
            if item.name in without:
                continue
            over = found[draw.over] if draw.over else None
            values = _drawn(self._definition, item, draw, case, generator, over)
            if case.draw == "ends" and not TORCH_DTYPES[item.dtype].is_floating_point:
                values = _ends(item, draw, case.problem, values, generator)
            if case.draw == "wide" and draw.kind == "random" and item.dtype in WIDE:
                values = _wide_integers(item, values, generator, int(strength))
            elif case.draw == "ties" and draw.kind == "random" and values.is_floating_point():
                values = _tied(values, generator)
            elif draw.kind == "random" and values.is_floating_point():
                values = _SHAPED.get(case.draw, _as_drawn)(values, generator) * (1 if case.draw == "wide" else strength)
            found[item.name] = values.to(TORCH_DTYPES[item.dtype]).contiguous()
        return found | {symbol: found[name] for symbol, name in self._definition.constants.items()}

    def _draws(self, case: Case[FolderProblem]) -> Iterator[tuple[Item, Draw]]:
        draws: Mapping[str, Draw] = self._definition.draws_for(case.problem)
        if case.draw.startswith("case "):
            own = next(c for c in self._definition.cases if f"case {c.name}" == case.draw)
            draws = {**draws, **own.draws}
        for item in self._definition.inputs:
            if item.shape is not None:
                yield item, draws.get(item.name, Draw())


def _drawn(
    definition: Definition,
    item: Item,
    draw: Draw,
    case: Case[FolderProblem],
    generator: torch.Generator,
    over: torch.Tensor | None,
) -> torch.Tensor:
    match draw.kind:
        case "made":
            return _made(definition, item, draw, case).to(generator.device)
        case "indptr":
            return _indptr(item, draw, case, generator, over)
        case "permutation":
            return _permutation(item, draw, case.problem, generator)
    return _values(item, draw, case.problem, generator)


def _made(definition: Definition, item: Item, draw: Draw, case: Case[FolderProblem]) -> torch.Tensor:
    """Return the result of the folder's function for the axes and the knobs, in the input's shape."""
    of = f"{draw.maker} of makers, which makes {item.name}"
    try:
        found = loaded(definition.makers, f"{definition.name}'s inputs")[str(draw.maker)](
            case.problem.axes, {**case.config}
        )
        tensor = found if isinstance(found, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(found))
    except BaseException as error:
        raise UsageError(f"{of}, raises for {case.problem}: {said(error)}") from None
    shape = shape_of(item, case.problem)
    if tensor.numel() != prod(shape):
        raise UsageError(f"{of}, returns {tuple(tensor.shape)} for {case.problem}; problem.json states {shape}")
    return tensor.reshape(shape)


def _indptr(
    item: Item, draw: Draw, case: Case[FolderProblem], generator: torch.Generator, over: torch.Tensor | None
) -> torch.Tensor:
    """Return ascending offsets from 0 to `high` of segments of at least `low`; with `ends` one segment has the rest.

    Segments are as long as those of the offsets `over` plus a share of the rest.
    """
    axes = case.problem.axes
    total, least = (int(float(e.evaluate(axes))) if e is not None else 0 for e in (draw.high, draw.low))
    (size,) = shape_of(item, case.problem)
    device = generator.device
    base = least * torch.arange(size, device=device)
    if over is not None:
        base = base + over.long()
    free = total - int(base[-1])
    if free < 0:
        at_least = f"{least} at least" + (f", and those of {draw.over}" if over is not None else "")
        raise UsageError(
            f"{item.name} is drawn indptr with {size - 1} segments of {at_least}, which are more than {total} "
            f"for {case.problem}; state a constraint that sizes must fulfil"
        )
    inner = torch.randint(0, free + 1, (max(0, size - 2),), generator=generator, device=device).sort().values
    if case.draw == "ends":
        first = int(torch.randint(0, max(1, size - 1), (), generator=generator, device=device))
        inner = torch.where(torch.arange(len(inner), device=device) < first, 0, free)
    cuts = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), free)])[:size] if size > 1 else inner.new_zeros(1)
    return cuts + base


def _permutation(item: Item, draw: Draw, problem: FolderProblem, generator: torch.Generator) -> torch.Tensor:
    """Return distinct integers from 0 to below `high`, in random order; `high` is their number by default."""
    shape = shape_of(item, problem)
    high = int(float(draw.high.evaluate(problem.axes))) if draw.high is not None else prod(shape)
    if high < prod(shape):
        raise UsageError(
            f"{item.name} is drawn as a permutation of {prod(shape)} integers below {high} for {problem}; there are "
            "not so many: state a constraint that sizes must fulfil"
        )
    return torch.randperm(high, generator=generator, device=generator.device)[: prod(shape)].reshape(shape)


def _values(item: Item, draw: Draw, problem: FolderProblem, generator: torch.Generator) -> torch.Tensor:
    """Draw values of the item's shape, in float32 or float64 if it holds floating-point numbers."""
    shape, dtype, axes = shape_of(item, problem), TORCH_DTYPES[item.dtype], problem.axes
    made = torch.float64 if dtype == torch.float64 else torch.float32 if dtype.is_floating_point else torch.int64
    device = generator.device
    match draw.kind:
        case "zeros" | "ones" | "constant":
            value = {"zeros": 0, "ones": 1}.get(draw.kind, draw.value)
            assert value is not None  # the reader rejects a constant without a value
            return torch.full(shape, value, dtype=made, device=device)
        case "arange":
            return torch.arange(prod(shape), dtype=made, device=device).reshape(shape)
        case "uniform" | "integers":
            assert draw.low is not None and draw.high is not None  # the reader rejects a range without both limits
            low, high = (float(bound.evaluate(axes)) for bound in (draw.low, draw.high))
            if not low < high:
                raise UsageError(f"{item.name} is drawn {draw.kind} from {low:g} to {high:g}; low must be below high")
            if draw.kind == "uniform" and made != torch.int64:
                return low + (high - low) * torch.rand(shape, dtype=made, generator=generator, device=device)
            integers = torch.randint(int(low), int(high), shape, dtype=torch.int64, generator=generator, device=device)
            return integers.to(made)
    if made != torch.int64:
        return torch.randn(shape, dtype=made, generator=generator, device=device)
    lowest, above = _range(item, draw, problem)
    return torch.randint(lowest, above, shape, dtype=torch.int64, generator=generator, device=device)


def random_values(dtype: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return values of a `random` input of a dtype, in that dtype."""
    if TORCH_DTYPES[dtype].is_floating_point:
        return torch.randn(shape, generator=generator).to(TORCH_DTYPES[dtype])
    return torch.randint(*_random_range(dtype), shape, generator=generator).to(TORCH_DTYPES[dtype])


def _ends(
    item: Item, draw: Draw, problem: FolderProblem, values: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return integers from the ends of their ranges, and booleans all equal except at most one.

    Other draws are returned unchanged.
    """
    if draw.kind not in ("random", "integers") or not values.numel():
        return values
    if item.dtype == "bool":
        most = bool(torch.randint(2, (), generator=generator, device=values.device))
        alike = torch.full_like(values, most)
        if torch.randint(2, (), generator=generator, device=values.device):
            place = torch.randint(values.numel(), (), generator=generator, device=values.device)
            alike.view(-1)[place] = not most
        return alike
    low, above = _range(item, draw, problem)
    ends = torch.tensor([low, above - 1], dtype=values.dtype, device=values.device)
    return ends[torch.randint(2, values.shape, generator=generator, device=values.device)]


def _wide_integers(item: Item, values: torch.Tensor, generator: torch.Generator, fewer: int) -> torch.Tensor:
    """Return integers of all bits, or of fewer where `fewer` is 1; as drawn if there are no fewer.

    Where it is -1, one in 32 is an end of the dtype's range.
    """
    bits = WIDE[item.dtype][max(fewer, 0) :]
    if not bits:
        return values
    words = torch.randint(0, 1 << 32, (2, *values.shape), generator=generator, device=values.device)
    whole = words[0] ^ words[1] << 32
    drawn = whole & 0xFF if item.dtype == "uint8" else whole >> (64 - bits[0])
    if fewer >= 0:
        return drawn
    limits = torch.iinfo(TORCH_DTYPES[item.dtype])
    end = torch.where(whole & 32 == 0, limits.min, limits.max)
    return torch.where(words[1] % 32 == 0, end, drawn)


def _is_small(output: torch.Tensor) -> bool:
    if output.dtype.is_floating_point or output.dtype in (torch.bool, torch.uint8, torch.int8):
        return True
    quarter = torch.iinfo(output.dtype).max // 4
    return bool(((output > -quarter) & (output < quarter)).all())


def _range(item: Item, draw: Draw, problem: FolderProblem) -> tuple[int, int]:
    """Return the lowest drawn integer, and the one above the highest."""
    if draw.low is not None and draw.high is not None:
        axes = problem.axes
        return int(float(draw.low.evaluate(axes))), int(float(draw.high.evaluate(axes)))
    return _random_range(item.dtype)


def _random_range(dtype: str) -> tuple[int, int]:
    if dtype == "bool":
        return 0, 2
    return 0 if dtype == "uint8" else -MOST_INTEGER, MOST_INTEGER


def _as_drawn(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return values


def _tied(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return half of the values as multiples of a half: equal ones, some halfway between integers, zeros of both signs.

    The others are multiples of other powers of two, some of which a factor makes halfway between integers.
    """
    powers = 2.0 ** torch.randint(-5, 3, values.shape, generator=generator, device=values.device)
    other = torch.randint(2, values.shape, generator=generator, device=values.device) > 0
    spacing = torch.where(other, powers.to(values.dtype), 0.5)
    return torch.where(other, (4 * values).round(), (2 * values).round()) * spacing


def _special(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Replace one value in sixteen by NaN, one by infinity and one by minus infinity."""
    kind = torch.randint(16, values.shape, generator=generator, device=values.device)
    for number, special in enumerate((torch.nan, torch.inf, -torch.inf)):
        values = torch.where(kind == number, special, values)
    return values


def _one_hot(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Keep one element of each row as drawn, and set all others to zero."""
    if values.dim() == 0:
        return values
    rows = (*values.shape[:-1], 1)
    place = torch.randint(values.shape[-1], rows, generator=generator, device=values.device)
    return torch.zeros_like(values).scatter_(-1, place, values.gather(-1, place))


SHAPED: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "zeros": lambda values, generator: values * 0,  # zeros of both signs
    "one-hot": _one_hot,
    "negative": lambda values, generator: -values.abs(),
}
"""draws for kernels of which it is unknown what they do to NaN"""
_SHAPED = {**SHAPED, "special": _special}
