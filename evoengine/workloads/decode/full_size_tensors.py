"""Decode attention at full size: the arguments of each kernel over a pool, and what its blocks should have left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from evoengine.devices.base import (
    ConstantParameter,
    PassedParameter,
    ScratchParameter,
    TensorArgument,
    TensorParameter,
)
from evoengine.devices.pool import PAGE, BlockArgument, BlockLaunch, BlockTrace, ChosenBlock, Pool
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case, Drawn, FullSize, Inputs, WrittenPart, WrongBlock
from evoengine.workloads.decode.cases import FullCase, step_keys
from evoengine.workloads.decode.problem import COMBINED, DecodeProblem, block_rows, of_heads, parameters
from evoengine.workloads.decode.tensors import OUTSIDE, numbers_of_heads
from evoengine.workloads.full_size import chosen_blocks
from evoengine.workloads.tensors import TORCH_DTYPES, written_elements

POOL_PAGES = 256
SHARPNESS = 4.0
"""deviation of logits: a few keys have most of the weight, so that a wrong one shows"""
COMBINING = 24
"""blocks of the kernel that combines splits"""
COMBINED_ERROR = 2.0**-16
"""of the sum of absolute parts: 2^x to 2 ULP, a division and a float32 sum"""
MASKED = -1e30
"""the maximum of a split that saw no key"""
_BITS: Mapping[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class DecodeFullSize(FullSize[FullCase]):
    def draw_blocks(self, case: FullCase, launch: Launch, seed: int) -> BlockLaunch:
        p, generator = case.problem, torch.Generator().manual_seed(seed)
        if case.entry:
            return _combining(case, launch, seed)
        tiles = case.tiles(launch, seed)
        contents = _contents(case, [tile // launch.grid[1] for tile in tiles], generator)
        element = TORCH_DTYPES[p.cache or p.dtype]
        values = torch.randn(POOL_PAGES, PAGE // p.key_bytes, generator=generator).to(element)
        passed = (a for a in parameters(p, case.config) if not isinstance(a, ConstantParameter))
        own = [_argument(a, contents) for a in passed]
        # every key may lie in a page of memory of its own, with a part in the next
        limit = len(p.caches) * (p.seq_k + 2 * step_keys(case.config)) * 2 * PAGE
        blocks = [
            ChosenBlock(tile * case.splits + split, limit, True) for tile in tiles for split in range(case.splits)
        ]
        return BlockLaunch(launch, own, Pool(values.view(torch.uint8).numpy()), blocks)

    def written_parts(self, case: FullCase, asked: BlockLaunch, traces: Sequence[BlockTrace]) -> list[WrittenPart]:
        """Return the rows of each tile, of which the splits are combined here, grouped by their query.

        Raises WrongBlock where a block did not leave all its rows, left others, or read far more than its keys.
        """
        p, splits = case.problem, case.splits
        found: list[WrittenPart] = []
        for one in traces:
            if one.given_up:
                raise WrongBlock(f"block {one.block} read far more than the keys of its sequence")
            if case.entry:
                _check_combined(case, asked, one)
        if case.entry:
            return []
        for first in range(0, len(traces), splits):
            of_tile = traces[first : first + splits]
            sequence, kv_head, rows = _tile(p, case.config, asked.launch, of_tile[0].block // splits)
            of_o = _rows_of_o(p, sequence, kv_head, rows)
            if splits > 1:
                outputs = _combined(p, of_tile, of_o)
            else:
                outputs = _written(of_tile[0], "o", p.dtype, p.head_dim_v, of_o)
            found += _parts(case, asked, sequence, kv_head, rows, outputs)
        return found


def _combining(case: FullCase, launch: Launch, seed: int) -> BlockLaunch:
    """Return blocks that combine splits, over drawn states, of which some are of splits without keys."""
    p, generator = case.problem, torch.Generator().manual_seed(seed)
    by_name = {a.name: a for a in parameters(p, case.config) if not isinstance(a, ConstantParameter)}
    own: list[BlockArgument] = []
    for name in COMBINED:
        argument: BlockArgument = by_name[name]
        if isinstance(argument, ScratchParameter):
            argument = TensorParameter(name, argument.shape, argument.dtype)
        if isinstance(argument, TensorParameter) and name == "states":
            state = torch.randn(argument.shape, generator=generator) * 3
            state[..., 1] = state[..., 1].abs() + 0.5
            state[torch.rand(argument.shape[:2], generator=generator) < 0.2] = torch.tensor([MASKED, 0.0])
            argument = TensorArgument(name, state.numpy().view(np.uint32))
        own.append(argument)
    values = torch.randn(POOL_PAGES, PAGE // 4, generator=generator)
    blocks = [ChosenBlock(n, 1 << 24, True) for n in chosen_blocks(launch.grid, seed)[:COMBINING]]
    return BlockLaunch(launch, own, Pool(values.view(torch.uint8).numpy()), blocks, case.entry)


def _check_combined(case: FullCase, asked: BlockLaunch, one: BlockTrace) -> None:
    """Raise WrongBlock unless the block wrote its heads' rows of o, and to a rounding what their splits add up to."""
    p, grid, warps = case.problem, asked.launch.grid, int(case.config["combine_warps"])
    x, y, z = one.block % grid[0], one.block // grid[0] % grid[1], one.block // (grid[0] * grid[1])
    rows = (z * p.seq_q + y) * p.heads + np.arange(x * warps, min(p.heads, (x + 1) * warps))
    found = _written(one, "o", p.dtype, p.head_dim_v, rows).double()
    number = next(n for n, a in enumerate(asked.arguments) if a.name == "partial")
    given = next(a.data for a in asked.arguments if isinstance(a, TensorArgument) and a.name == "states")
    top, weights = torch.from_numpy(given).view(torch.float32)[rows].double().unbind(-1)
    size = case.splits * p.head_dim_v * 4
    data = torch.from_numpy(asked.pool.read_rows(number, rows * size, size)).view(torch.float32).double()
    factor = torch.where(weights > 0, torch.exp2(top - top.amax(1, keepdim=True)), 0.0)
    parts = factor[..., None] * data.view(len(rows), case.splits, p.head_dim_v)
    weight = (factor * weights).sum(1, keepdim=True).clamp(min=1e-30)
    exact, size_of_parts = parts.sum(1) / weight, parts.abs().sum(1) / weight
    allowed = torch.finfo(TORCH_DTYPES[p.dtype]).eps * exact.abs() + COMBINED_ERROR * size_of_parts + 1e-7
    if bool(((found - exact).abs() > allowed).any()):
        raise WrongBlock(f"block {one.block} wrote outputs that are not the sums of their splits")


