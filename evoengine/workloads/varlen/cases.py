"""The gate's cases for attention over packed sequences: batches set against a configuration's tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from evoengine.devices.base import VisitKind
from evoengine.records import Config, Launch
from evoengine.workloads.attention.cases import HALVES, LONG, MOST_WORK, negative_name
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import (
    GUARD,
    MANY,
    NEAR,
    Cell,
    own_tail,
    pipeline_cells,
    remainder_cells,
    visited_remainders,
    visited_steps,
    visits_by_block,
)
from evoengine.workloads.full_size import cut
from evoengine.workloads.varlen.problem import VarlenProblem

MORE_BLOCKS = "more than there are tiles of rows"
UNLIKE_BLOCKS = "several, with unlike numbers of tiles of rows"
OWN_LENGTHS = "as many sequences as the problem has"
FAR, FAR_LENGTH = 1 << 15, (1 << 16) + 131
"""a length beyond which an index of 15 bits names another key or row, and one at which one of 16 bits does so"""
LENGTHS = (
    "a sequence without queries, before others",
    "a sequence without keys",
    "one query of one key",
    "one long sequence among short ones",
    "more sequences than a warp has lanes",
    "more queries than keys",
    "fewer queries than keys",
    "two sequences of unlike lengths, of several heads",
)
PAGES = (
    "several pages, not in order",
    "a page that is not whole",
    "pages that sequences share",
    "tiles of keys that begin within a page or hold several",
)


def gate_cases(problem: VarlenProblem, config: Config) -> tuple[Case[VarlenProblem], ...]:
    """Return the gate's cases for a configuration: batches that share the compile-time part of `problem`."""
    found = [*_small_cases(problem, config), *_long_cases(problem, config)]
    return tuple(replace(case, config=config, whole=problem) for case in found)


def _small_cases(problem: VarlenProblem, config: Config) -> Iterator[Case[VarlenProblem]]:
    """Yield cases that every candidate meets.

    Lengths are 0 and 1, whole tiles, and up to 3 rows or keys before or behind a tile's end; queries are as many as
    keys, fewer or more; a short sequence stands before, between and behind long ones. One sequence's keys wrap around a
    pipeline twice.
    """
    m, n, stages = int(config.get("tile_m", 64)), int(config.get("tile_n", 64)), int(config.get("stages", 1))
    group = problem.heads // problem.kv_heads
    other = next(g for g in (3, 5) if g != group)
    own_m, own_n = own_tail(max(problem.lens), m), own_tail(max(problem.kv_lens), n)

    def at(lens: Sequence[int], kv_lens: Sequence[int] | None = None, heads: int = 1, kv: int = 1) -> VarlenProblem:
        keys = tuple(lens if kv_lens is None else kv_lens)
        own = replace(problem, heads=heads, kv_heads=kv, lens=tuple(lens), kv_lens=keys, pool=0)
        return replace(own, pool=own.needed + GUARD)

    yield Case("one query of one key", at([1]))
    yield Case("no queries, no keys", at([0, 3, 0, 0, m + 2, 1, 0], [5, 0, 0, n, n + 2, 1, 0]))
    yield Case("one long among short", at([3, 2 * m + 5, 1, 7]), "one-hot rows")
    yield Case("heads and groups", at([17, 5], [33, 19], 2 * group, 2))
    yield Case("heads grouped otherwise", at([5, 11], [19, 11], 2 * other, 2))
    # the first 32, which a warp looks at together, have a tile of rows more than the others
    many = at([(m if i < 32 else 0) + 1 + i * 7 % 5 for i in range(MANY)], [n, *(i * 5 % 7 for i in range(1, MANY))])
    yield Case("many sequences", many, "one-hot rows")
    yield Case("more queries than keys", at([m + 9, 4], [5, 2]))
    yield Case("pipeline wraps", at([2, m - 3], [n, (2 * stages + 2) * n - 1]))
    yield Case("remainders", at([m + own_m, 2], [n + own_n, 3]), "constant columns")
    yield Case("short of a tile", at([m - 1, m - 2], [2 * n - 1, 2 * n - 2]), "extreme logits")
    yield Case("behind a tile", at([m + 1, m + 2, m + 3], [n + 1, n + 2, n + 3]), "diagonal")
    yield Case("whole tiles", at([m, m - 3], [stages * n, 3 * n - 3]), "late maximum")
    yield Case("steps end in each buffer", at([1] * stages, [(i + 1) * n for i in range(stages)]))
    if problem.causal:
        square = max(m, n) + 3
        yield Case("as many queries as keys", at([square, 2, square]), "diagonal")
        rows = min(m, n)
        lens = [rows - short for short in range(4)]
        yield Case("first row short of a tile", at(lens, [q + n - 1 - s for s, q in enumerate(lens)]), "diagonal")
    if problem.page:
        yield Case(
            "shared pages", at([2, m, 3], [2 * n + 1, 3 * n + problem.page + 2, 2 * problem.page]), "shared pages"
        )
    if maxima_of_bits(config):
        yield Case("negative rows", at([m], [m + 2 * n]), "negative rows")


