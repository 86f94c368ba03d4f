"""How a configuration cuts C into tiles, and hands them to blocks."""

from __future__ import annotations

from evoengine.records import Config
from evoengine.workloads.gemm.problem import GemmProblem

_CLUSTERS = {"2x1": (2, 1), "1x2": (1, 2)}


def cluster_shape(config: Config) -> tuple[int, int]:
    """Return the tiles that a cluster computes at a time, below and beside one another."""
    return _CLUSTERS.get(str(config.get("cluster")), (1, 1))


def split_k(config: Config) -> int:
    """Return among how many blocks of a cluster the steps of one tile are shared."""
    return int(config.get("split_k", 1))


def blocks_of_cluster(config: Config) -> int:
    down, across = cluster_shape(config)
    return down * across * split_k(config)


def cluster_extents(config: Config) -> tuple[int, int]:
    """Return the rows and columns of C that a cluster computes at a time."""
    down, across = cluster_shape(config)
    return down * int(config["tile_m"]), across * int(config["tile_n"])


def cluster_tiles(problem: GemmProblem, config: Config) -> int:
    rows, columns = cluster_extents(config)
    return problem.batch * -(-problem.m // rows) * -(-problem.n // columns)


def fills_clusters(problem: GemmProblem, config: Config) -> bool:
    """Return whether every block of a cluster has a tile within C whenever one of them has."""
    return all(
        -(-length // int(config[tile])) % together == 0
        for length, tile, together in zip(
            (problem.m, problem.n), ("tile_m", "tile_n"), cluster_shape(config), strict=True
        )
    )
