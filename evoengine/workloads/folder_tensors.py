"""Draw the inputs of a folder's workload as problem.json says, and compute outputs by its reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod

import torch

from evoengine.errors import UsageError
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.dtypes import TORCH_DTYPES
from evoengine.workloads.folder_definition import Definition, Draw, FolderProblem, Item, shape_of
from evoengine.workloads.folder_reference import (
    NotDouble,
    reference_call,
    run_as_is,
    run_in_float64,
    uses_numpy,
)

BASELINE = "reference"
MOST_INTEGER = 128
"""integers of a `random` input are below it, and above its negative where the dtype has a sign"""
LARGE = (1024.0, 64.0, 8.0)
"""factors of inputs in the pattern `large`: the first with which the reference's outputs stay finite is used"""


class FolderTensors(Tensors[FolderProblem]):
    def __init__(self, definition: Definition) -> None:
        self._definition = definition

    def draw(self, case: Case[FolderProblem], seed: int, device: str = "cpu") -> Drawn:
        """Draw a case's inputs; as in `normal` in a pattern under which the reference gives NaN or infinity."""
        for factor in LARGE if case.draw == "large" else (1.0,):
            inputs = self._draw(case, seed, device, factor)
            if case.draw == "normal" or case.draw.startswith("case ") or self._is_finite(case.problem, inputs):
                return Drawn(inputs, inputs)
        plain = self._draw(Case(case.name, case.problem, config=case.config), seed, device, 1.0)
        return Drawn(plain, plain)

    def reference(self, problem: FolderProblem, inputs: Inputs) -> Outputs:
        """Return float64 outputs: computed so where the reference can, else its own outputs converted."""
        try:
            return run_in_float64(self._definition, problem, inputs)
        except NotDouble:
            found = run_as_is(self._definition, problem, inputs)
            return {name: output.double() for name, output in found.items()}

    def own_dtype(self, problem: FolderProblem, inputs: Inputs) -> Outputs:
        return run_as_is(self._definition, problem, inputs)

    def shown(self, case: Case[FolderProblem], drawn: Drawn) -> frozenset[Cell]:
        """Return the draw of a case; one under which the reference is not finite was drawn as usual."""
        return frozenset({Cell("values", case.draw)})

    def baselines(self, problem: FolderProblem) -> tuple[str, ...]:
        """Return the reference, if it is torch's; NumPy's runs on no GPU."""
        return () if uses_numpy(self._definition) else (BASELINE,)

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

    def _is_finite(self, problem: FolderProblem, inputs: Inputs) -> bool:
        try:
            outputs = run_as_is(self._definition, problem, inputs)
        except UsageError:
            return False
        return all(bool(output.isfinite().all()) for output in outputs.values())

    def draw_some(self, case: Case[FolderProblem], seed: int, without: Collection[str]) -> Inputs:
        """Return the inputs of a case but those named in `without`."""
        return self._draw(case, seed, "cpu", 1.0, without)

    def _draw(
        self, case: Case[FolderProblem], seed: int, device: str, factor: float, without: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        generator = torch.Generator(device=device).manual_seed(seed)
        found: dict[str, torch.Tensor] = {}
        for item, draw in self._draws(case):
            if item.name in without:
                continue
            values = _values(item, draw, case.problem, generator)
            if case.draw == "ends" and not TORCH_DTYPES[item.dtype].is_floating_point:
                values = _ends(item, draw, case.problem, values, generator)
            if draw.kind == "random" and values.is_floating_point():
                values = SHAPED.get(case.draw, _as_drawn)(values, generator) * factor
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


def _values(item: Item, draw: Draw, problem: FolderProblem, generator: torch.Generator) -> torch.Tensor:
    """Draw values of the item's shape, in float32 or float64 where it holds floating-point numbers."""
    shape, dtype, axes = shape_of(item, problem), TORCH_DTYPES[item.dtype], problem.axes
    made = torch.float64 if dtype == torch.float64 else torch.float32 if dtype.is_floating_point else torch.int64
    device = generator.device
    match draw.kind:
        case "zeros" | "ones" | "constant":
            value = {"zeros": 0, "ones": 1}.get(draw.kind, draw.value)
            assert value is not None  # the reader refuses a constant without one
            return torch.full(shape, value, dtype=made, device=device)
        case "arange":
            return torch.arange(prod(shape), dtype=made, device=device).reshape(shape)
        case "uniform" | "integers":
            assert draw.low is not None and draw.high is not None  # the reader refuses a range that leaves one out
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


def _ends(
    item: Item, draw: Draw, problem: FolderProblem, values: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return integers from the ends of their ranges, and booleans all alike but for at most one.

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


def _range(item: Item, draw: Draw, problem: FolderProblem) -> tuple[int, int]:
    """Return the lowest integer that is drawn, and the one above the highest."""
    if draw.low is not None and draw.high is not None:
        axes = problem.axes
        return int(float(draw.low.evaluate(axes))), int(float(draw.high.evaluate(axes)))
    if item.dtype == "bool":
        return 0, 2
    return 0 if item.dtype == "uint8" else -MOST_INTEGER, MOST_INTEGER


def _as_drawn(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return values


def _one_hot(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Keep one element of each row as drawn, and set all others to zero."""
    if values.dim() == 0:
        return values
    rows = (*values.shape[:-1], 1)
    place = torch.randint(values.shape[-1], rows, generator=generator, device=values.device)
    return torch.zeros_like(values).scatter_(-1, place, values.gather(-1, place))


SHAPED: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "zeros": lambda values, generator: torch.zeros_like(values),
    "one-hot": _one_hot,
    "negative": lambda values, generator: -values.abs(),
}