def maxima_of_bits(config: Config) -> bool:
    """Return whether row maxima are those of bits, which order negative numbers the other way round."""
    return config.get("max_by") == "bits"


def _long_cases(problem: VarlenProblem, config: Config) -> Iterator[Case[VarlenProblem]]:
    """Yield cases of candidates that may rank: many keys, and the problem's own heads and number of sequences."""
    m, n = int(config.get("tile_m", 64)), int(config.get("tile_n", 64))
    keys = LONG if m <= 64 else LONG // 2
    keys += n - 1 - keys % n
    long = replace(problem, heads=1, kv_heads=1, lens=(m, 1), kv_lens=(keys, 3), pool=0)
    yield Case("long", long, "long", long=True)
    if (most := max(problem.kv_lens)) > FAR:
        far = replace(long, lens=(1,), kv_lens=(min(most, FAR_LENGTH),), pool=0)
        yield Case("far keys", far, "diagonal", long=True, once=True)
    if (most := max(problem.lens)) > FAR:
        far = replace(long, lens=(min(most, FAR_LENGTH),), kv_lens=(17,), pool=0)
        yield Case("far rows", far, "one-hot rows", long=True, once=True)
    if problem.heads > 2:
        yield Case("own heads", replace(problem, lens=(3, 2), kv_lens=(21, 2), pool=0), long=True, once=True)
    if own := own_lengths(problem, config):
        yield Case(
            "own lengths", own, long=True, part=None if own.lens == problem.lens else "short of the problem's lengths"
        )


