"""Attention at full size: the kernel's arguments over a pool, and what the blocks that were run should have written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from evoengine.devices.base import DTYPE_BYTES, TensorArgument
from evoengine.devices.pool import PAGE, BlockArgument, BlockLaunch, BlockTrace, Pool
from evoengine.records import Launch
from evoengine.workloads.attention.full_size import FullCase, choose_blocks
from evoengine.workloads.attention.problem import LSE, OUTPUT, AttentionProblem, parameters
from evoengine.workloads.attention.tensors import TORCH_DTYPES, AttentionTensors
from evoengine.workloads.base import Case, Drawn, FullSize, WrittenPart, WrongBlock
from evoengine.workloads.tensors import check_tensor_maps

POOL_PAGES = 256
_UNWRITTEN = 0xFFFF
_Q, _K, _V = range(3)


class AttentionFullSize(FullSize[FullCase]):
    def draw_blocks(self, case: FullCase, launch: Launch, seed: int) -> BlockLaunch:
        check_tensor_maps(parameters(case.whole, case.config))
        blocks = choose_blocks(case, launch, seed)
        own: list[BlockArgument] = list(parameters(case.problem, case.config))
        if case.draw:
            drawn = AttentionTensors().draw(Case(case.name, case.problem, case.draw), seed).inputs
            for number, (name, tensor) in enumerate(drawn.items()):
                own[number] = TensorArgument(name, tensor.view(torch.uint16).numpy())
        return BlockLaunch(launch, own, _pool(case, seed), blocks)

    def written_parts(self, case: FullCase, asked: BlockLaunch, traces: Sequence[BlockTrace]) -> list[WrittenPart]:
        """Return the rows that the blocks wrote, with the values to compare them with.

        A block may write only whole tiles of rows, each tile once, and as many as it gets when all are dealt out. No
        block may do another's work. Raises WrongBlock if one did not comply.
        """
        _check_queries_differ(traces)
        owners: dict[tuple[int, int], int] = {}
        tiles: list[tuple[int, int, np.ndarray]] = []
        lse: dict[tuple[int, int], np.ndarray] = {}
        blocks = math.prod(asked.launch.grid)
        for chosen, one in zip(asked.blocks, traces, strict=True):
            if chosen.ends and one.given_up:
                raise WrongBlock(
                    f"block {one.block} read more than {chosen.input_limit} bytes, which its rows do not need"
                )
            if case.endless and not one.given_up:
                raise WrongBlock(f"block {one.block} was done before it had read all of {case.problem.seq_k} keys")
            found = list(_tiles(case, one))
            possible = case.tiles_of(one.block, blocks)
            if not one.given_up and len(found) not in possible:
                wanted = " or ".join(map(str, possible))
                raise WrongBlock(f"block {one.block} wrote {len(found)} tiles of rows, which should be {wanted}")
            for head, tile, rows in found:
                if (head, tile) in owners:
                    raise WrongBlock(
                        f"blocks {owners[head, tile]} and {one.block} both wrote tile {tile} of head {head}"
                    )
                owners[head, tile] = one.block
                if case.problem.lse:
                    first = head * case.problem.seq_q + tile * int(case.config["tile_m"])
                    lse[head, tile] = _floats(one.pages[LSE], first, len(rows))
                tiles.append((head, tile, rows))
        return list(_parts(case, asked, tiles, lse))


def _pool(case: FullCase, seed: int) -> Pool:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(POOL_PAGES, PAGE // DTYPE_BYTES[case.problem.dtype], generator=generator)
    return Pool(values.to(TORCH_DTYPES[case.problem.dtype]).view(torch.uint8).numpy())


def _check_queries_differ(traces: Sequence[BlockTrace]) -> None:
    """Raise WrongBlock if an aborted block read the rows of Q of another block.

    No two tiles of rows share two pages.
    """
    readers: dict[tuple[int, ...], BlockTrace] = {}
    for one in (trace for trace in traces if "q" in trace.pages):
        pages = tuple(sorted(offset for offset, _ in one.pages["q"]))
        other = readers.setdefault(pages, one)
        if other is not one and len(pages) > 1 and (one.given_up or other.given_up):
            raise WrongBlock(f"blocks {other.block} and {one.block} read the same rows of Q")


def _tiles(case: FullCase, one: BlockTrace) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (head through the batch, tile of rows, its rows as bits [rows, head_dim_v]) of each written tile."""
    p, tile_m = case.problem, int(case.config["tile_m"])
    rows: dict[int, np.ndarray] = {}
    for first, block in _runs(one.pages[OUTPUT], p.head_dim_v):
        for i in np.flatnonzero((block != _UNWRITTEN).any(axis=1)):
            rows[first + int(i)] = block[i]
    numbers = sorted({(row // p.seq_q, row % p.seq_q // tile_m) for row in rows})
    for head, tile in numbers:
        first = tile * tile_m
        wanted = range(head * p.seq_q + first, head * p.seq_q + min(first + tile_m, p.seq_q))
        whole = all(row in rows and (rows[row] != _UNWRITTEN).all() for row in wanted)
        if whole:
            yield head, tile, np.stack([rows[row] for row in wanted])
        elif not one.given_up:
            raise WrongBlock(f"block {one.block} wrote tile {tile} of the rows of head {head} in part")


def _floats(pages: Sequence[tuple[int, np.ndarray]], first: int, count: int) -> np.ndarray:
    """Return elements of an output in float32 for the pages that were written, NaN elsewhere."""
    found = np.full(4 * count, 0xFF, np.uint8)
    for offset, data in pages:
        begin, end = max(offset, 4 * first), min(offset + len(data), 4 * (first + count))
        if begin < end:
            found[begin - 4 * first : end - 4 * first] = data[begin - offset : end - offset]
    return found.view(np.float32)


def _runs(pages: Sequence[tuple[int, np.ndarray]], head_dim_v: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, bits [rows, head_dim_v]) of each run of consecutive pages."""
    row, at = 2 * head_dim_v, 0
    pages = sorted(pages, key=lambda page: page[0])
    while at < len(pages):
        end = at + 1
        while end < len(pages) and pages[end][0] == pages[end - 1][0] + len(pages[end - 1][1]):
            end += 1
        data = np.concatenate([page for _, page in pages[at:end]])
        start, missing = pages[at][0], -(pages[at][0] + len(data)) % row
        padded = np.concatenate([np.full(start % row, 0xFF, np.uint8), data, np.full(missing, 0xFF, np.uint8)])
        yield start // row, padded.view(np.uint16).reshape(-1, head_dim_v)
        at = end


def _parts(
    case: FullCase,
    asked: BlockLaunch,
    tiles: Sequence[tuple[int, int, np.ndarray]],
    lse: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[WrittenPart]:
    """Yield the tiles grouped by their numbers of rows and of visible keys, with the LSE of those that have it."""
    p, tile_m = case.problem, int(case.config["tile_m"])
    alike: dict[tuple[int, int], list[tuple[int, int, np.ndarray]]] = {}
    for head, tile, rows in tiles:
        keys = tile * tile_m + len(rows) + p.seq_k - p.seq_q if p.causal else p.seq_k
        alike.setdefault((len(rows), keys), []).append((head, tile, rows))
    group = p.heads // p.kv_heads
    for (count, keys), found in alike.items():
        own = replace(p, batch=1, heads=len(found), kv_heads=len(found), seq_q=count, seq_k=keys)

        def part(argument: int, first_rows: Sequence[int], seq: int, width: int) -> torch.Tensor:
            parts = [_rows(asked, argument, first, seq, width) for first in first_rows]
            return _from_bits(p, np.stack(parts)[None])

        q = part(_Q, [head * p.seq_q + tile * tile_m for head, tile, _ in found], count, p.head_dim)
        firsts = [head // group * p.seq_k for head, _, _ in found]
        inputs = {"q": q, "k": part(_K, firsts, keys, p.head_dim), "v": part(_V, firsts, keys, p.head_dim_v)}
        result = _from_bits(p, np.stack([rows for _, _, rows in found])[None])
        outputs = {OUTPUT: result}
        if lse:
            outputs[LSE] = torch.from_numpy(np.stack([lse[head, tile] for head, tile, _ in found])[None])
        yield WrittenPart(Case(case.name, own, case.draw or "normal", case.config), Drawn(inputs, inputs), outputs)


def _rows(asked: BlockLaunch, argument: int, first: int, count: int, width: int) -> np.ndarray:
    """Return rows of an input as bits [count, width], which are numbered through batch and heads."""
    given, row = asked.arguments[argument], 2 * width
    if isinstance(given, TensorArgument):
        rows: np.ndarray = given.data.reshape(-1, width)[first : first + count]
        return rows
    return asked.pool.read(argument, first * row, (first + count) * row).view(np.uint16).reshape(count, width)


def _from_bits(problem: AttentionProblem, data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data).view(TORCH_DTYPES[problem.dtype])
