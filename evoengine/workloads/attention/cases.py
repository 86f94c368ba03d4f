"""The gate's cases for attention: small problems set against a configuration's tiles, and the problem's own extents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from evoengine.devices.base import VisitKind
from evoengine.records import Config, Launch
from evoengine.workloads.attention.problem import AttentionProblem
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import (
    NEAR,
    Cell,
    own_tail,
    pipeline_cells,
    remainder_cells,
    visited_remainders,
    visited_steps,
    visited_votes,
    visits_by_block,
    vote_cells,
)
from evoengine.workloads.full_size import few

LONG = 4096
"""minimum number of keys of the longest case, over which errors of 16-bit sums accumulate"""
MOST_WORK = 600_000_000
"""limit of rows times keys times the mean of both head_dims, for everything that a case computes; about two seconds"""
MOST_ROW_TILES = 128
"""limit of tiles of rows of a case with all heads or batch entries of the problem"""
_OTHER_GROUPS = (3, 5)
"""query heads per KV head, of which a case uses the first that the problem does not have; shifts cannot divide by them
"""


def gate_cases(problem: AttentionProblem, config: Config) -> tuple[Case[AttentionProblem], ...]:
    """Return the gate's cases for a configuration: problems that share the compile-time part of `problem`."""
    found = [*_small_cases(problem, config), *_long_cases(problem, config)]
    return tuple(replace(case, config=config, whole=problem) for case in found)


def block_work(problem: AttentionProblem, config: Config, keys: int) -> int:
    """Return what a block computes for one tile of rows over so many keys, as MOST_WORK counts."""
    return int(config.get("tile_m", 64)) * keys * (problem.head_dim + problem.head_dim_v) // 2


def _single(problem: AttentionProblem) -> AttentionProblem:
    return replace(problem, batch=1, heads=1, kv_heads=1)


