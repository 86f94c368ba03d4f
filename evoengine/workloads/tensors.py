"""The tensor half that workloads share: torch's dtypes, and cases at full size whose blocks write rectangles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evoengine.devices import tensor_map
from evoengine.devices.base import (
    DTYPE_BYTES,
    ConstantParameter,
    PassedParameter,
    TensorArgument,
    TensorMapArgument,
    TensorParameter,
)
from evoengine.devices.pool import PAGE, BlockLaunch, BlockTrace, ChosenBlock, Pool
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case, Drawn, FullSize, Inputs, P, Workload, WrittenPart, WrongBlock
from evoengine.workloads.full_size import FullCase, choose_blocks

# Torch's dtypes by the dtype names of tensor parameters.

TORCH_DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int64": torch.int64,
    "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip # a table


POOL_PAGES = 256
_BITS: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32}

Read = Callable[[str, range, range], torch.Tensor]
"""reads rows and columns of an input by name, with rows numbered through outer axes; a vector is row 0"""


def normal_numbers(seed: int, device: str = "cpu") -> Callable[..., torch.Tensor]:
    """Return a function that draws standard normal numbers of a shape, float32, one tensor after the other."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    return normal


def sampled_rows(total: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return the numbers of `count` rows drawn from all, and of the first and the last, in order."""
    some = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]
    rows: torch.Tensor = torch.unique(torch.cat([some, torch.tensor([0, total - 1])]))
    return rows.to(device)


def check_tensor_maps(parameters: Sequence[object]) -> None:
    """Raise UsageError for a tensor map that the driver would refuse."""
    bytes_of = {p.name: p.bytes for p in parameters if isinstance(p, TensorParameter)}
    for found in parameters:
        if isinstance(found, TensorMapArgument):
            tensor_map.check(found, bytes_of[found.tensor])


def written_elements(one: BlockTrace, name: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers, int64, of the elements of an output that a block wrote, and their bits, in order."""
    bits, places, values = _BITS[DTYPE_BYTES[dtype]], [np.empty(0, np.int64)], []
    for offset, page in sorted(one.pages[name], key=lambda page: page[0]):
        elements = page.view(bits)
        own = np.flatnonzero(elements != np.iinfo(bits).max)
        places.append(own + offset // elements.itemsize)
        values.append(elements[own])
    return np.concatenate(places), np.concatenate(values) if values else np.empty(0, bits)


@dataclass(frozen=True, slots=True)
class Rectangle:
    rows: range
    columns: range

    def __str__(self) -> str:
        return f"rows {self.rows.start} to {self.rows.stop} and columns {self.columns.start} to {self.columns.stop}"


class RectangleFullSize(FullSize[FullCase[P]]):
    """Cases whose outputs all have one shape: [rows, columns], [entries, rows, columns], or [rows] as a column.

    Inputs have the pool's contents in the first input's dtype, unless `drawn` has others.
    """

    def __init__(self, workload: Workload[P]) -> None:
        self._workload = workload

    @abstractmethod
    def tile(self, problem: P, config: Config) -> tuple[int, int]:
        """Return the rows and columns that a block writes within the problem."""

    @abstractmethod
    def part(self, problem: P, rectangle: Rectangle, read: Read) -> tuple[P, Inputs]:
        """Return the rectangle of the outputs as a problem of its own, with its inputs."""

    def values(self, case: FullCase[P], normal: torch.Tensor) -> torch.Tensor:
        """Return the contents of inputs, computed from standard normal numbers."""
        return normal

    def drawn(self, case: FullCase[P], seed: int) -> Inputs:
        """Return inputs that are small or of another dtype than the first, with their own contents."""
        return {}

    def draw_blocks(self, case: FullCase[P], launch: Launch, seed: int) -> BlockLaunch:
        check_tensor_maps(self._workload.parameters(case.whole, case.config))
        own = self._workload.parameters(case.problem, case.config)
        drawn = self.drawn(case, seed)
        parameters = [_with_contents(p, drawn) for p in own if not isinstance(p, ConstantParameter)]
        dtype = next(p.dtype for p in parameters if isinstance(p, TensorParameter))
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(POOL_PAGES, PAGE // DTYPE_BYTES[dtype], generator=generator)
        pool = Pool(self.values(case, normal).to(TORCH_DTYPES[dtype]).view(torch.uint8).numpy())
        blocks = self.blocks(case, launch, seed)
        return BlockLaunch(launch, parameters, pool, blocks, together=len(blocks) if case.tiles else 1)

    def blocks(self, case: FullCase[P], launch: Launch, seed: int) -> list[ChosenBlock]:
        """Return the blocks to run; where tiles are shared, all that have a part of some tiles."""
        return choose_blocks(case, launch, seed)

    def tiles_of(self, case: FullCase[P], asked: BlockLaunch) -> range:
        """Return how many tiles a block that ends, or all blocks of shared tiles, may have written."""
        return range(1, 2)

    def written_parts(self, case: FullCase[P], asked: BlockLaunch, traces: Sequence[BlockTrace]) -> list[WrittenPart]:
        """Return the rectangles that the blocks wrote, with the values to compare them with.

        Raises WrongBlock if a block did not finish that should have, if it wrote anything but whole tiles of every
        output and as many as it should, or if two blocks wrote the same tile.
        """
        outputs = {p.name: p for p in asked.arguments if isinstance(p, TensorParameter) and p.output}
        tile, possible = self.tile(case.problem, case.config), self.tiles_of(case, asked)
        parameters = self._workload.parameters(case.problem, case.config)
        read = _reader(asked, {p.name: p.dtype for p in parameters if isinstance(p, TensorParameter)})
        owners: dict[tuple[str, Rectangle], int] = {}
        parts = []
        never_ends = {chosen.number for chosen in asked.blocks if not chosen.ends}
        for one in traces:
            who = f"block {one.block}" if asked.together == 1 else f"{asked.together} blocks, which share tiles,"
            if one.given_up and one.block not in never_ends:
                raise WrongBlock(f"{who} read far more than its outputs need")
            found = {name: dict(_written(one, p, tile)) for name, p in outputs.items()}
            for name, rectangles in found.items():
                for rectangle in rectangles:
                    other = owners.setdefault((name, rectangle), one.block)
                    if other != one.block:
                        raise WrongBlock(f"blocks {other} and {one.block} both wrote {rectangle} of {name}")
                if not one.given_up and len(rectangles) not in possible:
                    wanted = possible.start if len(possible) == 1 else f"{possible.start} to {possible.stop - 1}"
                    raise WrongBlock(f"{who} wrote {len(rectangles)} tiles of {name}, which should be {wanted}")
            first, *others = found.values()
            if any(other.keys() != first.keys() for other in others):
                unlike = ", ".join(str(rectangle) for each in found.values() for rectangle in each)
                raise WrongBlock(f"block {one.block} wrote unlike rectangles: {unlike}")
            for rectangle in first:
                own, inputs = self.part(case.problem, rectangle, read)
                written = {name: rectangles[rectangle] for name, rectangles in found.items()}
                own_case = Case(case.name, own, "full size", case.config)
                parts.append(WrittenPart(own_case, Drawn(inputs, inputs), written))
        return parts


def _written(
    one: BlockTrace, parameter: TensorParameter, tile: tuple[int, int]
) -> Iterator[tuple[Rectangle, torch.Tensor]]:
    """Yield the tiles of an output that a block wrote, with their values; rows are numbered through outer axes.

    For an aborted block, only those that it wrote completely. Raises WrongBlock if another block wrote nothing, or a
    tile in part.
    """
    (rows, columns), (place, value) = _sides(parameter), written_elements(one, parameter.name, parameter.dtype)
    if not place.size:
        if one.given_up:
            return
        raise WrongBlock(f"block {one.block} wrote nothing of {parameter.name}")
    row, column = place // columns, place % columns
    across = -(-columns // tile[1])
    number = (row // rows * -(-rows // tile[0]) + row % rows // tile[0]) * across + column // tile[1]
    for each in np.unique(number):
        own = number == each
        rectangle = Rectangle(_range(row[own]), _range(column[own]))
        why = _why_no_tile(one, parameter, rectangle, tile, int(own.sum()))
        if why and one.given_up:
            continue
        if why:
            raise WrongBlock(why)
        shape = (len(rectangle.rows), len(rectangle.columns))[: len(parameter.shape)]
        yield rectangle, torch.from_numpy(value[own].reshape(shape)).view(TORCH_DTYPES[parameter.dtype])


def _sides(parameter: TensorParameter) -> tuple[int, int]:
    """Return the rows and columns of an entry of an output."""
    rows, columns = (*parameter.shape, 1)[-2:] if len(parameter.shape) == 1 else parameter.shape[-2:]
    return rows, columns


def _range(numbers: np.ndarray) -> range:
    return range(int(numbers.min()), int(numbers.max()) + 1)


def _why_no_tile(
    one: BlockTrace, parameter: TensorParameter, rectangle: Rectangle, tile: tuple[int, int], count: int
) -> str | None:
    """Return why the elements that a block wrote within a tile are not the whole tile."""
    if count != len(rectangle.rows) * len(rectangle.columns):
        return f"block {one.block} wrote {count} elements of {rectangle} of {parameter.name}, not all of them"
    for wanted, found, size in zip(tile, (rectangle.rows, rectangle.columns), _sides(parameter), strict=True):
        first = found.start % size
        if first % wanted or len(found) != min(wanted, size - first):
            return (
                f"block {one.block} wrote {rectangle} of {parameter.name}, which is not one of its tiles of "
                f"{tile[0]} x {tile[1]}"
            )
    return None


def _with_contents(parameter: PassedParameter, drawn: Inputs) -> PassedParameter | TensorArgument:
    if not isinstance(parameter, TensorParameter) or parameter.name not in drawn:
        return parameter
    contents = drawn[parameter.name].contiguous().view(-1).view(torch.uint8).numpy()
    return TensorArgument(parameter.name, contents.view(_BITS[DTYPE_BYTES[parameter.dtype]]).reshape(parameter.shape))


def _reader(asked: BlockLaunch, dtypes: Mapping[str, str]) -> Read:
    tensors = {p.name: (i, p) for i, p in enumerate(asked.arguments) if isinstance(p, TensorParameter | TensorArgument)}

    def read(name: str, rows: range, columns: range) -> torch.Tensor:
        number, parameter = tensors[name]
        if isinstance(parameter, TensorArgument):
            width = parameter.data.shape[-1]
            whole = torch.from_numpy(parameter.data.reshape(-1).view(np.uint8)).view(TORCH_DTYPES[dtypes[name]])
            return whole.reshape(-1, width)[rows.start : rows.stop, columns.start : columns.stop]
        size, width = DTYPE_BYTES[parameter.dtype], parameter.shape[-1]
        starts = size * (np.arange(rows.start, rows.stop, rows.step) * width + columns.start)
        data = asked.pool.read_rows(number, starts, size * len(columns))
        return torch.from_numpy(data).view(TORCH_DTYPES[parameter.dtype])

    return read
