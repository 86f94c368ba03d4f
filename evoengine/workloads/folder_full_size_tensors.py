"""A folder's problem at full size: the kernel's arguments, and what the executed blocks should have written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np
import torch

from evoengine.devices.base import (
    DTYPE_BYTES,
    ConstantArgument,
    ConstantParameter,
    Parameter,
    TensorArgument,
    TensorParameter,
)
from evoengine.devices.pool import PAGE, BlockArgument, BlockLaunch, BlockTrace, ChosenBlock, Pool, RunBlocks
from evoengine.errors import UsageError
from evoengine.records import Launch
from evoengine.workloads.base import (
    Case,
    Drawn,
    FullSize,
    Grouped,
    Inputs,
    NothingWritten,
    Outputs,
    Workload,
    WrittenPart,
    WrongBlock,
    taken,
)
from evoengine.workloads.folder_cases import (
    INTEGER_PATTERN,
    REAL_BYTES,
    FolderFullCase,
    affordable,
    blocks_to_draw,
    elements,
    input_bytes,
    operations,
    patterns,
)
from evoengine.workloads.folder_chains import Chain, nothing_of
from evoengine.workloads.folder_definition import Definition, FolderProblem, Item, first_config, shape_of, whole
from evoengine.workloads.folder_groups import chosen_groups, groupings
from evoengine.workloads.folder_tensors import FolderTensors, random_values
from evoengine.workloads.folder_tiles import (
    BITS,
    Stored,
    check_cover,
    flat_places,
    require_apart,
    stored_elements,
    with_tiles,
)
from evoengine.workloads.full_size import DRAWN, chosen_blocks
from evoengine.workloads.tensors import TORCH_DTYPES

POOL_PAGES = 256
_INPUT_LIMIT = 1 << 28
"""bytes of pooled inputs after which a block is aborted"""
_SMALL_BYTES = 1 << 22
"""limit of the bytes of inputs that are passed to the emulator whole"""
_ALL = 64
"""number of blocks up to which all blocks of a launch are run"""
_GROUPED = 192
"""limit of the blocks that are run in groups"""
_SLICE_ELEMENTS, _SLICE_OPERATIONS = 1 << 24, 4e9
"""limits of elements and of operations of the reference for a few places"""
_ALL_ELEMENTS = 1 << 26
"""limit of the elements of the references for all places"""


class FolderFullSize(FullSize[FolderFullCase]):
    unknown_cost = True

    def __init__(self, workload: Workload[FolderProblem], definition: Definition) -> None:
        self._workload, self._definition = workload, definition
        self._tensors = FolderTensors(definition)

    def draw_blocks(self, case: FolderFullCase, launch: Launch, seed: int) -> BlockLaunch | None:
        """Return the blocks to run.

        None if the reference is not affordable at that size, or if the case is a part of a problem whose reference is.
        """
        can_whole = (
            self._drawn_bytes(case.whole) <= REAL_BYTES if not case.compared else self._can_be_judged(case, case.whole)
        )
        if (case.part is not None) == can_whole:
            return None
        drawn = blocks_to_draw(case, self._definition, launch, DRAWN)
        total = prod(launch.grid)
        chosen = list(range(total)) if total <= _ALL else chosen_blocks(launch.grid, seed, drawn)
        order = np.random.default_rng(seed).permutation(chosen)
        return self._launch(case, case.problem, launch, seed, [int(block) for block in order])

    def alone(self, case: FolderFullCase, seed: int) -> BlockLaunch:
        """Return the blocks of a small launch, each run alone, with repeated indices if blocks may collide by them."""
        total = prod(case.small_launch.grid)
        draw = (
            INTEGER_PATTERN
            if not case.alone and INTEGER_PATTERN in patterns(self._definition, case.small)
            else "normal"
        )
        return self._launch(case, case.small, case.small_launch, seed, list(range(min(total, _ALL))), draw)

    def needs_others(self, case: FolderFullCase) -> bool:
        return not case.alone

    def in_small(self, case: FolderFullCase) -> FolderFullCase:
        return replace(case, problem=case.small)

    def groups(self, case: FolderFullCase, launch: Launch, seed: int) -> Iterator[tuple[Grouped, Grouped]]:
        """Yield groups of blocks that may share tiles, of a small launch and of this one, where values can be compared.

        Those of a kernel with scratch memory, whose blocks by themselves need not do what they should.
        """
        if case.compared or case.entry not in (None, self._definition.entry) or self._definition.then:
            return
        if not self._can_be_judged(case, case.whole):
            return
        compared = replace(case, compared=True)
        for way in groupings(case.small_launch.grid, launch.grid, case.config):
            found = []
            for one, at in ((self.in_small(compared), case.small_launch), (compared, launch)):
                size = way.size(at.grid)
                groups = chosen_groups(prod(at.grid) // size, max(3, _GROUPED // size), seed)
                blocks = [block for group in groups for block in way.members(at.grid, group)]
                asked = self._launch(one, one.problem, at, seed, blocks)
                found.append((one, replace(asked, together=size)))
            yield found[0], found[1]

    def chained(
        self, case: FolderFullCase, launch: Launch | None, seed: int, run: RunBlocks, seconds: float
    ) -> tuple[list[WrittenPart], int]:
        if launch is None:
            return self.chained(self.in_small(case), case.small_launch, seed, run, seconds)
        if not self._can_be_judged(case, case.whole):
            return [], 0
        every, pool = self._arguments(case, case.problem, seed)
        kernels = [
            BlockLaunch(one, taken(self._workload, entry, every), pool, (), entry)
            for entry, one in launch.kernels(self._definition.entry)
        ]
        numbers = {argument.name: number for number, argument in enumerate(every)}
        stored = Chain(kernels, numbers, run, seed, seconds).stored()
        outputs = [item.name for item in self._definition.outputs]
        nothing = {a.name: nothing_of(a) for a in every if a.name in outputs}
        found = [{name: one.get(name, nothing[name]) for name in outputs} for one in stored]
        if not any(places.size for one in found for places, _ in one.values()):
            return [], 0
        return self._parts(case, BlockLaunch(launch, every, pool, ()), found), len(found)

    def written_parts(
        self, case: FolderFullCase, asked: BlockLaunch, traces: Sequence[BlockTrace]
    ) -> list[WrittenPart]:
        """Return the outputs that blocks wrote, at the places along independent axes where they wrote.

        Raises WrongBlock if a block read too much or stores cannot cover an output, and NothingWritten if no block
        wrote any of an output.
        """
        if not case.compared:
            return []
        for one in traces:
            if one.given_up:
                raise WrongBlock(f"block {one.block} read more than {_INPUT_LIMIT:,} bytes of its inputs")
        every = [stored_elements(asked, one) for one in traces]
        if asked.together == 1:
            for item in self._definition.outputs:
                check_cover(item, case.problem, asked, every)
            self._require_apart(asked, every)
            every = with_tiles(self._definition, case.problem, asked, every)
        elif not all(any(places.size for places, _ in found.values()) for found in every):
            name = self._definition.outputs[0].name
            raise NothingWritten(f"{asked.together} blocks that share a tile wrote none of {name}", name)
        return self._parts(case, asked, every)

    def _require_apart(self, asked: BlockLaunch, every: Sequence[Stored]) -> None:
        """Raise WrongBlock if two blocks store to the same elements; those of in-place tensors may add to them."""
        if self._definition.inout or asked.launch.grid == (1, 1, 1):
            return
        places = [[found[item.name][0] for item in self._definition.outputs] for found in every]
        require_apart([block.number for block in asked.blocks], places)

    def _parts(self, case: FolderFullCase, asked: BlockLaunch, every: Sequence[Stored]) -> list[WrittenPart]:
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
        """Return groups of blocks that wrote at the same places, with these places."""
        found: dict[tuple[bytes, ...], tuple[Places, list[Stored]]] = {}
        for one in stored:
            places = _places(self._definition, case.problem, [one], axes)
            found.setdefault(tuple(at.tobytes() for at in places.values()), (places, []))[1].append(one)
        return list(found.values())

    def _affordable_parts(
        self, case: FolderFullCase, asked: BlockLaunch, alike: Sequence[tuple[Places, list[Stored]]]
    ) -> list[WrittenPart]:
        """Return parts until the time is used up; each states how many blocks it is from, if not from all."""
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
        self,
        case: FolderFullCase,
        problem: FolderProblem,
        launch: Launch,
        seed: int,
        blocks: Sequence[int],
        draw: str = "normal",
    ) -> BlockLaunch:
        every, pool = self._arguments(case, problem, seed, draw)
        arguments = taken(self._workload, case.entry or self._workload.entry, every)
        return BlockLaunch(launch, arguments, pool, _all_of(blocks), case.entry)

    def _arguments(
        self, case: FolderFullCase, problem: FolderProblem, seed: int, draw: str = "normal"
    ) -> tuple[list[BlockArgument], Pool]:
        """Return the arguments of all kernels, with contents where they are drawn whole, and the pool of the others."""
        pooled = self._pooled(problem)
        inputs = self._tensors.draw_some(Case(case.name, problem, draw, case.config), seed, without=pooled)
        dtype = next((item.dtype for item in self._definition.inputs if item.name in pooled), "fp32")
        generator = torch.Generator().manual_seed(seed)
        values = random_values(dtype, (POOL_PAGES, PAGE // DTYPE_BYTES[dtype]), generator)
        every = self._workload.parameters(problem, case.config)
        return [_with_contents(p, inputs) for p in every], Pool(values.view(torch.uint8).numpy())

    def _pooled(self, problem: FolderProblem) -> frozenset[str]:
        """Return the inputs that are not drawn whole: if all together are too large, the `random` ones of one dtype."""
        if input_bytes(self._definition, problem) <= _SMALL_BYTES and not self._definition.inout:
            return frozenset()
        draws = self._definition.draws_for(problem)
        random = [
            item
            for item in self._definition.inputs
            if item.shape is not None
            and item.name not in self._definition.constants.values()
            and (item.name not in draws or draws[item.name].kind == "random")
        ]
        inout = self._definition.inout
        largest = max(random, key=lambda item: (item.name in inout, prod(shape_of(item, problem))), default=None)
        return frozenset(item.name for item in random if largest is not None and item.dtype == largest.dtype)

    def _drawn_bytes(self, problem: FolderProblem) -> int:
        pooled = self._pooled(problem)
        drawn = [i for i in self._definition.inputs if i.shape is not None and i.name not in pooled]
        return sum(prod(shape_of(item, problem)) * DTYPE_BYTES[item.dtype] for item in drawn)

    def _affordable(self, case: FolderFullCase, places: Places) -> Places:
        """Return the places, or fewer along the longest axis until their reference is affordable."""
        found = dict(places)
        while elements(self._definition, sliced(case.problem, found)) > _SLICE_ELEMENTS:
            longest = max(found, key=lambda axis: len(found[axis]))
            if len(found[longest]) == 1:
                break
            found[longest] = found[longest][::2]
        return found

    def _part(self, case: FolderFullCase, asked: BlockLaunch, stored: Sequence[Stored], places: Places) -> WrittenPart:
        """Return the values stored at some places as a problem of its own; all other elements are the reference's."""
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
            at = flat_places(shape_of(item, problem), indices(item, problem, places)) if places else None
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


