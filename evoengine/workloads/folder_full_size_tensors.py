"""A folder's problem at full size: the kernel's arguments, and what the blocks that were run should have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from evoengine.devices.base import (
    DTYPE_BYTES,
    ConstantArgument,
    ConstantParameter,
    Parameter,
    ScratchParameter,
    TensorArgument,
    TensorParameter,
)  # fmt: skip
from evoengine.devices.pool import PAGE, BlockArgument, BlockLaunch, BlockTrace, ChosenBlock, Pool
from evoengine.records import Launch
from evoengine.workloads.base import Case, Drawn, FullSize, Inputs, NothingWritten, Workload, WrittenPart, WrongBlock
from evoengine.workloads.blocks import DRAWN, chosen_blocks
from evoengine.workloads.dtypes import TORCH_DTYPES
from evoengine.workloads.folder_definition import Definition, FolderProblem, Item, shape_of
from evoengine.workloads.folder_extents import elements, input_bytes, operations
from evoengine.workloads.folder_full_size import REAL_BYTES, FolderFullCase, affordable, blocks_to_draw
from evoengine.workloads.folder_slices import Places, independent_axes, indices, sliced
from evoengine.workloads.folder_tensors import FolderTensors

POOL_PAGES = 256
_INPUT_LIMIT = 1 << 28
"""bytes of pooled inputs after which a block is given up"""
_SMALL_BYTES = 1 << 22
"""of inputs that are handed to the emulator as they are"""
_ALL = 64
"""blocks of a launch that are all run"""
_SLICE_ELEMENTS, _SLICE_OPERATIONS = 1 << 24, 4e9
"""of the reference of a few places"""
_SIGMAS = 5.0
"""standard deviations of the mean by which the blocks' shares may fall short of the outputs by chance"""
_BITS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Stored = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""output → the elements' places in it, ascending, and their bits"""


