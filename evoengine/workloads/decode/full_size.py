"""The case of decode attention at full size: blocks of the problem's own launch over its whole cache.

Offsets beyond 32 bits, the last pages of a large pool and indices of many sequences, heads and splits show there alone.
Nearly all sequences are cut short: where their pages lie is drawn from the whole pool all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from evoengine.records import Config, Launch, Plan
from evoengine.workloads.decode.cases import MOST_WORK, step_keys
from evoengine.workloads.decode.problem import DecodeProblem, block_rows
from evoengine.workloads.full_size import chosen_blocks

LaunchOf = Callable[[DecodeProblem], Launch]

MOST_DRAWN = 1 << 24
"""elements of q and of the block table, which are drawn as a whole"""
MOST_KEYS = 16_384
"""of the sequence that is as long as may be: a device counts at most 65,536 touched pages of memory"""
MOST_BLOCKS = 48


@dataclass(frozen=True, slots=True)
class FullCase:
    """All splits of some tiles of rows of a launch for `problem`, each run by itself. What combines them is not run."""

    name: str
    problem: DecodeProblem
    config: Config = field(hash=False)
    part: str | None = None

    @property
    def splits(self) -> int:
        return int(self.config.get("splits", 1))

    @property
    def short(self) -> int:
        """Return the keys of the longest of the sequences that are cut short; most splits have some."""
        return min(self.problem.seq_k, self.splits * step_keys(self.config) + step_keys(self.config) // 2 + 3)

    @property
    def has_long(self) -> bool:
        """Return whether one sequence is as long as may be."""
        p = self.problem
        return p.seq_k <= MOST_KEYS and self._work(p.seq_k) <= MOST_WORK // 4

    def _work(self, keys: int) -> int:
        return keys * block_rows(self.config) * (self.problem.head_dim + self.problem.head_dim_v) // 2

    def tiles(self, launch: Launch, seed: int) -> list[int]:
        """Return the tiles of rows that are run, as numbers in the grid, y running before z.

        The first is that of the sequence that may be as long as any.
        """
        most = min(MOST_BLOCKS // self.splits, MOST_WORK // 4 // self._work(self.short))
        return chosen_blocks((1, *launch.grid[1:]), seed)[: max(2, most)]


def full_plan(problem: DecodeProblem, config: Config, launch_of: LaunchOf) -> Plan:
    """Return the problem's own launch, of its first kernel; none where the configuration states no sizes of tiles.

    Nor is there one where q or the block table is too large to be drawn.
    """
    drawn = max(problem.batch * problem.table_width, problem.batch * problem.seq_q * problem.heads * problem.head_dim)
    if not {"tile_m", "tile_n", "warps"} <= config.keys() or drawn > MOST_DRAWN:
        return ()
    return [(FullCase("full grid", problem, config), replace(launch_of(problem), then=()))]
