"""Cells of an attention kernel's configuration, and those that a case visits by its sizes and by what warps did."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from evoengine.devices.base import VisitKind
from evoengine.records import Config, Launch
from evoengine.workloads.attention.cases import (
    MOST_ROW_TILES,
    affordable_keys,
    has_all_heads,
    has_own_keys,
    has_own_rows,
)
from evoengine.workloads.attention.problem import AttentionProblem
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import (
    NEAR,
    Cell,
    pipeline_cells,
    remainder_cells,
    visited_remainders,
    visited_steps,
    visited_votes,
    visits_by_block,
    vote_cells,
)

RISES = (7.9, 8.1, 15.9998, 16.5, 24.0, 40.0, 127.998, 140.0)
"""powers of two by which a maximum rises: about 2^8, an allowed lag of the maximum; where a weight just fits a half and
no more; and for bf16"""
BLOCKS = (
    "several, with unlike numbers of tiles of rows",
    "several tiles of rows of several heads and batch entries",
)
"""kinds of blocks of a persistent kernel"""
DIAGONAL = (
    "the last key that a row sees takes all weight",
    "the first key that a row does not see would take all weight",
)
ALL_HEADS = "heads of all batch entries"
ALIKE = 2000
"""number of equal weights in a row over which errors of 16 bits accumulate"""


def cells(problem: AttentionProblem, config: Config) -> frozenset[Cell]:
    """Return the cells of a configuration; none where it does not say how large tiles are."""
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
        *(Cell("values", what) for what in _values(problem, tile_m)),
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
    """Return the cells that a case visits by its sizes and by the device's count. What it drew is none of this."""
    whole, p, config = case.whole, case.problem, case.config
    if whole is None or not {"tile_m", "tile_n"} <= config.keys():
        return frozenset()
    tile_m, tile_n, stages = int(config["tile_m"]), int(config["tile_n"]), int(config.get("stages", 1))
    # a stripe's visits count only where all tiles have rows in it
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
    """Return the stripes of 16 rows, which one warp multiplies, that begin within so many rows."""
    return [f"rows {first} to {first + 15}" for first in range(0, rows, 16)]


def _own_extents(problem: AttentionProblem, config: Config) -> Iterator[str]:
    """Yield the axes whose own length some case has, or all of it that there is time for."""
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


def _values(problem: AttentionProblem, tile_m: int) -> Iterator[str]:
    """Yield what values must show, as AttentionTensors.shown calls it."""
    yield "all logits of a row below -126"
    yield "all logits of a row below -65504"
    yield "all logits of a row above 65504"
    yield from (rise_name(rise) for rise in RISES)
    yield from (
        f"a row that falls, in the {half} half of a stripe" for half in (("upper", "lower") if tile_m > 16 else ())
    )
    yield "columns of V that are constant"
    yield "an early key that takes all weight"
    yield "a late key that takes all weight"
    yield "a key that takes all weight behind a thousand others"
    yield f"{ALIKE:,} weights of 2/3"
    yield f"{ALIKE:,} weights of 2^-15.5"
    if problem.dtype == "bf16":
        yield "values beyond a half"


def rise_name(rise: float) -> str:
    return f"a maximum that rises by {rise:g} powers of two"


def _votes(config: Config) -> bool:
    """Return whether warps vote: on rescaling, or on rows whose scores are all negative."""
    return config.get("family") == "wgmma" and (int(config["rescale_above"]) > 0 or config["max_by"] == "bits")


def _counts_steps(config: Config) -> bool:
    """Return whether a device sees the steps of a kernel: it waits for tiles, or multiplies them by tensor cores."""
    return config.get("family") != "scalar" or int(config.get("stages", 1)) > 1


def _consumers(config: Config) -> range:
    """Return the warps that multiply."""
    return range(int(config["tile_m"]) // 16 if config.get("family") == "wgmma" else int(config.get("warps", 1)))


def _steps(problem: AttentionProblem, config: Config, visits: np.ndarray) -> dict[int, int]:
    """Return the steps of each block: those of the warp that did fewest.

    They are told by its waits for K and V, beside which there is one for Q; or by its products where nothing is waited
    for.
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