def _all_of(blocks: Iterable[int]) -> list[ChosenBlock]:
    return [ChosenBlock(block, _INPUT_LIMIT, ends=True) for block in blocks]


def _with_contents(parameter: Parameter, inputs: Inputs) -> BlockArgument:
    """Return an input that was drawn with its contents; other values unchanged."""
    if not isinstance(parameter, TensorParameter | ConstantParameter) or parameter.name not in inputs:
        assert not isinstance(parameter, ConstantParameter)  # such inputs are never pooled
        return parameter
    data = inputs[parameter.name].reshape(-1).view(torch.uint8).numpy()
    if isinstance(parameter, ConstantParameter):
        return ConstantArgument(parameter.name, data)
    bits = data.view(BITS[DTYPE_BYTES[parameter.dtype]]).reshape(parameter.shape)
    return TensorArgument(parameter.name, bits, parameter.output, parameter.inout, parameter.passed)


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
    """Return stored elements by their positions in the part of the output that `places` names; others are omitted."""
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
    """Put stored values into an output; of two values at a position the one farther from the exact value is kept."""
    at = torch.from_numpy(places.astype(np.int64))
    values = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(flat.dtype)
    far = (values.double() - exact[at].double()).abs() >= (flat[at].double() - exact[at].double()).abs()
    worse = far | values.isnan()
    flat[at[worse]] = values[worse]