def _argument(argument: PassedParameter, contents: Inputs) -> BlockArgument:
    """Return an input with its contents, and what splits leave as outputs, which traces tell of."""
    if argument.name in contents:
        data = contents[argument.name].contiguous()
        bits = _BITS[data.element_size()]
        return TensorArgument(argument.name, data.view(-1).view(torch.uint8).numpy().view(bits).reshape(data.shape))
    if argument.name in ("partial", "states"):
        assert isinstance(argument, ScratchParameter)
        return TensorParameter(argument.name, argument.shape, argument.dtype, output=True)
    return argument


def _contents(case: FullCase, sequences: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the inputs other than caches: pages are drawn from the whole pool, and lengths up to `case.short`.

    The first of `sequences` is as long as may be, or as short as the others if that takes too long.
    """
    p = case.problem
    q = (
        SHARPNESS
        * (p.root / p.head_dim) ** 0.5
        * torch.randn(p.batch, p.seq_q, p.heads, p.head_dim, generator=generator)
    )
    lengths = torch.randint(1, case.short + 1, (p.batch,), generator=generator)
    lengths[sequences[0]] = p.seq_k if case.has_long else case.short
    found = {"q": q.to(TORCH_DTYPES[p.dtype]), "lengths": lengths.int()}
    found |= {name: numbers_of_heads(name, p, generator) for name in of_heads(p)}
    if p.cache:
        found |= {f"{name}_scale": 0.5 + torch.rand(p.kv_heads, generator=generator) for name in p.caches}
    if p.page:
        pages = torch.randperm(p.pages, generator=generator).view(p.batch, p.table_width)
        used = torch.arange(p.table_width) * p.page < lengths[:, None]
        found["block_table"] = torch.where(used, pages, OUTSIDE).int()
    return found


def _tile(p: DecodeProblem, config: Config, launch: Launch, tile: int) -> tuple[int, int, range]:
    """Return the sequence and KV head of a tile of rows, and its rows among those of both."""
    sequence, y = divmod(tile, launch.grid[1])
    kv_head, number = divmod(y, launch.grid[1] // p.kv_heads)
    size = block_rows(config)
    return sequence, kv_head, range(number * size, min((number + 1) * size, p.seq_q * p.group))


def _rows_of_o(p: DecodeProblem, sequence: int, kv_head: int, rows: range) -> np.ndarray:
    """Return the numbers of a tile's rows among those of q and o, which are [batch, seq_q, heads], in order."""
    row = np.arange(rows.start, rows.stop)
    return (sequence * p.seq_q + row // p.group) * p.heads + kv_head * p.group + row % p.group


def _written(one: BlockTrace, name: str, dtype: str, width: int, rows: np.ndarray) -> torch.Tensor:
    """Return rows of an output [len(rows), width], which must be all that the block wrote of it."""
    found, data = written_elements(one, name, dtype)
    if not np.array_equal(found, (rows[:, None] * width + np.arange(width)).reshape(-1)):
        raise WrongBlock(f"block {one.block} wrote {len(found)} elements of {name}, which are not its {len(rows)} rows")
    return torch.from_numpy(data.reshape(len(rows), width)).view(TORCH_DTYPES[dtype])


def _combined(p: DecodeProblem, of_tile: Sequence[BlockTrace], rows: np.ndarray) -> torch.Tensor:
    """Return the outputs of rows [len(rows), head_dim_v] from the sums that each of their splits has left."""
    splits = len(of_tile)
    tops, sums, totals = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for split, one in enumerate(of_tile):
        at = rows * splits + split
        top, weights = _written(one, "states", "fp32", 2, at).double().unbind(1)
        some = weights > 0
        total = torch.zeros(len(rows), p.head_dim_v, dtype=torch.float64)
        total[some] = _written(one, "partial", "fp32", p.head_dim_v, at[some.numpy()]).double()
        tops.append(top)
        sums.append(weights)
        totals.append(total)
    factor = torch.exp2(torch.stack(tops) - torch.stack(tops).amax(0))
    total, weight = (factor[..., None] * torch.stack(totals)).sum(0), (factor * torch.stack(sums)).sum(0)
    return torch.where(weight[:, None] > 0, total / weight[:, None], 0.0).to(TORCH_DTYPES[p.dtype])


def _parts(
    case: FullCase, asked: BlockLaunch, sequence: int, kv_head: int, rows: range, outputs: torch.Tensor
) -> Iterator[WrittenPart]:
    """Yield the rows of each query as a problem of one sequence and one query, which has the keys that it sees.

    Keys before its window are left out.
    """
    p = case.problem
    given = {a.name: torch.from_numpy(a.data) for a in asked.arguments if isinstance(a, TensorArgument)}
    length = int(given["lengths"].view(torch.int32)[sequence])
    for query in range(rows.start // p.group, -(-rows.stop // p.group)):
        own = range(max(rows.start, query * p.group), min(rows.stop, (query + 1) * p.group))
        heads = [kv_head * p.group + row % p.group for row in own]
        end = max(0, length - p.seq_q + query + 1)
        visible = min(end, p.window or end)
        part = replace(p, batch=1, heads=len(own), kv_heads=1, seq_q=1, seq_k=max(1, visible), page=0)
        q = given["q"].view(TORCH_DTYPES[p.dtype])[sequence, query, heads]
        key = np.arange(end - visible, max(1, end))
        inputs = {"q": q[None, None], "lengths": torch.tensor([visible], dtype=torch.int32)}
        inputs |= {name: _keys(p, asked, given, name, sequence, kv_head, key) for name in p.caches}
        inputs |= {name: given[name].view(torch.float32)[heads] for name in of_heads(p)}
        if p.cache:
            inputs |= {f"{name}_scale": given[f"{name}_scale"].view(torch.float32)[[kv_head]] for name in p.caches}
        result = outputs[own.start - rows.start : own.stop - rows.start][None, None]
        yield WrittenPart(Case(case.name, part, "full size", case.config), Drawn(inputs, inputs), {"o": result})


def _keys(
    p: DecodeProblem, asked: BlockLaunch, given: Inputs, name: str, sequence: int, kv_head: int, key: np.ndarray
) -> torch.Tensor:
    """Return keys or values of a sequence and KV head by their numbers `key`, [1, len(key), 1, head_dim]."""
    slots = sequence * p.seq_k + key
    if p.page:
        pages = given["block_table"].view(torch.int32)[sequence].numpy().astype(np.int64)
        slots = pages[key // p.page] * p.page + key % p.page
    number = next(n for n, a in enumerate(asked.arguments) if a.name == name)
    row = p.head_dim * p.key_bytes
    data = asked.pool.read_rows(number, (slots * p.kv_heads + kv_head) * row, row)
    return torch.from_numpy(data).view(TORCH_DTYPES[p.cache or p.dtype])[None, :, None]
