"""Find axes along which a reference computes each output only from the inputs at the same place.

Along them a few places of a problem of any size are a small problem of their own: rows of a softmax, rows and columns
of a matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from evoengine.errors import UsageError
from evoengine.workloads.base import Case, Inputs, Outputs
from evoengine.workloads.folder_definition import Definition, FolderProblem, Item, whole
from evoengine.workloads.folder_tensors import FolderTensors

Places = Mapping[str, np.ndarray]
"""axis → indices along it, int64, ascending"""
LEAST = 3
"""minimum length of an axis whose independence can be shown"""
_SAME = 1e-9
"""allowed relative difference of float64 results that were summed in another order"""


def independent_axes(definition: Definition, problem: FolderProblem) -> tuple[str, ...]:
    """Return those axes, as a small problem shows by being computed whole and at a few places.

    An axis that any shape calculates with is none of them.
    """
    return _independent(_Key(definition), problem)


class _Key:
    """The parts of a definition on which its results depend."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._text = repr((definition.reference, definition.axes, definition.inputs, definition.outputs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(maxsize=16)
def _independent(key: _Key, problem: FolderProblem) -> tuple[str, ...]:
    definition = key.definition
    tensors = FolderTensors(definition)
    inputs = tensors.draw(Case("slices", problem), seed=1).inputs
    try:
        expected = tensors.reference(problem, inputs)
        alone = [a for a in _candidates(definition, problem) if _holds(definition, problem, inputs, expected, [a])]
        while alone and not _holds(definition, problem, inputs, expected, alone):
            alone.pop()
    except UsageError:
        return ()
    return tuple(alone)


def _candidates(definition: Definition, problem: FolderProblem) -> list[str]:
    """Return axes that are a dimension of some input and of every output, and no part of an expression."""
    items = [item for item in (*definition.inputs, *definition.outputs) if item.shape is not None]
    sizes = [size for item in items for size in item.shape or ()]
    calculated = {name for size in sizes if size.text not in size.names for name in size.names}
    calculated |= {name for axis in definition.axes if axis.expression for name in axis.expression.names}

    def has(item: Item, axis: str) -> bool:
        return sum(size.text == axis for size in item.shape or ()) == 1

    return [
        axis
        for axis, length in problem.axes.items()
        if length >= LEAST
        and axis not in calculated
        and all(has(item, axis) for item in definition.outputs)
        and any(has(item, axis) for item in definition.inputs)
    ]


def _holds(
    definition: Definition, problem: FolderProblem, inputs: Inputs, expected: Outputs, axes: Sequence[str]
) -> bool:
    """Return whether some places along the axes give what the whole gives there: the first and last, and one within."""
    for some in ((0, -1), (1,)):
        places = {axis: np.arange(problem.axes[axis])[list(some)] for axis in axes}
        part = sliced(problem, places)
        try:
            found = FolderTensors(definition).reference(part, _sliced_inputs(definition, problem, inputs, places))
        except UsageError:
            return False
        for item in definition.outputs:
            wanted = expected[item.name].reshape([whole(size, problem.axes) for size in item.shape or ()])
            wanted = _at(item, problem, wanted, places).double()
            if found[item.name].shape != wanted.shape or not _alike(found[item.name].double(), wanted):
                return False
    return True


def _alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    same = (found == wanted) | ((found - wanted).abs() <= _SAME * wanted.abs().max())
    return bool(same.all())


def sliced(problem: FolderProblem, places: Places) -> FolderProblem:
    """Return the problem of those places: as many along each of their axes."""
    sizes = tuple((axis, len(places[axis]) if axis in places else length) for axis, length in problem.sizes)
    return replace(problem, sizes=sizes)


def indices(item: Item, problem: FolderProblem, places: Places) -> list[np.ndarray]:
    """Return for each dimension of a tensor the indices that belong to those places."""
    axes = problem.axes
    return [
        places[size.text] if size.text in places else np.arange(whole(size, axes), dtype=np.int64)
        for size in item.shape or ()
    ]


def _sliced_inputs(
    definition: Definition, problem: FolderProblem, inputs: Inputs, places: Places
) -> dict[str, torch.Tensor]:
    tensors = {item.name: item for item in definition.inputs if item.shape is not None}
    return {name: _at(item, problem, inputs[name], places) for name, item in tensors.items()}


def _at(item: Item, problem: FolderProblem, tensor: torch.Tensor, places: Places) -> torch.Tensor:
    found = tensor
    for dimension, at in enumerate(indices(item, problem, places)):
        found = found.index_select(dimension, torch.from_numpy(at))
    return found.contiguous()
