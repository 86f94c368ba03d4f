"""The cases of attention at full size: blocks of the problem itself, which no small case can stand for.

Offsets beyond 32 bits, indices and counters beyond 8 or 16, many heads and the order of tiles of rows over them show at
the problem's own size alone. A block that walks over all its keys takes too long, so keys are fewer where that leaves
the grid as it is, or sequences are shorter and the batch is larger, which leaves the sizes of all tensors as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from evoengine.devices.base import DTYPE_BYTES
from evoengine.devices.pool import ChosenBlock
from evoengine.records import Config, Launch
from evoengine.workloads.attention.cases import MOST_WORK, affordable_keys, block_work
from evoengine.workloads.attention.problem import AttentionProblem
from evoengine.workloads.full_size import DRAWN, chosen_blocks, draw_blocks, few, in_clusters

LaunchOf = Callable[[AttentionProblem], Launch]

_SCHEDULES = ("none", "static", "longest_first")
"""schedules by which a block's number determines its work"""
_COUNTER = 256
"""number of values of an 8-bit counter"""
_KEYS = (1 << 15, 1 << 16)
"""numbers of values of a signed and an unsigned 16-bit count of keys"""
_ALIASES = (1 << 8, 1 << 16)
"""numbers of values of an 8-bit and a 16-bit index"""
_MOST_VISITS, _FEW_VISITS = 64, 8
"""limit of the tiles of rows of a persistent block that is run; a larger grid reduces their number"""
_MOST_BATCH = 65535
"""limit of gridDim.z (CUDA C++ Programming Guide, technical specifications per compute capability)"""
_OWN_BLOCKS = 3
"""largest number of blocks that process all their keys at the problem's own size"""
_MOST_KEYS = 256
"""of a shortened problem whose K and V are larger than its Q: with as few as Q has, Q would grow too large"""
_HEAD_BYTES = 13 << 20
"""K and V of a head, of which an L2 of 32 to 50 MB holds two or three: five heads are not a multiple of either. Where
those of the problem are larger, they are taken: the L2 may hold none"""
_L2_KEY_BYTES = 32 << 20
"""of K and V, in all the heads whose tiles of rows are dealt out together"""
_REAL_BYTES = 1 << 26
"""limit of Q, K and V that are drawn whole"""
_SPARE_BYTES = 32 << 10
"""for the pages that a block's rows share with their neighbours"""


@dataclass(frozen=True, slots=True)
class FullCase:
    """Some blocks of a launch for `problem`, which has the sizes of `whole` in part."""

    name: str
    problem: AttentionProblem
    whole: AttentionProblem
    config: Config = field(hash=False)
    input_limit: int
    """bytes of inputs, in whole pages, after which a block is aborted"""
    ends: bool
    """whether blocks of a correct kernel end before that"""
    visits: int = 1
    """tiles of rows that a block processes"""
    blocks: Literal["many", "all", "drawn", "ends"] = "many"
    drawn: int = DRAWN
    """number of blocks drawn by seed"""
    endless: bool = False
    """whether all blocks of a correct kernel are aborted, since they see far more keys than they may read"""
    part: str | None = None
    """the number of keys in place of the problem's, where all take too long"""
    draw: str | None = None
    """the draw of inputs that exist as a whole; None if they are pooled"""

    @property
    def row_tiles(self) -> int:
        """Return the number of tiles of rows of the whole batch."""
        return _row_tiles(self.problem, self.config)

    def tiles_of(self, block: int, blocks: int) -> tuple[int, ...]:
        """Return how many tiles of rows the block may write, of `blocks`; a block of a cluster counts for all of it."""
        if self.config.get("schedule") == "static" and self.problem.causal:
            return (_dealt(self.problem, self.config, blocks)[block],)
        share, left = divmod(self.row_tiles * int(self.config.get("cluster", 1)), blocks)
        return (share, share + 1) if left else (share,)


def full_plan(problem: AttentionProblem, config: Config, launch_of: LaunchOf) -> list[tuple[FullCase, Launch]]:
    """Return the cases with their launches.

    There are none if the configuration does not state tile sizes, or where blocks fetch tiles of rows dynamically.
    """
    if not {"tile_m", "tile_n"} <= config.keys() or config.get("schedule", "none") not in _SCHEDULES:
        return []
    plan: list[tuple[FullCase, Launch]] = []
    if config.get("schedule") == "static":
        plan += _persistent(problem, config, launch_of)
    else:
        cases = [_full_grid(problem, config), _full_tensors(problem, config)]
        plan += [(case, launch_of(case.problem)) for case in cases if case]
    own = (_own_keys(problem, config), _own_rows(problem, config), *_many_keys(problem, config))
    plan += [(case, launch_of(case.problem)) for case in own if case]
    if config.get("schedule", "none") != "none":
        plan.append(_beyond_l2(problem, config, launch_of))
    return plan


