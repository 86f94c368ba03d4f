"""A folder's problem at full size: the kernel's arguments, and what the blocks that were run should have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

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
)
from evoengine.devices.pool import PAGE, BlockArgument, BlockLaunch, BlockTrace, ChosenBlock, Pool
from evoengine.records import Launch
from evoengine.workloads.base import Case, Drawn, FullSize, Inputs, Workload, WrittenPart, WrongBlock
from evoengine.workloads.blocks import DRAWN, chosen_blocks
from evoengine.workloads.dtypes import TORCH_DTYPES
from evoengine.workloads.folder_cover import BITS, Stored, check_cover, check_idle, stored_elements
from evoengine.workloads.folder_definition import Definition, FolderProblem, Item, shape_of
from evoengine.workloads.folder_extents import elements, input_bytes, operations
from evoengine.workloads.folder_full_size import REAL_BYTES, FolderFullCase, affordable, blocks_to_draw
from evoengine.workloads.folder_slices import Places, independent_axes, indices, sliced
from evoengine.workloads.folder_tensors import FolderTensors

POOL_PAGES = 256
_INPUT_LIMIT = 1 << 28
"""bytes of pooled inputs after which a block is aborted"""
_SMALL_BYTES = 1 << 22
"""limit of inputs that are passed to the emulator whole"""
_ALL = 64
"""number of blocks up to which all blocks of a launch are run"""
_SLICE_ELEMENTS, _SLICE_OPERATIONS = 1 << 24, 4e9
"""of the reference of a few places"""
_ALL_ELEMENTS = 1 << 26
"""of the references of all places"""


class FolderFullSize(FullSize[FolderFullCase]):
    unknown_cost = True

    def __init__(self, workload: Workload[FolderProblem], definition: Definition) -> None:
        self._workload, self._definition = workload, definition
        self._tensors = FolderTensors(definition)

    def draw_blocks(self, case: FolderFullCase, launch: Launch, seed: int) -> BlockLaunch | None:
        """Return the blocks to run.

        None where the reference is not affordable at that size, or where it is affordable at the whole one's and the
        case is a part of it.
        """
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
        return {name for one in traces for name, (places, _) in stored_elements(asked, one).items() if places.size}

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
        every = [stored_elements(asked, one) for one in traces]
        for item in self._definition.outputs:
            check_cover(item, case.problem, asked, every)
            check_idle(item, case.problem, asked, every)
        stored = [found for found in every if any(places.size for places, _ in found.values())]
        axes = self._axes(case)
        if not axes:
            return [self._part(case, asked, stored, {})]
        union = _places(self._definition, case.problem, stored, axes)
        alike = self._alike(case, stored, axes)
        apart = sum(elements(self._definition, sliced(case.problem, places)) for places, _ in alike)
        together = elements(self._definition, sliced(case.problem, union))
        if together <= min(2 * apart, _SLICE_ELEMENTS):
            return [self._part(case, asked, stored, union)]
        return self._affordable_parts(case, asked, alike)

    def _alike(
        self, case: FolderFullCase, stored: Sequence[Stored], axes: Sequence[str]
    ) -> list[tuple[Places, list[Stored]]]:
        """Return the blocks that wrote at the same places together, with these places."""
        found: dict[tuple[bytes, ...], tuple[Places, list[Stored]]] = {}
        for one in stored:
            places = _places(self._definition, case.problem, [one], axes)
            found.setdefault(tuple(at.tobytes() for at in places.values()), (places, []))[1].append(one)
        return list(found.values())

    def _affordable_parts(
        self, case: FolderFullCase, asked: BlockLaunch, alike: Sequence[tuple[Places, list[Stored]]]
    ) -> list[WrittenPart]:
        """Return parts until there is no time for more; a part says how many blocks they are of, where not of all."""
        parts: list[WrittenPart] = []
        spent = compared = 0
        for places, blocks in alike:
            fewer = self._affordable(case, places)
            spent += elements(self._definition, sliced(case.problem, fewer))
            if parts and spent > _ALL_ELEMENTS:
                some = f"{compared:,} of {prod(asked.launch.grid):,} blocks"
                return [replace(part, case=replace(part.case, part=some)) for part in parts]
            parts.append(self._part(case, asked, blocks, fewer))
            compared += len(blocks)
        return parts

    def _axes(self, case: FolderFullCase) -> tuple[str, ...]:
        return independent_axes(self._definition, case.small)

    def _can_be_judged(self, case: FolderFullCase, problem: FolderProblem) -> bool:
        """Return whether the drawn inputs fit in memory and the reference is affordable.

        The reference runs on the whole problem or on a single place of it.
        """
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
            bits, size = BITS[DTYPE_BYTES[item.dtype]], DTYPE_BYTES[item.dtype]
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
    return TensorArgument(parameter.name, data.view(BITS[DTYPE_BYTES[parameter.dtype]]).reshape(parameter.shape))


def _flat(shape: Sequence[int], at: Sequence[np.ndarray]) -> np.ndarray:
    """Return the places of the elements at the product of indices, in row-major order."""
    places = np.zeros((1,), np.int64)
    for size, one in zip(shape, at, strict=True):
        places = (places[:, None] * size + one[None, :]).reshape(-1)
    return places


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
