"""Packed sequences at full size: the kernel's arguments over a pool, and what its blocks should have written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from evoengine.devices.base import ConstantParameter, TensorArgument
from evoengine.devices.pool import PAGE, BlockArgument, BlockLaunch, BlockTrace, ChosenBlock, Pool
from evoengine.records import Launch
from evoengine.workloads.attention.problem import OUTPUT
from evoengine.workloads.attention.tensors import TORCH_DTYPES
from evoengine.workloads.base import AnyWorkload, Case, Drawn, FullSize, WrittenPart, WrongBlock
from evoengine.workloads.varlen.full_size import FullCase
from evoengine.workloads.varlen.problem import VarlenProblem
from evoengine.workloads.varlen.tensors import draw_table, index_tensors

POOL_PAGES = 256
_UNWRITTEN = 0xFFFF
Tile = tuple[int, int, int]
"""a head, a sequence and a tile of its rows"""


class VarlenFullSize(FullSize[FullCase]):
    def __init__(self, workload: AnyWorkload) -> None:
        self._workload = workload

    def draw_blocks(self, case: FullCase, launch: Launch, seed: int) -> BlockLaunch:
        p, generator = case.problem, torch.Generator().manual_seed(seed)
        given = index_tensors(p, draw_table(p, seed))
        own: list[BlockArgument] = [
            TensorArgument(a.name, given[a.name].view(np.uint32)) if a.name in given else a
            for a in self._workload.parameters(p, case.config)
            if not isinstance(a, ConstantParameter)
        ]
        values = torch.randn(POOL_PAGES, PAGE // 2, generator=generator).to(TORCH_DTYPES[p.dtype])
        limit = case.rounds * _tile_bytes(case)
        blocks = [ChosenBlock(number, limit, True) for number in case.blocks(launch, seed)]
        return BlockLaunch(launch, own, Pool(values.view(torch.uint8).numpy()), blocks)

    def written_parts(self, case: FullCase, asked: BlockLaunch, traces: Sequence[BlockTrace]) -> list[WrittenPart]:
        """Return the tiles of rows that the blocks wrote, each as a problem of one sequence.

        Raises WrongBlock if one wrote a tile in part, another number of tiles than its own, or another block's.
        """
        owners: dict[Tile, int] = {}
        found: list[WrittenPart] = []
        for one in traces:
            if one.given_up:
                raise WrongBlock(f"block {one.block} read far more than its rows and the keys of their sequences")
            tiles = list(_tiles(case, one))
            if len(tiles) not in (wanted := _shares(case, asked.launch)):
                raise WrongBlock(f"block {one.block} wrote {len(tiles)} tiles of rows, which should be {wanted[0]}")
            for tile, rows in tiles:
                if owners.setdefault(tile, one.block) != one.block:
                    raise WrongBlock(f"blocks {owners[tile]} and {one.block} both wrote tile {tile[2]} of a sequence")
                found.append(_part(case, asked, tile, rows))
        return found


def _tile_bytes(case: FullCase) -> int:
    """Return the bytes, in whole pages of memory, that a tile of rows reads, including a few further tiles of keys."""
    p, config = case.problem, case.config
    keys = max(p.kv_lens) + (int(config.get("stages", 1)) + 1) * int(config["tile_n"])
    of_keys = _memory_pages(keys, p.page or keys, 2 * p.kv_heads * p.head_dim)
    return PAGE * (2 * of_keys + _memory_pages(int(config["tile_m"]), int(config["tile_m"]), 2 * p.heads * p.head_dim))


def _memory_pages(rows: int, together: int, stride: int) -> int:
    """Return how many pages contain one head of rows, which are `stride` bytes apart."""
    each = min(2 * together, -(-together * stride // PAGE) + 1)
    return -(-rows // together) * each


def _shares(case: FullCase, launch: Launch) -> tuple[int, ...]:
    """Return how many tiles of rows a block may have."""
    if case.rounds == 1:
        return (1,)
    share, left = divmod(case.tiles, launch.grid[0])
    return (share, share + 1) if left else (share,)


def _tiles(case: FullCase, one: BlockTrace) -> Iterator[tuple[Tile, np.ndarray]]:
    """Yield each tile that the block wrote, with its rows as bits [rows, head_dim]."""
    p, tile_m = case.problem, int(case.config["tile_m"])
    ends = np.cumsum(p.lens)
    rows: dict[tuple[int, int], np.ndarray] = {}
    for offset, page in one.pages[OUTPUT]:
        bits = page.view(np.uint16)
        for at in np.unique((offset // 2 + np.flatnonzero(bits != _UNWRITTEN)) // p.head_dim):
            row, head = divmod(int(at), p.heads)
            own = rows.setdefault((head, row), np.full(p.head_dim, _UNWRITTEN, np.uint16))
            first = int(at) * p.head_dim - offset // 2
            begin, end = max(first, 0), min(first + p.head_dim, len(bits))
            own[begin - first : end - first] = bits[begin:end]
    tiles: dict[Tile, None] = {}
    for head, row in sorted(rows):
        s = int(np.searchsorted(ends, row, side="right"))
        tiles[head, s, (row - int(ends[s]) + p.lens[s]) // tile_m] = None
    for head, s, tile in tiles:
        begin, rows_of = int(ends[s]) - p.lens[s] + tile * tile_m, min(tile_m, p.lens[s] - tile * tile_m)
        own_rows = [rows.get((head, begin + i)) for i in range(rows_of)]
        whole = [row for row in own_rows if row is not None and (row != _UNWRITTEN).all()]
        if len(whole) < rows_of:
            raise WrongBlock(f"block {one.block} wrote {len(whole)} of the {rows_of} rows of a tile")
        yield (head, s, tile), np.stack(whole)


def _part(case: FullCase, asked: BlockLaunch, tile: Tile, rows: np.ndarray) -> WrittenPart:
    """Return a tile as a separate sequence with the keys that its last row sees."""
    p, (head, s, number) = case.problem, tile
    first, count = number * int(case.config["tile_m"]), len(rows)
    keys = p.kv_lens[s]
    if p.causal:
        keys = max(0, min(keys, first + count + keys - p.lens[s]))
    own = VarlenProblem(1, 1, p.head_dim, p.dtype, (count,), (keys,), p.causal)
    q = sum(p.lens[:s]) + first + np.arange(count)
    slots, kv_head = _slots(p, asked, s, keys), head // (p.heads // p.kv_heads)
    inputs = {"q": _read(p, asked, "q", q * p.heads + head)}
    inputs |= {name: _read(p, asked, name, slots * p.kv_heads + kv_head) for name in "kv"}
    inputs |= {name: torch.from_numpy(values) for name, values in index_tensors(own, draw_table(own, 0)).items()}
    result = torch.from_numpy(rows[:, None]).view(TORCH_DTYPES[p.dtype])
    return WrittenPart(Case(case.name, own, "full size", case.config), Drawn(inputs, inputs), {OUTPUT: result})


def _slots(p: VarlenProblem, asked: BlockLaunch, sequence: int, keys: int) -> np.ndarray:
    """Return the rows of the pool that hold the sequence's first keys."""
    key = np.arange(keys)
    if not p.page:
        return sum(p.kv_lens[:sequence]) + key
    table = next(a.data for a in asked.arguments if isinstance(a, TensorArgument) and a.name == "table")
    pages: np.ndarray = table.view(np.int32)[sequence, key // p.page].astype(np.int64)
    return pages * p.page + key % p.page


def _read(p: VarlenProblem, asked: BlockLaunch, name: str, places: np.ndarray) -> torch.Tensor:
    """Return rows of a pooled tensor, [len(places), 1, head_dim]; at least one, which is not read."""
    number = next(n for n, a in enumerate(asked.arguments) if a.name == name)
    places = places if len(places) else np.zeros(1, np.int64)
    data = asked.pool.read_rows(number, places * 2 * p.head_dim, 2 * p.head_dim)
    return torch.from_numpy(data).view(TORCH_DTYPES[p.dtype])[:, None]
