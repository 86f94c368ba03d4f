"""The cases of attention backward at full size: blocks of each of its kernels over tensors of the problem's size.

Only there do faults occur in offsets beyond 32 bits and in indices of many heads and batch entries. Kernels whose
blocks loop over queries or keys are launched for shorter heads in more batch entries, which keeps the sizes of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from evoengine.records import Config, Launch, Plan
from evoengine.workloads.attention_backward.problem import LAST, MOST_HEADS, PREPARE, BackwardProblem
from evoengine.workloads.full_size import chosen_blocks, few

LaunchOf = Callable[[BackwardProblem], Launch]

NAMES = {PREPARE: "full size, sums of dO O", LAST: "full size, dQ"}
"""names of cases, by kernel; any other kernel is that of dK and dV"""
MOST_WORK = 60_000_000
"""limit of queries times keys times head_dim of all blocks of a case"""
LEAST_BLOCKS, MOST_BLOCKS = 3, 12
MOST_TILES = 16
"""limit of the tiles of queries or keys of a head"""
L2_OF_QUERIES = 16 << 20
"""bytes of Q, dO and sums of dQ of the heads whose blocks are assigned together under a mask"""


@dataclass(frozen=True, slots=True)
class FullCase:
    """Some blocks of one kernel of a launch for `problem`, each run by itself."""

    name: str
    problem: BackwardProblem
    config: Config = field(hash=False)
    entry: str
    part: str | None = None

    @property
    def adds_up(self) -> bool:
        """Return whether dQ is summed in scratch memory."""
        return adds_up(self.config)

    def blocks(self, launch: Launch, seed: int) -> list[int]:
        """Return the numbers of the blocks that are run; of a cluster, the first."""
        p, m, n = self.problem, int(self.config["tile_m"]), int(self.config["tile_n"])
        each = max(m, n) * p.head_dim * (p.heads // p.kv_heads * p.seq_q if self.entry != LAST else p.seq_k)
        most = MOST_BLOCKS if is_light(self.entry, self.config) else MOST_WORK // each
        step = int(self.config.get("split_q", 1)) if self.entry not in (PREPARE, LAST) else 1
        return chosen_blocks(launch.grid, seed, step=step)[: max(LEAST_BLOCKS, min(MOST_BLOCKS, most))]

    def owner(self, grid: tuple[int, int, int], block: int) -> tuple[int, int]:
        """Return the head of a block among those of all batch entries, and its tile of keys or rows.

        The head is a KV head except for the kernel of dQ. The order of blocks of dK and dV under a mask is that of
        `attention-backward/key_block.cuh.j2`.
        """
        p, config = self.problem, self.config
        if self.entry == LAST or config["family"] == "scalar":
            head, tile = divmod(block, grid[0])
            backwards = p.causal and self.entry == LAST and config["family"] == "mma"
            return head, grid[0] - 1 - tile if backwards else tile
        tiles, number = -(-p.seq_k // int(config["tile_n"])), block // int(config.get("split_q", 1))
        if not p.causal:
            return divmod(number, tiles)
        heads = p.kv_heads * p.batch
        at_once = min(heads, max(1, L2_OF_QUERIES // (8 * p.head_dim) // (p.heads // p.kv_heads * p.seq_q)))
        first = number // (at_once * tiles) * at_once
        tile, head = divmod(number - first * tiles, min(at_once, heads - first))
        return first + head, tile


def adds_up(config: Config) -> bool:
    return config.get("dq") in ("atomic", "bulk")


def is_light(entry: str, config: Config) -> bool:
    """Return whether a block of the kernel reads only its own rows."""
    return entry == PREPARE or (entry == LAST and adds_up(config))


def full_plan(problem: BackwardProblem, config: Config, launch_of: LaunchOf) -> Plan:
    """Return a case for each kernel, with its launch; none if the configuration states no tiles."""
    if not {"tile_m", "tile_n"} <= config.keys():
        return ()
    folded = _folded(problem, config)
    part = None if folded == problem else "with fewer queries and keys in more batch entries"
    plan = []
    for entry, _ in launch_of(problem).kernels(PREPARE):
        light = is_light(entry, config)
        own = problem if light else folded
        name = NAMES.get(entry, "full size, dK and dV")
        case = FullCase(name, own, config, entry, None if light else part)
        plan.append((case, dict(launch_of(own).kernels(PREPARE))[entry]))
    return plan


def _folded(problem: BackwardProblem, config: Config) -> BackwardProblem:
    """Return some tiles of queries and of keys, and so many batch entries that inputs have the problem's size.

    There are two tiles, or so many that queries and keys are shortened by the same factor.
    """
    m, n = int(config["tile_m"]), int(config["tile_n"])
    of_queries = -(-2 * n * problem.seq_q // (m * problem.seq_k))
    of_keys = -(-2 * m * problem.seq_k // (n * problem.seq_q))
    rows = few(problem.seq_q, m, min(max(2, of_queries), MOST_TILES))
    keys = few(problem.seq_k, n, min(max(2, of_keys), MOST_TILES))
    batch = min(problem.batch * problem.seq_q // rows, problem.batch * problem.seq_k // keys, MOST_HEADS)
    return replace(problem, batch=max(problem.batch, batch), seq_q=rows, seq_k=keys)
