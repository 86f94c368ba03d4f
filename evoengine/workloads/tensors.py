"""The tensor half that workloads share: torch's dtypes, and cases at full size that write rectangles (`blocks.py`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evoengine.devices import tensor_map
from evoengine.devices.base import DTYPE_BYTES, ConstantParameter, TensorMapArgument, TensorParameter
from evoengine.devices.pool import PAGE, BlockLaunch, BlockTrace, Pool
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case, Drawn, FullSize, Inputs, P, Workload, WrittenPart, WrongBlock
from evoengine.workloads.rectangles import FullCase, choose_blocks

# Torch's dtypes by the names that tensor parameters have.

TORCH_DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int64": torch.int64,
    "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip # a table


POOL_PAGES = 256
_BITS: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32}

Read = Callable[[str, range, range], torch.Tensor]
"""reads rows and columns of an input by its name; a vector is row 0"""


@dataclass(frozen=True, slots=True)
class Rectangle:
    rows: range
    columns: range

    def __str__(self) -> str:
        return f"rows {self.rows.start} to {self.rows.stop} and columns {self.columns.start} to {self.columns.stop}"


class RectangleFullSize(FullSize[FullCase[P]]):
    """All inputs have one dtype, and all outputs have the same shape [rows, columns]."""

    def __init__(self, workload: Workload[P]) -> None:
        self._workload = workload

    @abstractmethod
    def tile(self, problem: P, config: Config) -> tuple[int, int]:
        """Return the rows and columns that a block writes, where the problem has them."""

    @abstractmethod
    def part(self, problem: P, rectangle: Rectangle, read: Read) -> tuple[P, Inputs]:
        """Return the rectangle of the outputs as a problem of its own, with its inputs."""

    def values(self, case: FullCase[P], normal: torch.Tensor) -> torch.Tensor:
        """Return what inputs hold, made from standard normal numbers."""
        return normal

    def draw_blocks(self, case: FullCase[P], launch: Launch, seed: int) -> BlockLaunch:
        whole = self._workload.parameters(case.whole, case.config)
        bytes_of = {p.name: p.bytes for p in whole if isinstance(p, TensorParameter)}
        for found in whole:
            if isinstance(found, TensorMapArgument):
                tensor_map.check(found, bytes_of[found.tensor])
        own = self._workload.parameters(case.problem, case.config)
        parameters = [p for p in own if not isinstance(p, ConstantParameter)]
        dtype = next(p.dtype for p in parameters if isinstance(p, TensorParameter))
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(POOL_PAGES, PAGE // DTYPE_BYTES[dtype], generator=generator)
        pool = Pool(self.values(case, normal).to(TORCH_DTYPES[dtype]).view(torch.uint8).numpy())
        return BlockLaunch(launch, parameters, pool, choose_blocks(case, launch, seed))

    def written_parts(self, case: FullCase[P], asked: BlockLaunch, traces: Sequence[BlockTrace]) -> list[WrittenPart]:
        """Return the rectangles that the blocks wrote, with what to compare them with.

        Raises WrongBlock where a block did not finish, or wrote anything but one whole tile of every output, or where
        two wrote the same.
        """
        tensors = {p.name: p for p in asked.arguments if isinstance(p, TensorParameter)}
        tile = self.tile(case.problem, case.config)
        owners: dict[tuple[str, Rectangle], int] = {}
        parts = []
        for one in traces:
            if one.given_up:
                raise WrongBlock(f"block {one.block} read far more than its outputs need")
            found = {name: _written(one, p) for name, p in tensors.items() if p.output}
            for name, (rectangle, _) in found.items():
                _check_whole(one, tensors[name], rectangle, tile)
                other = owners.setdefault((name, rectangle), one.block)
                if other != one.block:
                    raise WrongBlock(f"blocks {other} and {one.block} both wrote {rectangle} of {name}")
            rectangles = {rectangle for rectangle, _ in found.values()}
            if len(rectangles) > 1:
                raise WrongBlock(f"block {one.block} wrote unlike rectangles: {', '.join(map(str, rectangles))}")
            own, inputs = self.part(case.problem, rectangles.pop(), _reader(asked))
            outputs = {name: values for name, (_, values) in found.items()}
            parts.append(WrittenPart(Case(case.name, own, "full size", case.config), Drawn(inputs, inputs), outputs))
        return parts


def _written(one: BlockTrace, parameter: TensorParameter) -> tuple[Rectangle, torch.Tensor]:
    """Return the rectangle of an output that a block wrote, with its values.

    Raises WrongBlock where it wrote nothing, or not all of the rectangle.
    """
    bits, columns = _BITS[DTYPE_BYTES[parameter.dtype]], parameter.shape[-1]
    places, values = [], []
    for offset, page in sorted(one.pages[parameter.name], key=lambda page: page[0]):
        elements = page.view(bits)
        own = np.flatnonzero(elements != np.iinfo(bits).max)
        places.append(own + offset // elements.itemsize)
        values.append(elements[own])
    place = np.concatenate(places) if places else np.empty(0, np.int64)
    if not place.size:
        raise WrongBlock(f"block {one.block} wrote nothing of {parameter.name}")
    row, column = place // columns, place % columns
    rectangle = Rectangle(range(row.min(), row.max() + 1), range(column.min(), column.max() + 1))
    shape = len(rectangle.rows), len(rectangle.columns)
    if place.size != shape[0] * shape[1]:
        raise WrongBlock(
            f"block {one.block} wrote {place.size} elements of {rectangle} of {parameter.name}, not all of them"
        )
    return rectangle, torch.from_numpy(np.concatenate(values).reshape(shape)).view(TORCH_DTYPES[parameter.dtype])


def _check_whole(one: BlockTrace, parameter: TensorParameter, rectangle: Rectangle, tile: tuple[int, int]) -> None:
    for wanted, found, size in zip(tile, (rectangle.rows, rectangle.columns), parameter.shape, strict=True):
        if found.start % wanted or len(found) != min(wanted, size - found.start):
            raise WrongBlock(
                f"block {one.block} wrote {rectangle} of {parameter.name}, which is not one of its tiles of "
                f"{tile[0]} x {tile[1]}"
            )


def _reader(asked: BlockLaunch) -> Read:
    tensors = {p.name: (i, p) for i, p in enumerate(asked.arguments) if isinstance(p, TensorParameter)}

    def read(name: str, rows: range, columns: range) -> torch.Tensor:
        number, parameter = tensors[name]
        size, width = DTYPE_BYTES[parameter.dtype], parameter.shape[-1]
        starts = size * (np.arange(rows.start, rows.stop, rows.step) * width + columns.start)
        data = asked.pool.read_rows(number, starts, size * len(columns))
        return torch.from_numpy(data).view(TORCH_DTYPES[parameter.dtype])

    return read
