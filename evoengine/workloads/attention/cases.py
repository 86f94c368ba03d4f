"""The gate's cases for attention: small problems set against a configuration's tiles, and the problem's own extents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from evoengine.records import Config
from evoengine.workloads.attention.problem import AttentionProblem
from evoengine.workloads.base import Case
from evoengine.workloads.blocks import few
from evoengine.workloads.coverage import own_tail

LONG = 4096
"""minimum number of keys of the longest case, over which errors of sums in 16 bits accumulate"""
MOST_WORK = 600_000_000
"""rows times keys times the mean of both head_dims, of all that a case computes, which takes about two seconds"""
MOST_ROW_TILES = 128
"""limit of tiles of rows of a case with all heads or batch entries of the problem"""
_OTHER_GROUPS = (3, 5)
"""query heads per KV head, of which a case has the first that the problem does not have; no shift divides by them"""


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
    and shortly behind one, the remainders that the problem itself leaves, 1 to 4 steps so that the last lies in each
    buffer, and a pipeline that wraps around twice (2·stages + 1 tiles: fewer let a buffer that is reused too early go
    unseen) with all rows of a tile. Heads are grouped as the problem's are, and in a way that no problem's are. Under a
    mask the first row sees whole tiles of keys, and 1, 2 and 3 keys fewer.
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

    There are more where a pipeline is so deep that its buffers would not be filled three times.
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
    """Return the fewest keys for all rows: under a mask as many, else little more than a tile."""
    few_keys = int(config.get("tile_n", 64)) + 1
    return max(problem.seq_q, few_keys) if problem.causal else few_keys


def affordable_keys(problem: AttentionProblem, config: Config) -> int:
    """Return the problem's own number of keys, or the most that a block can go through, ending as they do."""
    tile_n = int(config.get("tile_n", 64))
    return few(problem.seq_k, tile_n, max(2, MOST_WORK // block_work(problem, config, tile_n)))