class FolderFullSize(FullSize[FolderFullCase]):
    unknown_cost = True

    def __init__(self, workload: Workload[FolderProblem], definition: Definition) -> None:
        self._workload, self._definition = workload, definition
        self._tensors = FolderTensors(definition)

    def draw_blocks(self, case: FolderFullCase, launch: Launch, seed: int) -> BlockLaunch | None:
        """Return what to run; None where the reference cannot be compared with at that size, or where it can at the
        whole one's and the case is a part of it."""
        can_whole = self._can_be_judged(case, case.whole)
        if (case.part is not None) == can_whole:
            return None
        drawn = blocks_to_draw(case, self._definition, launch, DRAWN)
        total = prod(launch.grid)
        chosen = list(range(total)) if total <= _ALL else chosen_blocks(launch.grid, seed, drawn)
        order = np.random.default_rng(seed).permutation(chosen)
        return self._launch(case, case.problem, launch, seed, [int(block) for block in order])

    def alone(self, case: FolderFullCase, seed: int) -> BlockLaunch:
        """Return the blocks of a small launch, each by itself."""
        total = prod(case.small_launch.grid)
        return self._launch(case, case.small, case.small_launch, seed, list(range(min(total, _ALL))))

    def written_outputs(self, asked: BlockLaunch, traces: Sequence[BlockTrace]) -> set[str]:
        """Return the names of outputs that some block wrote to."""
        return {name for one in traces for name, (places, _) in _stored(asked, one).items() if places.size}

    def written_parts(
        self, case: FolderFullCase, asked: BlockLaunch, traces: Sequence[BlockTrace]
    ) -> list[WrittenPart]:
        """Return the outputs that blocks wrote, at the places along independent axes where they did.

        Raises WrongBlock where a block read too much or stores cannot cover an output, NothingWritten where no block
        wrote any of one.
        """
        for one in traces:
            if one.given_up:
                raise WrongBlock(f"block {one.block} read more than {_INPUT_LIMIT:,} bytes of its inputs")
        stored = [_stored(asked, one) for one in traces]
        for item in self._definition.outputs:
            self._check_cover(item, case, asked, [found[item.name] for found in stored])
        axes = self._axes(case)
        if not axes:
            return [self._part(case, asked, stored, {})]
        own = [_places(self._definition, case.problem, [found], axes) for found in stored]
        union = _places(self._definition, case.problem, stored, axes)
        apart = sum(elements(self._definition, sliced(case.problem, places)) for places in own)
        together = elements(self._definition, sliced(case.problem, union))
        if together <= min(2 * apart, _SLICE_ELEMENTS):
            return [self._part(case, asked, stored, union)]
        return [
            self._part(case, asked, [found], self._affordable(case, places))
            for found, places in zip(stored, own, strict=True)
        ]

    def _axes(self, case: FolderFullCase) -> tuple[str, ...]:
        return independent_axes(self._definition, case.small)

    def _can_be_judged(self, case: FolderFullCase, problem: FolderProblem) -> bool:
        """Return whether there is memory for what must be drawn, and the reference is affordable, on the whole problem
        or on one place of it."""
        if self._drawn_bytes(problem) > REAL_BYTES:
            return False
        if affordable(self._definition, problem):
            return True
        one = sliced(problem, {axis: np.zeros(1, np.int64) for axis in self._axes(case)})
        small = elements(self._definition, one) <= _SLICE_ELEMENTS // 4
        return bool(self._axes(case)) and small and operations(self._definition, one) <= _SLICE_OPERATIONS / 4

    def _launch(
        self, case: FolderFullCase, problem: FolderProblem, launch: Launch, seed: int, blocks: Sequence[int]
    ) -> BlockLaunch:
        parameters = self._workload.parameters(problem, case.config)
        pooled = self._pooled(problem)
        inputs = self._tensors.draw_some(Case(case.name, problem, config=case.config), seed, without=pooled)
        dtype = next((item.dtype for item in self._definition.inputs if item.name in pooled), "fp32")
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(POOL_PAGES, PAGE // DTYPE_BYTES[dtype], generator=generator)
        pool = Pool(normal.to(TORCH_DTYPES[dtype]).view(torch.uint8).numpy())
        arguments = [_with_contents(p, inputs) for p in parameters]
        return BlockLaunch(launch, arguments, pool, [ChosenBlock(b, _INPUT_LIMIT, ends=True) for b in blocks])

    def _pooled(self, problem: FolderProblem) -> frozenset[str]:
        """Return the inputs that are not drawn whole: where all are too large, those of normal numbers of one dtype."""
        if input_bytes(self._definition, problem) <= _SMALL_BYTES:
            return frozenset()
        draws = self._definition.draws_for(problem)
        random = [
            item
            for item in self._definition.inputs
            if item.shape is not None
            and TORCH_DTYPES[item.dtype].is_floating_point
            and item.name not in self._definition.constants.values()
            and (item.name not in draws or draws[item.name].kind == "random")
        ]
        largest = max(random, key=lambda item: prod(shape_of(item, problem)), default=None)
        return frozenset(item.name for item in random if largest is not None and item.dtype == largest.dtype)

    def _drawn_bytes(self, problem: FolderProblem) -> int:
        pooled = self._pooled(problem)
        drawn = [i for i in self._definition.inputs if i.shape is not None and i.name not in pooled]
        return sum(prod(shape_of(item, problem)) * DTYPE_BYTES[item.dtype] for item in drawn)

    def _affordable(self, case: FolderFullCase, places: Places) -> Places:
        """Return the places, or so many fewer along the axis with most that the reference of them is affordable."""
        found = dict(places)
        while elements(self._definition, sliced(case.problem, found)) > _SLICE_ELEMENTS:
            longest = max(found, key=lambda axis: len(found[axis]))
            if len(found[longest]) == 1:
                break
            found[longest] = found[longest][::2]
        return found

    def _check_cover(
        self, item: Item, case: FolderFullCase, asked: BlockLaunch, found: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Raise WrongBlock where the blocks' shares of an output leave some of it out.

        Where all blocks were run that is exact. Else the mean share of the chosen ones, times all blocks, must fall
        short of the output by more than chance explains.
        """
        total, size = prod(asked.launch.grid), prod(shape_of(item, case.problem))
        shares = np.array([len(places) for places, _ in found], np.float64)
        if not shares.any():
            raise NothingWritten(f"none of {len(found)} blocks wrote any of {item.name}", item.name)
        if len(found) == total:
            covered = len(np.unique(np.concatenate([places for places, _ in found])))
            if covered < size and TORCH_DTYPES[item.dtype].is_floating_point:
                raise WrongBlock(f"{size - covered} of {size} elements of {item.name} were written by no block")
            return
        most = shares.mean() + _SIGMAS * shares.std() / np.sqrt(len(shares))
        if max(most * total, shares.sum()) < size:
            each = f"{shares.mean():.0f} elements of {item.name} each"
            raise WrongBlock(f"{len(found)} of {total} blocks wrote {each}: all of them cannot cover its {size}")

    def _part(self, case: FolderFullCase, asked: BlockLaunch, stored: Sequence[Stored], places: Places) -> WrittenPart:
        """Return what was stored at some places, as a problem of its own; all else there as the reference has it."""
        part = sliced(case.problem, places)
        inputs = self._inputs(case.problem, asked, places)
        expected = self._tensors.reference(part, inputs)
        outputs: dict[str, torch.Tensor] = {}
        for item in self._definition.outputs:
            exact = expected[item.name].reshape(shape_of(item, part))
            flat = exact.to(TORCH_DTYPES[item.dtype]).reshape(-1).clone()
            for found in stored:
                _put(flat, exact.reshape(-1), *_within(item, case.problem, places, *found[item.name]))
            outputs[item.name] = flat.reshape(shape_of(item, part))
        own = Case(case.name, part, "normal", case.config)
        return WrittenPart(own, Drawn(inputs, inputs), outputs, expected)

    def _inputs(self, problem: FolderProblem, asked: BlockLaunch, places: Places) -> dict[str, torch.Tensor]:
        numbers = {argument.name: (number, argument) for number, argument in enumerate(asked.arguments)}
        constants = {name: symbol for symbol, name in self._definition.constants.items()}
        found = {}
        for item in self._definition.inputs:
            if item.shape is None:
                continue
            number, argument = numbers.get(item.name) or numbers[constants[item.name]]
            bits, size = _BITS[DTYPE_BYTES[item.dtype]], DTYPE_BYTES[item.dtype]
            at = _flat(shape_of(item, problem), indices(item, problem, places)) if places else None
            if isinstance(argument, TensorParameter):
                pool = asked.pool
                data = pool.read(number, 0, argument.bytes) if at is None else pool.take(number, at, size)
            else:
                assert isinstance(argument, TensorArgument | ConstantArgument)
                data = np.ascontiguousarray(argument.data).reshape(-1).view(np.uint8).view(bits)
                data = data if at is None else data[at]
            shape = [len(one) for one in indices(item, problem, places)]
            raw = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
            found[item.name] = raw.view(TORCH_DTYPES[item.dtype]).reshape(shape)
        return found


def _with_contents(parameter: Parameter, inputs: Inputs) -> BlockArgument:
    """Return an input that was drawn with its contents, all else as it is."""
    assert not isinstance(parameter, ScratchParameter)  # such kernels have no cases at full size
    if not isinstance(parameter, TensorParameter | ConstantParameter) or parameter.name not in inputs:
        assert not isinstance(parameter, ConstantParameter)  # those are never pooled
        return parameter
    data = inputs[parameter.name].reshape(-1).view(torch.uint8).numpy()
    if isinstance(parameter, ConstantParameter):
        return ConstantArgument(parameter.name, data)
    return TensorArgument(parameter.name, data.view(_BITS[DTYPE_BYTES[parameter.dtype]]).reshape(parameter.shape))


def _flat(shape: Sequence[int], at: Sequence[np.ndarray]) -> np.ndarray:
    """Return the places of the elements at the product of indices, in row-major order."""
    places = np.zeros((1,), np.int64)
    for size, one in zip(shape, at, strict=True):
        places = (places[:, None] * size + one[None, :]).reshape(-1)
    return places


def _stored(asked: BlockLaunch, one: BlockTrace) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the elements of each output that a block stored to: those that are no poison any more."""
    found = {}
    for p in asked.arguments:
        if not isinstance(p, TensorParameter) or not p.output:
            continue
        bits = _BITS[DTYPE_BYTES[p.dtype]]
        places, values = [np.empty(0, np.int64)], [np.empty(0, bits)]
        for offset, page in sorted(one.pages[p.name], key=lambda page: page[0]):
            stored = page.view(bits)
            own = np.flatnonzero(stored != np.iinfo(bits).max)
            places.append(own + offset // stored.itemsize)
            values.append(stored[own])
        found[p.name] = np.concatenate(places), np.concatenate(values)
    return found


def _places(
    definition: Definition, problem: FolderProblem, stored: Sequence[Stored], axes: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the indices along each axis at which any block stored to any output."""
    found: dict[str, list[np.ndarray]] = {axis: [] for axis in axes}
    for item in definition.outputs:
        names = [size.text for size in item.shape or ()]
        for one in stored:
            at = np.unravel_index(one[item.name][0], shape_of(item, problem))
            for axis in axes:
                found[axis].append(np.unique(at[names.index(axis)]))
    return {axis: np.unique(np.concatenate(parts)) for axis, parts in found.items()}


def _within(
    item: Item, problem: FolderProblem, places: Places, stored: np.ndarray, bits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return stored elements by their places in the part of the output that `places` names; others are left out."""
    at = np.unravel_index(stored, shape_of(item, problem))
    keep = np.ones(len(stored), bool)
    own: list[np.ndarray] = []
    of_part = indices(item, problem, places)
    for one, allowed in zip(at, of_part, strict=True):
        position = np.minimum(np.searchsorted(allowed, one), len(allowed) - 1)
        keep &= allowed[position] == one
        own.append(position)
    if not own:
        return stored, bits
    flat = np.ravel_multi_index(tuple(one[keep] for one in own), tuple(len(one) for one in of_part))
    return flat, bits[keep]


def _put(flat: torch.Tensor, exact: torch.Tensor, places: np.ndarray, bits: np.ndarray) -> None:
    """Put stored values into an output; where one is there already, that which is further from the exact one stays."""
    at = torch.from_numpy(places.astype(np.int64))
    values = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(flat.dtype)
    far = (values.double() - exact[at].double()).abs() >= (flat[at].double() - exact[at].double()).abs()
    worse = far | values.isnan()
    flat[at[worse]] = values[worse]