# Find axes along which a reference computes each output only from the inputs at the same place. // Along them a few
# places of a problem of any size are a small problem of their own: rows of a softmax, rows and columns of a matrix
# product.

Places = Mapping[str, np.ndarray]
"""axis → indices along it, int64, ascending"""
LEAST = 3
"""minimum length of an axis whose independence can be shown"""
_SAME = 1e-9
"""allowed relative difference of float64 results that were summed in another order"""


def independent_axes(definition: Definition, problem: FolderProblem) -> tuple[str, ...]:
    """Return the independent axes, determined by computing a small problem as a whole and at a few places.

    An axis that occurs in an expression of a shape is not independent.
    """
    return _independent(_Key(definition), problem)


class _Key:
    """The parts of a definition on which its independent axes depend."""

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
    inputs = tensors.draw(Case("slices", problem, config=first_config(definition)), seed=1).inputs
    try:
        expected = tensors.reference(problem, inputs)
        alone = [a for a in _candidates(definition, problem) if _holds(definition, problem, inputs, expected, [a])]
        while alone and not _holds(definition, problem, inputs, expected, alone):
            alone.pop()
    except UsageError:
        return ()
    return tuple(alone)


def _candidates(definition: Definition, problem: FolderProblem) -> list[str]:
    """Return axes that are a dimension of some input and of every output, and not part of an expression."""
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
    """Return whether some places along the axes (first, last, one between) give the results of the whole problem."""
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
    """Return the problem of those places, whose number is the length of each of their axes."""
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
