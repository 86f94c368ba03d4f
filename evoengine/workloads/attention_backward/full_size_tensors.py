"""Attention backward at full size: the arguments of each kernel over a pool, and what its blocks should have written.

LSE and delta have arbitrary contents of the pool: gradients are functions of them as of all other inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from evoengine.devices.base import DTYPE_BYTES, PassedParameter, ScratchParameter, TensorParameter
from evoengine.devices.pool import PAGE, BlockArgument, BlockLaunch, BlockTrace, ChosenBlock, Pool
from evoengine.records import Launch
from evoengine.workloads.attention_backward.full_size import FullCase, adds_up
from evoengine.workloads.attention_backward.problem import LAST, PAIR, PREPARE, BackwardProblem, parameters
from evoengine.workloads.attention_backward.tensors import gradients, partial_dq
from evoengine.workloads.base import AnyWorkload, Case, Drawn, FullSize, Outputs, WrittenPart, WrongBlock, taken
from evoengine.workloads.tensors import TORCH_DTYPES, written_elements

POOL_PAGES = 256
LIMIT = 1 << 26
"""bytes of inputs after which a block is aborted, far more than its work needs"""
SUMMED = 2.0**-18
"""allowed error of delta relative to the sum of absolute values: that of a float32 sum of at most 128 products"""
_BITS: dict[int, type[np.unsignedinteger]] = {2: np.uint16, 4: np.uint32}
Head = tuple[int, int]
"""a batch entry and a KV head"""


class BackwardFullSize(FullSize[FullCase]):
    def __init__(self, workload: AnyWorkload) -> None:
        self._workload = workload

    def draw_blocks(self, case: FullCase, launch: Launch, seed: int) -> BlockLaunch:
        given = taken(self._workload, case.entry, parameters(case.problem, case.config))
        blocks = [ChosenBlock(number, LIMIT, True) for number in case.blocks(launch, seed)]
        own: list[BlockArgument] = [_argument(a, case) for a in given]
        return BlockLaunch(launch, own, Pool(_values(case.problem.dtype, seed)), blocks, case.entry)

    def written_parts(self, case: FullCase, asked: BlockLaunch, traces: Sequence[BlockTrace]) -> list[WrittenPart]:
        """Return the gradients of the heads that blocks wrote to, with the reference's elsewhere.

        Raises WrongBlock if a block did not write exactly its own rows, or wrote wrong sums for the other kernels.
        """
        for one in traces:
            if one.given_up:
                raise WrongBlock(f"block {one.block} read far more than its rows and those that meet them")
        read = _Reader(case, asked)
        if case.entry == PREPARE:
            for one in traces:
                _check_prepared(read, one)
            return []
        if case.entry == LAST and adds_up(case.config):
            for one in traces:
                _check_summed(read, one)
            return []
        by_head: dict[Head, list[BlockTrace]] = {}
        for one in traces:
            by_head.setdefault(_head(case, asked.launch, one.block), []).append(one)
        return [_part(read, head, own) for head, own in by_head.items()]


def _argument(argument: PassedParameter, case: FullCase) -> PassedParameter:
    """Return scratch memory in its role for this kernel: an input, an output, or zeros to add to."""
    if not isinstance(argument, ScratchParameter):
        return argument
    if case.entry not in (PREPARE, LAST) and argument.name == "dq_sum":
        return replace(argument, zeroed=True)
    return TensorParameter(argument.name, argument.shape, argument.dtype, output=case.entry == PREPARE)


def _values(dtype: str, seed: int) -> np.ndarray:
    """Return a pool [pages, PAGE] uint8 whose contents are numbers in the dtype and in float32.

    The upper halves of float32 numbers are bf16 numbers. Every sixteenth fp16 number is from 1 to 2; as the upper half
    of a float32 it is a number from 2^-7 to 2.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(POOL_PAGES, PAGE // 2, generator=generator)
    if dtype == "fp16":
        values = (values / 4).clamp(-0.9, 0.9)
        large = 1.0 + torch.rand(POOL_PAGES, PAGE // 32, generator=generator) * 0.99
        values[:, 15::16] = torch.copysign(large, values[:, 15::16])
    bits: np.ndarray = values.to(TORCH_DTYPES[dtype]).view(torch.uint8).numpy()
    return bits


class _Reader:
    """The tensors that a launch over a pool reads and writes, by name."""

    def __init__(self, case: FullCase, asked: BlockLaunch) -> None:
        self.case, self.problem, self.asked = case, case.problem, asked
        self.paired = case.config.get("family") == "wgmma"

    def rows(self, name: str, first: int, count: int, width: int, dtype: str) -> torch.Tensor:
        """Return rows of an input, [count, width]."""
        number = next(n for n, a in enumerate(self.asked.arguments) if a.name == name)
        size = width * DTYPE_BYTES[dtype]
        data = self.asked.pool.read(number, first * size, (first + count) * size)
        return torch.from_numpy(data.copy()).view(TORCH_DTYPES[dtype]).view(count, width)

    def written(self, one: BlockTrace, name: str, dtype: str, first: int, count: int) -> torch.Tensor:
        """Return `count` elements of an output from `first` on, which must be all that the block wrote of it."""
        found, data = written_elements(one, name, dtype)
        if not np.array_equal(found, np.arange(first, first + count)):
            raise WrongBlock(f"block {one.block} wrote {len(found)} elements of {name}, which are not its {count}")
        return torch.from_numpy(data).view(TORCH_DTYPES[dtype])

    def of_rows(self, name: str, head: int) -> torch.Tensor:
        """Return LSE or delta of a query head, float64 [seq_q]."""
        p, m = self.problem, int(self.case.config["tile_m"])
        if not self.paired:
            return self.rows(name, head * p.seq_q, p.seq_q, 1, "fp32").double()[:, 0]
        tiles = -(-p.seq_q // m)
        both = self.rows("delta", head * tiles, tiles, PAIR, "fp32").double()
        half = both[:, PAIR // 2 :] if name == "delta" else -both[:, : PAIR // 2] / math.log2(math.e)
        return half[:, :m].reshape(-1)[: p.seq_q]


def _check_prepared(read: _Reader, one: BlockTrace) -> None:
    """Raise WrongBlock unless the block left delta of its rows, and zeros in their sums if there are any."""
    p, m = read.problem, int(read.case.config["tile_m"])
    head, tile = divmod(one.block, read.asked.launch.grid[0])
    rows, place = min(m, p.seq_q - tile * m), head * read.asked.launch.grid[0] + tile
    first = head * p.seq_q + tile * m
    products = read.rows("o", first, rows, p.head_dim, p.dtype).double()
    products = products * read.rows("dout", first, rows, p.head_dim, p.dtype).double()
    exact = torch.nn.functional.pad(products.sum(1), (0, m - rows if read.paired else 0))
    allowed = SUMMED * products.abs().sum(1).max()
    if read.paired:
        both = _pair(read, one, place, m)
        lse = -math.log2(math.e) * read.rows("lse", first, rows, 1, "fp32").double()[:, 0]
        if not torch.allclose(both[0, :rows], lse, rtol=2.0**-21, atol=0.0) or bool(both[0, rows:].any()):
            raise WrongBlock(f"block {one.block} left another LSE than that of its rows")
        delta = both[1]
    else:
        delta = read.written(one, "delta", "fp32", first, rows).double()
    if float((delta - exact).abs().max()) > float(allowed):
        raise WrongBlock(f"block {one.block} left sums of dO O that are not those of its rows")
    if read.case.adds_up and bool(read.written(one, "dq_sum", "fp32", place * m * p.head_dim, m * p.head_dim).any()):
        raise WrongBlock(f"block {one.block} did not zero the sums of dQ of its rows")


def _pair(read: _Reader, one: BlockTrace, place: int, rows: int) -> torch.Tensor:
    """Return what the block wrote of LSE and of delta of a tile, float64 [2, rows]; it leaves the rest unchanged."""
    found = torch.full((PAIR,), torch.nan, dtype=torch.float64)
    for offset, page in one.pages["delta"]:
        values = torch.from_numpy(page.copy()).view(torch.float32)
        at = offset // 4 + torch.arange(len(values)) - place * PAIR
        wrong = (values.view(torch.int32) != -1) & ((at < 0) | (at >= PAIR) | (at % (PAIR // 2) >= rows))
        if bool(wrong.any()):
            raise WrongBlock(f"block {one.block} wrote LSE or sums of dO O of rows that are not its own")
        own = (at >= 0) & (at < PAIR)
        found[at[own]] = values[own].double()
    both = found.view(2, PAIR // 2)[:, :rows]
    if bool(both.isnan().any()):
        raise WrongBlock(f"block {one.block} did not write LSE and sums of dO O of all its rows")
    return both


def _check_summed(read: _Reader, one: BlockTrace) -> None:
    """Raise WrongBlock unless dQ of the block's rows equals their sums, in any order within a tile."""
    p, m = read.problem, int(read.case.config["tile_m"])
    head, tile = divmod(one.block, read.asked.launch.grid[0])
    rows, place = min(m, p.seq_q - tile * m), head * read.asked.launch.grid[0] + tile
    found = read.written(one, "dq", p.dtype, (head * p.seq_q + tile * m) * p.head_dim, rows * p.head_dim)
    sums = read.rows("dq_sum", place, 1, m * p.head_dim, "fp32")[0] * torch.tensor(1.0 / math.sqrt(p.head_dim))
    expected = sums.to(found.dtype)
    left = dict(zip(*np.unique(expected.view(torch.int16).numpy(), return_counts=True), strict=True))
    for value, count in zip(*np.unique(found.view(torch.int16).numpy(), return_counts=True), strict=True):
        if count > left.get(value, 0):
            raise WrongBlock(f"block {one.block} wrote dQ that are not the sums of its rows")


def _head(case: FullCase, launch: Launch, block: int) -> Head:
    """Return the batch entry and the KV head of a block; a block of dQ has a query head."""
    p, number = case.problem, case.owner(launch.grid, block)[0]
    heads = p.heads if case.entry == LAST else p.kv_heads
    return number // heads, number % heads * p.kv_heads // heads


def _inputs(read: _Reader, head: Head) -> dict[str, torch.Tensor]:
    """Return the inputs of a KV head and of the query heads that share it, with an O that gives delta."""
    p = read.problem
    group, kv_head = p.heads // p.kv_heads, head[0] * p.kv_heads + head[1]
    queries = range(kv_head * group, (kv_head + 1) * group)
    found = {
        name: torch.stack([read.rows(name, n * p.seq_q, p.seq_q, p.head_dim, p.dtype) for n in queries])[None]
        for name in ("q", "dout")
    }
    found |= {name: read.rows(name, kv_head * p.seq_k, p.seq_k, p.head_dim, p.dtype)[None, None] for name in "kv"}
    found["lse"] = torch.stack([read.of_rows("lse", n) for n in queries])[None]
    delta = torch.stack([read.of_rows("delta", n) for n in queries])[None, ..., None]
    dout = found["dout"].double()
    return found | {"o": delta * dout / dout.square().sum(-1, keepdim=True)}


def _part(read: _Reader, head: Head, traces: Sequence[BlockTrace]) -> WrittenPart:
    """Return the gradients of a KV head: those that the blocks wrote, and the reference's elsewhere."""
    p, case, grid = read.problem, read.case, read.asked.launch.grid
    group, dtype = p.heads // p.kv_heads, TORCH_DTYPES[p.dtype]
    own = replace(p, batch=1, heads=group, kv_heads=1)
    inputs = _inputs(read, head)
    expected = gradients(own, inputs)
    names = ("dq",) if case.entry == LAST else ("dk", "dv")
    found: Outputs = {name: expected[name].to(dtype) for name in names}
    for one in traces:
        for name, at, count, first in _rows(case, grid, one, head):
            data = read.written(one, name, p.dtype, (at + first) * p.head_dim, count * p.head_dim)
            whole = found[name].view(-1, p.head_dim)
            inner = first + (at - head[0] * p.heads * p.seq_q - head[1] * group * p.seq_q if name == "dq" else 0)
            whole[inner : inner + count] = data.view(count, p.head_dim)
        if case.entry != LAST and case.adds_up:
            _check_partial(read, one, head, own, inputs)
    return WrittenPart(Case(case.name, own, "full size", case.config), Drawn(inputs, inputs), found, expected)


def _rows(
    case: FullCase, grid: tuple[int, int, int], one: BlockTrace, head: Head
) -> Iterator[tuple[str, int, int, int]]:
    """Yield each output of a block: its name, where its head begins among all rows, and its rows' count and first."""
    p, m, n = case.problem, int(case.config["tile_m"]), int(case.config["tile_n"])
    number, tile = case.owner(grid, one.block)
    if case.entry == LAST:
        size = n if case.config["family"] == "mma" else m
        yield "dq", number * p.seq_q, min(size, p.seq_q - tile * size), tile * size
        return
    first = tile * n
    for name in ("dk", "dv"):
        yield name, (head[0] * p.kv_heads + head[1]) * p.seq_k, min(n, p.seq_k - first), first


def _check_partial(
    read: _Reader, one: BlockTrace, head: Head, own: BackwardProblem, inputs: dict[str, torch.Tensor]
) -> None:
    """Raise WrongBlock unless the block added its part of dQ to the sums of its queries, in any order within a tile.

    Two lists whose elements differ by so much at most do so when both are sorted.
    """
    p, m, n = read.problem, int(read.case.config["tile_m"]), int(read.case.config["tile_n"])
    x = read.case.owner(read.asked.launch.grid, one.block)[1]
    keys, tiles = slice(x * n, min((x + 1) * n, p.seq_k)), -(-p.seq_q // m)
    exact, allowed = partial_dq(own, inputs, keys)
    size, first = m * p.head_dim, (head[0] * p.kv_heads + head[1]) * own.heads * tiles
    found = torch.zeros(own.heads * tiles * size)
    for offset, page in one.pages["dq_sum"]:
        values = torch.from_numpy(page.copy()).view(torch.float32)
        at = offset // 4 + np.arange(len(values)) - first * size
        inside = (at >= 0) & (at < len(found))
        if bool(values[~inside].any()):
            raise WrongBlock(f"block {one.block} added to sums of dQ of queries that it does not have")
        found[at[inside]] = values[inside]
    padded = torch.nn.functional.pad(exact, (0, 0, 0, tiles * m - p.seq_q)).view(-1, size)
    difference = (found.view(-1, size).double().sort(1).values - padded.sort(1).values).abs().max()
    if not float(difference) <= allowed:
        raise WrongBlock(f"block {one.block} added another dQ than its own, by {float(difference):.2e}")