def own_lengths(problem: VarlenProblem, config: Config) -> VarlenProblem | None:
    """Return all sequences of the problem over one head, long ones cut; None where they take too long all the same."""
    tile = 2 * max(int(config.get("tile_m", 64)), int(config.get("tile_n", 64)))
    for most in (max(*problem.lens, *problem.kv_lens), 8 * tile, 2 * tile, tile // 2, 8, 1):
        lens, keys = (tuple(cut(length, most) for length in own) for own in (problem.lens, problem.kv_lens))
        own = replace(problem, heads=1, kv_heads=1, lens=lens, kv_lens=keys, pool=0)
        if own.total_q and _work(own, config) <= MOST_WORK:
            return own
    return None


def _work(problem: VarlenProblem, config: Config) -> int:
    """Return rows of whole tiles times keys times head_dim, as MOST_WORK counts."""
    m, n = int(config.get("tile_m", 64)), int(config.get("tile_n", 64))
    return sum(-(-q // m) * m * (k + n) for q, k in zip(problem.lens, problem.kv_lens, strict=True)) * problem.head_dim


def cells(problem: VarlenProblem, config: Config) -> frozenset[Cell]:
    """Return the cells of a configuration; none where it does not say how large tiles are."""
    if not {"tile_m", "tile_n"} <= config.keys():
        return frozenset()
    m, n = int(config["tile_m"]), int(config["tile_n"])
    found = {
        *remainder_cells("rows", m, max(problem.lens)),
        *remainder_cells("keys", n, max(problem.kv_lens)),
        *pipeline_cells(_stripes(m), int(config.get("stages", 1))),
        *(Cell("lengths", what) for what in LENGTHS),
        Cell("heads", "grouped as the problem's are"),
        Cell("heads", "grouped by another number, which is no power of two"),
        Cell("blocks", UNLIKE_BLOCKS if config.get("schedule") == "static" else MORE_BLOCKS),
    }
    if problem.causal:
        found |= {Cell("diagonal", f"the first row ends {short} short of a tile") for short in range(NEAR + 1)}
        found.add(Cell("diagonal", "as many queries as keys, over several tiles"))
    if problem.page:
        found |= {Cell("pages", what) for what in PAGES}
    if maxima_of_bits(config):
        found |= {Cell("values", negative_name(half)) for half in HALVES}
    if own_lengths(problem, config):
        found.add(Cell("extents", OWN_LENGTHS))
    of_lengths = ("far keys", max(problem.kv_lens)), ("far rows", max(problem.lens))
    return frozenset(found | {Cell("extents", name) for name, most in of_lengths if most > FAR})


def visited(case: Case[VarlenProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
    """Return the cells that a case visits by its lengths and by the device's count."""
    whole, p, config = case.whole, case.problem, case.config
    if whole is None or not {"tile_m", "tile_n"} <= config.keys():
        return frozenset()
    m, n, stages = int(config["tile_m"]), int(config["tile_n"]), int(config.get("stages", 1))
    pairs = list(zip(p.lens, p.kv_lens, strict=True))
    found = {Cell("lengths", what) for what in _lengths(p, m)}
    for q, k in pairs:
        if q and k:
            found |= set(visited_remainders("rows", q, m, max(whole.lens)))
            found |= set(visited_remainders("keys", k, n, max(whole.kv_lens)))
        if p.causal and 0 < q <= k:
            found.add(Cell("diagonal", f"the first row ends {-1 - (k - q) % n + n} short of a tile"))
        if p.causal and q == k > max(m, n):
            found.add(Cell("diagonal", "as many queries as keys, over several tiles"))
    rows = min((q - 1) % m + 1 for q in p.lens if q)
    for steps in _steps(config, visits).values():
        found |= set(visited_steps(_stripes(rows if len(pairs) > 2 else _fullest(p, m)), stages, steps))
    group, own = p.heads // p.kv_heads, whole.heads // whole.kv_heads
    if group == own and (p.kv_heads > 1 or whole.kv_heads == 1):
        found.add(Cell("heads", "grouped as the problem's are"))
    if group not in (1, own) and group & (group - 1) and p.kv_heads > 1:
        found.add(Cell("heads", "grouped by another number, which is no power of two"))
    tiles, blocks = p.row_tiles(m) * p.heads, prod(launch.grid)
    if blocks > tiles:
        found.add(Cell("blocks", MORE_BLOCKS))
    if tiles > blocks > 1 and tiles % blocks:
        found.add(Cell("blocks", UNLIKE_BLOCKS))
    if p.page:
        found |= {Cell("pages", what) for what in _pages(case, n)}
    if (own_problem := own_lengths(whole, config)) and p.lens == own_problem.lens and p.kv_lens == own_problem.kv_lens:
        found.add(Cell("extents", OWN_LENGTHS))
    far = ("far keys", p.kv_lens), ("far rows", p.lens)
    return frozenset(found | {Cell("extents", name) for name, lens in far if max(lens) > FAR})


def _fullest(problem: VarlenProblem, tile: int) -> int:
    return max(min(q, tile) for q in problem.lens)


def _lengths(problem: VarlenProblem, tile: int) -> Iterator[str]:
    lens, pairs = problem.lens, list(zip(problem.lens, problem.kv_lens, strict=True))
    if 0 in lens[:-1]:
        yield LENGTHS[0]
    if any(q and not k for q, k in pairs):
        yield LENGTHS[1]
    if (1, 1) in pairs:
        yield LENGTHS[2]
    if max(lens) > 2 * tile and len([q for q in lens if q < 8]) > 1:
        yield LENGTHS[3]
    if len(lens) > 32:
        yield LENGTHS[4]
    if any(q > k > 0 for q, k in pairs):
        yield LENGTHS[5]
    if any(0 < q < k for q, k in pairs):
        yield LENGTHS[6]
    if len(set(lens)) > 1 and problem.heads > 1:
        yield LENGTHS[7]


def _pages(case: Case[VarlenProblem], tile: int) -> Iterator[str]:
    p = case.problem
    if max(map(p.pages_of, range(p.sequences))) > 2:
        yield PAGES[0]
    if any(k % p.page for k in p.kv_lens) or p.page == 1:
        yield PAGES[1]
    if case.draw == "shared pages":
        yield PAGES[2]
    if max(p.kv_lens) > tile and (p.page % tile or p.page > tile):
        yield PAGES[3]
    if p.page == tile:
        yield PAGES[3]


def _stripes(rows: int) -> list[str]:
    """Return the stripes of 16 rows, which one warp multiplies, that begin within so many rows."""
    return [f"rows {first} to {first + 15}" for first in range(0, rows, 16)]


def _steps(config: Config, visits: np.ndarray) -> dict[int, int]:
    """Return the steps of each block, by its waits for K and V, beside which there is one for Q."""
    if config.get("family") == "wgmma":
        waits = visits[visits["kind"] == VisitKind.WAIT]
        # the barrier of Q is the first in shared memory
        of_q = waits["site"] == (waits["site"].min() if len(waits) else 0)
        warps = range(int(config["tile_m"]) // 16)
        return {block: count // 2 for block, count in visits_by_block(waits[~of_q], VisitKind.WAIT, warps).items()}
    each = 1 if config.get("v_wait") == "with_k" else 2
    of_q = 1 if config.get("q_in") == "registers" else 0
    counts = visits_by_block(visits, VisitKind.COPY_WAIT, range(int(config.get("warps", 1))))
    return {block: (count - of_q) // each for block, count in counts.items()}
