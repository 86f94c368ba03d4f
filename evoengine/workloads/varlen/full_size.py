"""The case of packed sequences at full size: blocks of a launch over tensors of the problem's size.

Only there do faults occur in offsets beyond 32 bits, in the last pages of a large pool, and in indices of many
sequences, heads and tiles of rows. If tiles of rows see too many keys, sequences are cut into shorter ones, which keeps
the sizes of all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from evoengine.records import Config, Launch, Plan
from evoengine.workloads.attention.cases import MOST_WORK
from evoengine.workloads.full_size import chosen_blocks
from evoengine.workloads.varlen.problem import MOST_SEQUENCES, VarlenProblem

LaunchOf = Callable[[VarlenProblem], Launch]

MOST_DRAWN = 1 << 24
"""limit of the elements of the table, and of the pages of the pool, which are drawn as a whole"""
MOST_BLOCKS = 24
LEAST_BLOCKS = 4
ROUNDS = 3
"""maximum number of tiles of rows of a persistent block: there are more blocks than on a GPU, and each runs to its end
"""


@dataclass(frozen=True, slots=True)
class FullCase:
    """Some blocks of a launch for `problem`, each run by itself."""

    name: str
    problem: VarlenProblem
    config: Config = field(hash=False)
    part: str | None = None

    @property
    def rounds(self) -> int:
        """Return the maximum number of tiles of rows of a block."""
        return ROUNDS if self.config.get("schedule") == "static" else 1

    @property
    def tiles(self) -> int:
        """Return the tiles of rows of all heads."""
        return self.problem.row_tiles(int(self.config["tile_m"])) * self.problem.heads

    def blocks(self, launch: Launch, seed: int) -> list[int]:
        """Return the numbers of the blocks that are run."""
        most = MOST_WORK // 2 // (self.rounds * _tile_work(self.problem, self.config))
        return chosen_blocks(launch.grid, seed)[: max(LEAST_BLOCKS, min(MOST_BLOCKS, most))]


def full_plan(problem: VarlenProblem, config: Config, launch_of: LaunchOf) -> Plan:
    """Return the case with its launch; none if the configuration states no tiles, or indices are too many."""
    if not {"tile_m", "tile_n"} <= config.keys():
        return ()
    own, part = problem, None
    rounds = ROUNDS if config.get("schedule") == "static" else 1
    if rounds * LEAST_BLOCKS * _tile_work(problem, config) > MOST_WORK // 2:
        own, part = _cut(problem, config), "in shorter sequences"
    too_many = own.page and max(own.pool, own.sequences * own.table_width) > MOST_DRAWN
    if own.sequences > MOST_SEQUENCES or too_many:
        return ()
    case, launch = FullCase("full grid", own, config, part), launch_of(own)
    if rounds > 1:
        launch = replace(launch, grid=(max(1, (case.tiles - 1) // 2), 1, 1))
    return [(case, launch)]


def _tile_work(problem: VarlenProblem, config: Config) -> int:
    """Return the cost of a tile of rows with the most keys, in the unit of MOST_WORK."""
    m, n = int(config["tile_m"]), int(config["tile_n"])
    return m * (max(problem.kv_lens) + n) * problem.head_dim


def _cut(problem: VarlenProblem, config: Config) -> VarlenProblem:
    """Return the problem with its sequences cut into parts of about two tiles of keys, with an incomplete last tile."""
    m, n = int(config["tile_m"]), int(config["tile_n"])
    rows, keys = 2 * m - 3, 2 * n + 3
    pairs: list[tuple[int, int]] = []
    for q, k in zip(problem.lens, problem.kv_lens, strict=True):
        count = max(1, -(-q // rows), -(-k // keys))
        pairs += zip(_shares(q, count), _shares(k, count), strict=True)
    cut = replace(problem, lens=tuple(q for q, _ in pairs), kv_lens=tuple(k for _, k in pairs), pool=0)
    return replace(cut, pool=max(cut.needed, problem.pool))


def _shares(length: int, count: int) -> Iterator[int]:
    """Yield `count` lengths that add up to `length` and differ by at most one."""
    each, more = divmod(length, count)
    for i in range(count):
        yield each + (i < more)