def _own_keys(problem: AttentionProblem, config: Config) -> FullCase:
    """Return blocks of the problem's own grid with all their keys, as many as there is time for.

    Persistent blocks are followed through one tile of rows and given up in the next.
    """
    keys = affordable_keys(problem, config)
    whole = keys == problem.seq_k
    own = problem if whole else replace(problem, seq_q=min(problem.seq_q, keys), seq_k=keys)
    drawn = max(1, min(_OWN_BLOCKS, MOST_WORK // 2 // block_work(problem, config, keys)))
    persistent = config.get("schedule") == "static"
    ahead = (int(config.get("stages", 1)) + 2) * int(config["tile_n"]) if persistent else 0
    limit = _bytes(problem, config, keys + ahead)
    part = None if whole else f"{keys:,} of {problem.seq_k:,} keys"
    return FullCase("own keys", own, problem, config, limit, not persistent, 1, "drawn", drawn, part=part)


def _own_rows(problem: AttentionProblem, config: Config) -> FullCase | None:
    """Return one head with all its rows and keys, in values by which a row that sees a wrong key shows.

    Of its rows the first, the last and some between are run. None if that is too large, or has no more rows than the
    long cases.
    """
    head = replace(problem, batch=1, heads=1, kv_heads=1)
    work = block_work(problem, config, problem.seq_k)
    limit = _bytes(head, config, head.seq_k)
    if problem.seq_q <= int(config["tile_m"]) or limit > _REAL_BYTES or work > MOST_WORK // 2:
        return None
    visits = 4 if config.get("schedule") == "static" else 1
    draw = "diagonal" if problem.causal else "one-hot rows"
    drawn = 2 if visits * work <= MOST_WORK // 6 else 0
    return FullCase("own rows", head, head, config, visits * limit, True, 1, "ends", drawn, draw=draw)


def _full_grid(problem: AttentionProblem, config: Config) -> FullCase:
    """Return the problem with few keys. Under a mask blocks of later rows are given up."""
    shorter = _fewer_keys(problem, config, 2)
    limit = _bytes(problem, config, min(shorter.seq_k, _near(config)))
    return FullCase("full grid", shorter, problem, config, limit, ends=not problem.causal)


def _full_tensors(problem: AttentionProblem, config: Config) -> FullCase | None:
    """Return a case with large K and V where those of `_full_grid` are small or its blocks are given up."""
    folded = _folded(problem, config, 2)
    if folded == problem or not (problem.causal or _is_large(problem)):
        return None
    return FullCase("full tensors", folded, problem, config, _bytes(problem, config, folded.seq_k), ends=True)


def _persistent(problem: AttentionProblem, config: Config, launch_of: LaunchOf) -> list[tuple[FullCase, Launch]]:
    """Return cases of one block through all its tiles of rows, with few tiles of keys for each.

    There is one tile of keys, or as many as a counter needs.
    """
    tiles = _tiles_to_count(problem, config, launch_of)
    folded = _folded(problem, config, tiles)
    cases = [("full tensors", folded)] if problem.causal or _is_large(problem) else []
    # under a mask every block begins with rows that see most keys
    cases += [] if problem.causal else [("full grid", _fewer_keys(problem, config, tiles))]
    return [_followed(name, own, problem, config, launch_of(own)) for name, own in cases]


def _tiles_to_count(problem: AttentionProblem, config: Config, launch_of: LaunchOf) -> int:
    """Return tiles of keys per tile of rows, so that a block counts beyond 8 bits if it does so in the problem.

    Places and phases of K and V repeat every 2·stages tiles: a counter that wraps is right where that divides 256.
    """
    visits, every = _visits(problem, config, launch_of(problem)), 2 * int(config["stages"])
    tile_n, wanted = int(config["tile_n"]), _COUNTER + every
    counted = visits * -(-problem.seq_k // tile_n) // (2 if problem.causal else 1)
    work = wanted * tile_n * int(config["tile_m"]) * _widths(problem) // 2
    wraps = counted > wanted and _COUNTER % every and visits <= _MOST_VISITS
    return -(-wanted // visits) if wraps and work <= MOST_WORK // 2 else 1


def _followed(
    name: str, own: AttentionProblem, whole: AttentionProblem, config: Config, launch: Launch
) -> tuple[FullCase, Launch]:
    visits = _visits(own, config, launch)
    if visits > _MOST_VISITS:
        launch = replace(launch, grid=(-(-_row_tiles(own, config) // _FEW_VISITS), *launch.grid[1:]))
        visits = _visits(own, config, launch)
    return FullCase(name, own, whole, config, _bytes(own, config, own.seq_k), True, visits), launch


def _beyond_l2(problem: AttentionProblem, config: Config, launch_of: LaunchOf) -> tuple[FullCase, Launch]:
    """Return some heads whose K and V together exceed the L2; every block begins, to show its rows."""
    tile_m = int(config["tile_m"])
    keys = max(problem.seq_k, _HEAD_BYTES // (_widths(problem) * DTYPE_BYTES[problem.dtype]))
    group = min(problem.heads // problem.kv_heads, 2)
    few = replace(problem, batch=1, heads=5 * group, kv_heads=5, seq_q=min(2 * tile_m, keys), seq_k=keys)
    launch = launch_of(few)
    if config["schedule"] == "static":
        launch = replace(launch, grid=(_row_tiles(few, config), *launch.grid[1:]))
    limit = _bytes(problem, config, 2 * int(config["tile_n"]))
    return FullCase("heads beyond the L2", few, few, config, limit, ends=False, blocks="all"), launch


def _many_keys(problem: AttentionProblem, config: Config) -> list[FullCase]:
    """Return one tile of rows over so many keys that their count, truncated to 16 bits, is small or negative."""
    beyond = [keys + 16 for keys in _KEYS if keys + 16 <= problem.seq_k]
    if not beyond:
        return []
    rows, keys = min(problem.seq_q, int(config["tile_m"])), beyond[-1]
    one = replace(problem, batch=1, heads=1, kv_heads=1, seq_q=rows, seq_k=keys)
    limit = _bytes(problem, config, 4 * int(config["tile_n"]))
    return [FullCase("many keys", one, one, config, limit, ends=False, blocks="all", endless=True)]


def _visits(problem: AttentionProblem, config: Config, launch: Launch) -> int:
    """Return the number of tiles of rows of the last block, or one more."""
    blocks = prod(launch.grid)
    if config.get("schedule") == "static" and problem.causal:
        return max(1, _dealt(problem, config, blocks)[-1])
    return -(-_row_tiles(problem, config) // blocks)


def _dealt(problem: AttentionProblem, config: Config, blocks: int) -> list[int]:
    """Return the number of tiles of rows that each persistent block gets under a mask [blocks].

    They are assigned as by the template's TileScheduler: those of as many heads at a time as the L2 holds, in rounds of
    which every second one runs in reverse.
    """
    p = problem
    keys = _L2_KEY_BYTES // (_widths(p) * DTYPE_BYTES[p.dtype])
    heads_at_once, heads = max(1, keys // p.seq_k) * (p.heads // p.kv_heads), p.heads * p.batch
    row_tiles = -(-p.seq_q // int(config["tile_m"]))
    found = [0] * blocks
    for group, first_head in enumerate(range(0, heads, heads_at_once)):
        tiles = row_tiles * min(heads_at_once, heads - first_head)
        whole, rest = divmod(tiles, blocks)
        backwards = (group + whole) % 2
        for block in range(blocks):
            place = blocks - 1 - block if backwards else block
            found[block] += whole + (place < rest)
    return found


def _unmasked(problem: AttentionProblem) -> int:
    """Return the number of keys that the first row of queries sees."""
    return problem.seq_k - problem.seq_q + 1 if problem.causal else problem.seq_k


def _fewer_keys(problem: AttentionProblem, config: Config, tiles: int) -> AttentionProblem:
    keys = few(_unmasked(problem), int(config["tile_n"]), tiles)
    return replace(problem, seq_k=keys + problem.seq_k - _unmasked(problem))


def _near(config: Config) -> int:
    """Return a number of keys, some more than the first tiles of rows see under a mask, in whole tiles."""
    return 2 * int(config["tile_m"]) + 3 * int(config["tile_n"])


def _folded(problem: AttentionProblem, config: Config, tiles: int) -> AttentionProblem:
    """Return two tiles of rows, few keys, and so many batch entries that no tensor exceeds the problem's.

    Q and O of a problem of few rows may exceed it, up to a size whose offsets fit 32 bits in bytes too.
    """
    tile_n, rows = int(config["tile_n"]), few(problem.seq_q, int(config["tile_m"]), 2)
    alike = -(-rows * problem.seq_k // (problem.seq_q * tile_n))
    seen = few(
        _unmasked(problem), tile_n, max(tiles, min(alike, -(-_MOST_KEYS // tile_n))) if not problem.causal else tiles
    )
    keys = rows - 1 + seen if problem.causal else seen
    most_rows = max(problem.batch * problem.seq_q, ((1 << 30) - 1) // (problem.heads * _widest(problem)))
    batch = min(problem.batch * problem.seq_k // keys, most_rows // rows, _MOST_BATCH)
    return replace(problem, batch=max(problem.batch, batch), seq_q=rows, seq_k=keys)


def _row_tiles(problem: AttentionProblem, config: Config) -> int:
    return -(-problem.seq_q // int(config["tile_m"])) * problem.heads * problem.batch


def _is_large(problem: AttentionProblem) -> bool:
    """Return whether a byte offset into K or V may need more than 31 bits."""
    return problem.batch * problem.kv_heads * problem.seq_k * _widest(problem) * DTYPE_BYTES[problem.dtype] >= 1 << 31


def _bytes(problem: AttentionProblem, config: Config, keys: int) -> int:
    """Return the bytes of Q, K and V that a block or cluster reads for one tile of rows that see `keys` keys."""
    elements = int(config["tile_m"]) * problem.head_dim + keys * _widths(problem)
    return int(config.get("cluster", 1)) * elements * DTYPE_BYTES[problem.dtype] + _SPARE_BYTES


def _widths(problem: AttentionProblem) -> int:
    """Return the elements of a key and its value together."""
    return problem.head_dim + problem.head_dim_v


def _widest(problem: AttentionProblem) -> int:
    return max(problem.head_dim, problem.head_dim_v)


def choose_blocks(case: FullCase, launch: Launch, seed: int) -> list[ChosenBlock]:
    """Return the blocks to run, each with what it may read.

    Under a mask x = 0 or the last x has few keys, whichever way a kernel counts. Of persistent blocks only the last
    goes through all its tiles of rows.
    """
    total, cluster = prod(launch.grid), int(case.config.get("cluster", 1))
    if case.blocks == "all":
        return [ChosenBlock(b, case.input_limit, case.ends) for b in range(0, total, cluster)]
    if case.blocks == "drawn":
        drawn = in_clusters(draw_blocks(launch.grid, seed, case.drawn), cluster)
        return [ChosenBlock(b, case.input_limit, case.ends) for b in drawn]
    if case.blocks == "ends":
        wanted = [total - 1, 0, *draw_blocks(launch.grid, seed, case.drawn)]
        return [ChosenBlock(b, case.input_limit, case.ends) for b in in_clusters(wanted, cluster)]
    if case.visits > 1:
        others = dict.fromkeys(
            [*_owners_of_aliases(total, case.row_tiles), *draw_blocks(launch.grid, seed, case.drawn)]
        )
        last = ChosenBlock(total - 1, (case.visits + 1) * case.input_limit, case.ends)
        return [last, *(ChosenBlock(b, 2 * case.input_limit, False) for b in others if b != total - 1)]
    first_of_last_row = total - launch.grid[0]
    wanted = [*chosen_blocks(launch.grid, seed, case.drawn), first_of_last_row]
    return [ChosenBlock(b, case.input_limit, case.ends) for b in in_clusters(wanted, cluster)]


def _owners_of_aliases(blocks: int, tiles: int) -> list[int]:
    """Return the blocks whose first tile of rows aliases one of the last block's under 8- or 16-bit truncation.

    Both directions of dealing out tiles are considered.
    """
    found = []
    for values in (v for v in _ALIASES if v < tiles):
        first = -(-(values - blocks + 1) // blocks) if values >= blocks else 0
        odd = -(-values // blocks) | 1
        found += [first * blocks + blocks - 1 - values, odd * blocks - values]
    return [b for b in dict.fromkeys(found) if 0 <= b < blocks]
