"""The parameters of an attention kernel, in order: q, k, v, o, its scalars, and tensor maps for TMA."""

from __future__ import annotations

import math

import numpy as np

from evoengine.devices.base import PassedParameter, ScalarArgument, TensorMapArgument, TensorParameter
from evoengine.records import Config
from evoengine.workloads.attention.problem import AttentionProblem

OUTPUT = "o"


def parameters(problem: AttentionProblem, config: Config) -> tuple[PassedParameter, ...]:
    p = problem
    queries = (p.batch, p.heads, p.seq_q, p.head_dim)
    keys = (p.batch, p.kv_heads, p.seq_k, p.head_dim)
    values = (p.batch, p.kv_heads, p.seq_k, p.head_dim_v)
    inputs = [TensorParameter(name, shape, p.dtype) for name, shape in (("q", queries), ("k", keys), ("v", values))]
    output = TensorParameter(OUTPUT, (p.batch, p.heads, p.seq_q, p.head_dim_v), p.dtype, output=True)
    return (*inputs, output, *_scalars(p, config), *_tensor_maps(p, config))


def _scalars(problem: AttentionProblem, config: Config) -> tuple[ScalarArgument, ...]:
    """Return the kernel's by-value parameters, in order, after its four pointers q, k, v, o.

    `batch` is among them if the grid, which then depends on the GPU, does not state it.
    """
    batch = (ScalarArgument("batch", np.int32(problem.batch)),) if config.get("schedule") == "static" else ()
    return (
        *batch,
        ScalarArgument("heads", np.int32(problem.heads)),
        ScalarArgument("kv_heads", np.int32(problem.kv_heads)),
        ScalarArgument("seq_q", np.int32(problem.seq_q)),
        ScalarArgument("seq_k", np.int32(problem.seq_k)),
        ScalarArgument("scale", np.float32(1.0 / math.sqrt(problem.head_dim))),
    )


def _tensor_maps(problem: AttentionProblem, config: Config) -> tuple[TensorMapArgument, ...]:
    """Return the tensor maps of Q, K and V, and of O if it is stored by TMA.

    Each is of [heads of the batch, seq, head_dim or head_dim_v]. A box holds a tile's rows (for O a warpgroup's; for K
    and V the part of one of a cluster's blocks) by the 64 or 32 columns that the kernel swizzles together; beyond a
    head's end it reads zeros and writes nothing.
    """
    if config.get("load") != "tma":
        return ()

    def over(name: str, width: int, heads: int, seq: int, rows: int) -> TensorMapArgument:
        columns, row = 64 if width % 64 == 0 else 32, 2 * width
        dims = (width, seq, heads * problem.batch)
        return TensorMapArgument(
            f"map_{name}", name, problem.dtype, dims, (row, row * seq), (columns, rows, 1), swizzle=2 * columns
        )

    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"]) // int(config.get("cluster", 1))
    queries, keys = (problem.heads, problem.seq_q), (problem.kv_heads, problem.seq_k, tile_n)
    width, width_v = problem.head_dim, problem.head_dim_v
    maps = over("q", width, *queries, tile_m), over("k", width, *keys), over("v", width_v, *keys)
    return (*maps, over(OUTPUT, width_v, *queries, 64)) if config["o_store"] == "tma" else maps
