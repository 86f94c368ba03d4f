"""How a configuration deals out the steps of tiles to blocks."""

from __future__ import annotations

from collections.abc import Iterator

from evoengine.records import Config
from evoengine.workloads.gemm.cases import tile_sizes
from evoengine.workloads.gemm.tiles import cluster_tiles, split_k
from evoengine.workloads.w4a16.problem import W4A16Problem


def stream_steps(config: Config) -> int:
    """Return the steps of each block, of one tile or of several; 0 where blocks have whole tiles, or equal parts."""
    return int(config.get("stream_steps", 0)) if split_k(config) == 1 else 0


def most_sharers(problem: W4A16Problem, config: Config) -> int:
    """Return how many blocks share a tile at most."""
    each = stream_steps(config)
    return (_steps(problem, config) + each - 2) // each + 1 if each else split_k(config)


def parts(problem: W4A16Problem, config: Config, block: int) -> Iterator[int]:
    """Yield the steps of each tile that a block has a part of, in order."""
    steps, each = _steps(problem, config), stream_steps(config)
    if not each:
        share, left = divmod(steps, split_k(config))
        yield share + (block % split_k(config) < left)
        return
    at = block * each
    end = min(at + each, cluster_tiles(problem.gemm, config) * steps)
    while at < end:
        own = min(steps - at % steps, end - at)
        yield own
        at += own


def _steps(problem: W4A16Problem, config: Config) -> int:
    return -(-problem.k // tile_sizes(config)[2])