def _at(base: AttentionProblem, seq_q: int, seq_k: int, step: int = 1) -> AttentionProblem:
    """Return the problem with these lengths.

    Under a causal mask keys are added in multiples of `step` until there are as many as queries.
    """
    missing = max(0, seq_q - seq_k) if base.causal else 0
    return replace(base, seq_q=seq_q, seq_k=seq_k + -(-missing // step) * step)


def _small_cases(problem: AttentionProblem, config: Config) -> Iterator[Case[AttentionProblem]]:
    """Yield cases that every candidate meets.

    Lengths are set against the configuration's tiles: whole tiles, tails that end 1, 2 and 3 keys before a tile's end
    and shortly after one, the remainders that the problem itself leaves, 1 to 4 steps so that the last one is in each
    buffer, and a pipeline that wraps around twice (2·stages + 1 tiles: with fewer, a buffer that is reused too early
    goes unseen).
    """
    tile_m, tile_n = int(config.get("tile_m", 64)), int(config.get("tile_n", 64))
    stages = int(config.get("stages", 1))
    group = problem.heads // problem.kv_heads
    other = next(g for g in _OTHER_GROUPS if g != group)
    single, kv_heads = _single(problem), 1 if problem.kv_heads == 1 and problem.heads > 1 else 2
    small = replace(single, heads=kv_heads * min(group, 2), kv_heads=kv_heads)
    own_m, own_n = own_tail(problem.seq_q, tile_m), own_tail(problem.seq_k, tile_n)

    def at(seq_q: int, seq_k: int, base: AttentionProblem = single) -> AttentionProblem:
        return _at(base, seq_q, seq_k, tile_n * stages)  # the last step stays in its buffer

    yield Case("one key", at(1 if problem.causal else tile_m + 2, 1))
    yield Case("one query", at(1, tile_n + 2))
    yield Case("whole tiles", at(tile_m, 2 * tile_n))
    yield Case("batch and heads", at(17, 33, replace(single, batch=2, heads=kv_heads * group, kv_heads=kv_heads)))
    yield Case("heads grouped otherwise", at(5, 19, replace(single, heads=2 * other, kv_heads=2)))
    yield Case("remainders", at(tile_m + own_m, tile_n + own_n, small))
    any_order = "normal" if problem.causal else "permuted"
    yield Case("pipeline wraps", at(tile_m - 3, (2 * stages + 2) * tile_n - 1), any_order)
    yield Case("extreme logits, one key short", at(tile_m - 1, 2 * tile_n - 1), "extreme logits")
    yield Case("extreme logits, two keys short", at(tile_m + 1, 2 * tile_n - 2), "extreme logits")
    yield Case("constant columns", at(tile_m - 2, 2 * tile_n + 3), "constant columns")
    yield Case("one-hot rows", at(tile_m + 3, 2 * tile_n - 3), "one-hot rows")
    yield Case("late maximum", at(tile_m, 3 * tile_n + 1), "late maximum")
    if config.get("schedule") == "static":
        yield Case("blocks are persistent", at(tile_m + 1, 2 * tile_n + 1, replace(small, batch=2)))
    if problem.causal:
        yield Case("two rows behind a tile", at(tile_m + 2, tile_n + 2))
        square = max(tile_m, tile_n) + 3
        yield Case("as many queries as keys", at(square, square), "diagonal")
        for short in range(4):
            rows = min(tile_m, tile_n) - short
            yield Case(f"first row {short} short of a tile", at(rows, rows + tile_n - 1 - short), "diagonal")
    if config.get("max_by") == "bits":
        yield Case("negative rows", at(tile_m, 2 * tile_n), "negative rows")


def _long_cases(problem: AttentionProblem, config: Config) -> Iterator[Case[AttentionProblem]]:
    """Yield cases of candidates that may rank: the problem's own number of keys, rows, heads and batch entries."""
    tile_m, tile_n = int(config.get("tile_m", 64)), int(config.get("tile_n", 64))
    single = _single(problem)
    keys = affordable_keys(problem, config)
    part = None if keys == problem.seq_k else f"{keys:,} of {problem.seq_k:,} keys"
    long = _long(tile_m, tile_n, int(config.get("stages", 1)))
    yield Case("long", _at(single, tile_m, max(keys, long)), "long", long=True, part=part)
    if has_own_keys(problem, config):
        yield Case("own keys", _at(single, tile_m, keys), "late maximum", long=True, part=part)
    if has_own_rows(problem, config):
        yield Case("own rows", _at(single, problem.seq_q, least_keys(problem, config)), long=True)
    if has_all_heads(problem, config):
        every_head = _at(replace(problem, seq_q=3, seq_k=21), 3, 21)
        yield Case("own heads and batch", every_head, long=True, once=True)
        return
    if 2 < problem.heads <= MOST_ROW_TILES:
        yield Case("own heads", _at(replace(single, heads=problem.heads, kv_heads=problem.kv_heads), 3, 21), long=True)
    if 2 < problem.batch <= MOST_ROW_TILES:
        yield Case("own batch", _at(replace(single, batch=problem.batch), 7, 11), long=True)


def _long(tile_m: int, tile_n: int, stages: int) -> int:
    """Return LONG keys, or half as many with larger tiles, so that they end one key before a tile's end.

    There are more if a pipeline is so deep that its buffers would not be filled three times.
    """
    long = max(LONG if tile_m <= 64 else LONG // 2, 3 * stages * tile_n)
    return long + tile_n - 1 - long % tile_n


def has_own_keys(problem: AttentionProblem, config: Config) -> bool:
    """Return whether the problem's own number of keys is more than the short cases have."""
    return affordable_keys(problem, config) > 3 * int(config.get("tile_n", 64)) + 1


def has_own_rows(problem: AttentionProblem, config: Config) -> bool:
    """Return whether a case has the problem's own number of rows, over as few keys as may be."""
    tile_m = int(config.get("tile_m", 64))
    work = block_work(problem, config, least_keys(problem, config)) * -(-problem.seq_q // tile_m)
    return problem.seq_q > 2 * tile_m and work // (2 if problem.causal else 1) <= MOST_WORK


def has_all_heads(problem: AttentionProblem, config: Config) -> bool:
    """Return whether a case has every head of every batch entry, over one tile of keys: an index through the batch."""
    heads = problem.heads * problem.batch
    most = MOST_WORK // block_work(problem, config, int(config.get("tile_n", 64)))
    return min(problem.heads, problem.batch) > 1 and 4 < heads <= most


def least_keys(problem: AttentionProblem, config: Config) -> int:
    """Return the fewest keys for all rows: under a mask as many, otherwise little more than a tile."""
    few_keys = int(config.get("tile_n", 64)) + 1
    return max(problem.seq_q, few_keys) if problem.causal else few_keys


def affordable_keys(problem: AttentionProblem, config: Config) -> int:
    """Return the problem's own number of keys, or the most that a block can process, ending like them."""
    tile_n = int(config.get("tile_n", 64))
    return few(problem.seq_k, tile_n, max(2, MOST_WORK // block_work(problem, config, tile_n)))


# Cells of an attention kernel's configuration, and those that a case visits by its sizes and by what warps did.

RISES = (7.9, 8.1, 15.9998, 16.5, 24.0, 40.0, 127.998, 140.0)
"""powers of two by which a maximum rises: about 2^8, the allowed lag of the maximum; values around which a weight just
fits a half; and one for bf16"""
BLOCKS = ("several, with unlike numbers of tiles of rows", "several tiles of rows of several heads and batch entries")
"""kinds of blocks of a persistent kernel"""
DIAGONAL = (
    "the last key that a row sees takes all weight",
    "the first key that the first row does not see would take all weight",
)
HALVES = ("upper", "lower")
"""halves of a stripe, whose rows are in different lanes' registers"""
ALL_HEADS = "heads of all batch entries"
ALIKE = 2000
"""number of equal weights in a row over which errors of 16 bits accumulate"""


def cells(problem: AttentionProblem, config: Config) -> frozenset[Cell]:
    """Return the cells of a configuration; none if it does not state tile sizes."""
    if not {"tile_m", "tile_n"} <= config.keys():
        return frozenset()
    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"])
    found = {
        *remainder_cells("rows", tile_m, problem.seq_q),
        *remainder_cells("keys", tile_n, problem.seq_k),
        *(pipeline_cells(_stripes(tile_m), int(config.get("stages", 1))) if _counts_steps(config) else ()),
        Cell("heads", "as the problem's are grouped, in several batch entries"),
        Cell("heads", "grouped by another number, which is no power of two"),
        *(Cell("extents", axis) for axis in _own_extents(problem, config)),
        *(Cell("values", what) for what in _values(problem, config)),
    }
    if problem.causal:
        found |= {Cell("diagonal", f"the first row ends {short} short of a tile") for short in range(NEAR + 1)}
        found.add(Cell("diagonal", "as many queries as keys, over several tiles"))
        found |= {Cell("values", what) for what in DIAGONAL}
    else:
        found.add(Cell("values", "keys in another order"))
    if _votes(config):
        found |= set(vote_cells(_consumers(config)))
    if config.get("schedule") == "static":
        found |= {Cell("blocks", what) for what in BLOCKS}
    return frozenset(found)


def visited(case: Case[AttentionProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
    """Return the cells that a case visits by its sizes and by the device's count, regardless of its values."""
    whole, p, config = case.whole, case.problem, case.config
    if whole is None or not {"tile_m", "tile_n"} <= config.keys():
        return frozenset()
    tile_m, tile_n, stages = int(config["tile_m"]), int(config["tile_n"]), int(config.get("stages", 1))
    # a stripe's visits count only if all tiles have rows in it
    stripes = _stripes((p.seq_q - 1) % tile_m + 1)
    found = {
        *visited_remainders("rows", p.seq_q, tile_m, whole.seq_q),
        *visited_remainders("keys", p.seq_k, tile_n, whole.seq_k),
        *visited_votes(visits),
        *(Cell("extents", axis) for axis in _own_extents(whole, config) if _has_own(p, whole, config, axis)),
    }
    for steps in _steps(p, config, visits).values():
        found |= set(visited_steps(stripes, stages, steps))
    group, own = p.heads // p.kv_heads, whole.heads // whole.kv_heads
    if group == own and p.batch > 1 and (p.heads > 1 or whole.heads == 1):
        found.add(Cell("heads", "as the problem's are grouped, in several batch entries"))
    if group not in (1, own) and group & (group - 1) and p.kv_heads > 1:
        found.add(Cell("heads", "grouped by another number, which is no power of two"))
    if p.causal:
        short = -1 - (p.seq_k - p.seq_q) % tile_n + tile_n
        found.add(Cell("diagonal", f"the first row ends {short} short of a tile"))
        if p.seq_q == p.seq_k > max(tile_m, tile_n):
            found.add(Cell("diagonal", "as many queries as keys, over several tiles"))
    row_tiles = -(-p.seq_q // tile_m) * p.heads * p.batch
    if row_tiles > prod(launch.grid) > 1 and row_tiles % prod(launch.grid):
        found.add(Cell("blocks", BLOCKS[0]))
    if p.seq_q > tile_m and p.heads > 1 and p.batch > 1:
        found.add(Cell("blocks", BLOCKS[1]))
    return frozenset(found)


def _stripes(rows: int) -> list[str]:
    """Return the stripes of 16 rows, each multiplied by one warp, that begin within so many rows."""
    return [f"rows {first} to {first + 15}" for first in range(0, rows, 16)]


def _own_extents(problem: AttentionProblem, config: Config) -> Iterator[str]:
    """Yield the axes whose own length some case has, or as much of it as is affordable."""
    if has_own_keys(problem, config):
        yield "keys"
    if has_own_rows(problem, config):
        yield "rows"
    if has_all_heads(problem, config):
        yield ALL_HEADS
    else:
        yield from (axis for axis in ("heads", "batch") if 2 < getattr(problem, axis) <= MOST_ROW_TILES)


def _has_own(problem: AttentionProblem, whole: AttentionProblem, config: Config, axis: str) -> bool:
    match axis:
        case "keys":
            return problem.seq_k == affordable_keys(whole, config)
        case "rows":
            return problem.seq_q == whole.seq_q
        case _ if axis == ALL_HEADS:
            return (problem.heads, problem.batch) == (whole.heads, whole.batch)
    return bool(getattr(problem, axis) == getattr(whole, axis))


def _values(problem: AttentionProblem, config: Config) -> Iterator[str]:
    """Yield what values must show, in the terms of AttentionTensors.shown."""
    yield "all logits of a row below -126"
    yield "all logits of a row below -65504"
    yield "all logits of a row above 65504"
    yield from (rise_name(rise) for rise in RISES)
    halves = HALVES if int(config["tile_m"]) > 16 else ()
    yield from (f"a row that falls, in the {half} half of a stripe" for half in halves)
    if config.get("max_by") == "bits":
        yield from map(negative_name, halves)
    yield "columns of V that are constant"
    yield "an early key that takes all weight"
    yield "a late key that takes all weight"
    yield "a key that takes all weight behind a thousand others"
    yield f"{ALIKE:,} weights of 2/3"
    yield f"{ALIKE:,} weights of 2^-15.5"
    if problem.dtype == "bf16":
        yield "values beyond a half"


def negative_name(half: str) -> str:
    return f"rows of negative logits further apart than exponents reach, in the {half} half of a stripe alone"


def rise_name(rise: float) -> str:
    return f"a maximum that rises by {rise:g} powers of two"


def _votes(config: Config) -> bool:
    """Return whether warps vote: on rescaling, or on rows whose scores are all negative."""
    return config.get("family") == "wgmma" and (int(config["rescale_above"]) > 0 or config["max_by"] == "bits")


def _counts_steps(config: Config) -> bool:
    """Return whether a device counts the steps of a kernel: it waits for tiles, or multiplies them on tensor cores."""
    return config.get("family") != "scalar" or int(config.get("stages", 1)) > 1


def _consumers(config: Config) -> range:
    """Return the warps that multiply."""
    return range(int(config["tile_m"]) // 16 if config.get("family") == "wgmma" else int(config.get("warps", 1)))


def _steps(problem: AttentionProblem, config: Config, visits: np.ndarray) -> dict[int, int]:
    """Return the steps of each block, those of the warp that did the fewest.

    They follow from its waits for K and V, without the one for Q, or from its products if it waits for nothing.
    """
    warps = _consumers(config)
    match config.get("family"):
        case "wgmma":
            # the barrier of Q is the first in shared memory
            waits = visits[visits["kind"] == VisitKind.WAIT]
            of_q = waits["site"] == (waits["site"].min() if len(waits) else 0)
            return {block: count // 2 for block, count in visits_by_block(waits[~of_q], VisitKind.WAIT, warps).items()}
        case "mma":
            each = 1 if config["v_wait"] == "with_k" else 2
            of_q = 1 if config["q_in"] == "registers" else 0
            counts = visits_by_block(visits, VisitKind.COPY_WAIT, warps)
            return {block: (count - of_q) // each for block, count in counts.items()}
        case "wmma" if int(config["stages"]) == 1:
            counts = visits_by_block(visits, VisitKind.PRODUCT, warps)
            return {block: count // (16 * _wmma_products(problem, config)) for block, count in counts.items()}
    return visits_by_block(visits, VisitKind.COPY_WAIT, warps)


def _wmma_products(problem: AttentionProblem, config: Config) -> int:
    """Return the products of 16 x 16 x 16 that a warp makes in a step, of Q Kᵀ and of P V."""
    warps_n = int(config["warps_n"])
    stripes = int(config["tile_m"]) // 16 * warps_n // int(config["warps"])
    blocks_n, depth = int(config["tile_n"]) // 16, problem.head_dim // 16
    return stripes * (blocks_n // warps_n * depth + depth // warps_n * blocks_n)
