"""Attention forward over a batch of sequences of different lengths, packed without padding; K and V packed or paged.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, TensorMapArgument, TensorParameter
from evoengine.devices.tensor_map import ragged
from evoengine.records import Config, Launch
from evoengine.workloads.attention.problem import OUTPUT
from evoengine.workloads.base import Case, FullSize, Tensors, Workload
from evoengine.workloads.varlen.cases import cells, gate_cases, visited
from evoengine.workloads.varlen.full_size import FullCase, full_plan
from evoengine.workloads.varlen.problem import EXAMPLE, VarlenProblem, parse_problem


class Varlen(Workload[VarlenProblem]):
    name = "varlen"
    grammar = "h…[,kv…],d…,fp16|bf16[,causal],lens=…+…[,kvlens=…+…][,page…][,pool…]; 16x2048 for 16 sequences of 2048"
    example = EXAMPLE
    compile_time = ("head_dim", "head_dim_v", "dtype", "causal", "element_bytes", "page")
    baseline_label = "SDPA"

    parse = staticmethod(parse_problem)
    cases = staticmethod(gate_cases)
    cells = staticmethod(cells)
    visited = staticmethod(visited)
    full_plan = staticmethod(full_plan)

    @property
    def entry(self) -> str:
        return "attention"

    def flops(self, problem: VarlenProblem) -> float:
        """Return 4·heads·head_dim for each score that is not masked, for the sequences' own lengths.

        Half of a square under a mask counts, as in `attention`.
        """
        return 4.0 * problem.heads * problem.head_dim * problem.scores

    def min_dram_bytes(self, problem: VarlenProblem) -> float:
        """Return the bytes of Q, K and V read once and O written once, of the sequences' own rows."""
        rows = problem.heads * problem.total_q + problem.kv_heads * problem.total_kv
        return 2.0 * DTYPE_BYTES[problem.dtype] * problem.head_dim * rows

    def gate_launch(self, case: Case[VarlenProblem], launch: Launch) -> Launch:
        """Return the launch of a case with more blocks than there are tiles of rows.

        A host that does not read the lengths launches the maximum number of blocks. A persistent kernel must be correct
        with any number and gets the largest that leaves each block at least two tiles and the last round not filled, or
        one block.
        """
        if case.config.get("schedule") == "static":
            tiles = case.problem.row_tiles(int(case.config["tile_m"])) * case.problem.heads
            blocks = next((n for n in range(tiles // 2, 1, -1) if tiles % n), 1)
            return replace(launch, grid=(blocks, 1, 1))
        x, y, z = launch.grid
        more = (x, y + 2, z) if case.config.get("schedule") == "longest_first" else (x + 2, y, z)
        return replace(launch, grid=more)

    def parameters(self, problem: VarlenProblem, config: Config) -> tuple[Parameter, ...]:
        p = problem
        pool = (p.pool, p.page) if p.page else (p.pool,)
        keys = (*pool, p.kv_heads, p.head_dim)
        rows = (p.total_q, p.heads, p.head_dim)
        table = [TensorParameter("table", (p.sequences, p.table_width), "int32")] if p.page else []
        width = [ScalarArgument("table_width", np.int32(p.table_width))] if p.page else []
        return (
            TensorParameter("q", rows, p.dtype),
            TensorParameter("k", keys, p.dtype),
            TensorParameter("v", keys, p.dtype),
            TensorParameter("cu_q", (p.sequences + 1,), "int32"),
            TensorParameter("cu_kv", (p.sequences + 1,), "int32"),
            TensorParameter("order", (p.sequences,), "int32"),
            *table,
            TensorParameter(OUTPUT, rows, p.dtype, output=True),
            ScalarArgument("sequences", np.int32(p.sequences)),
            ScalarArgument("heads", np.int32(p.heads)),
            ScalarArgument("kv_heads", np.int32(p.kv_heads)),
            *width,
            ScalarArgument("scale", np.float32(1.0 / math.sqrt(p.head_dim))),
            *_tensor_maps(p, config),
        )

    def indices(self, problem: VarlenProblem, config: Config, seed: int) -> Mapping[str, np.ndarray]:
        """Return cumulative lengths, order and table, on which the work of a block depends."""
        from evoengine.workloads.varlen.tensors import draw_table, index_tensors

        found = index_tensors(problem, draw_table(problem, seed))
        return {name: np.ascontiguousarray(values).reshape(-1).view(np.uint8) for name, values in found.items()}

    def tensors(self) -> Tensors[VarlenProblem]:
        from evoengine.workloads.varlen.tensors import VarlenTensors

        return VarlenTensors()

    def full_size(self) -> FullSize[FullCase]:
        from evoengine.workloads.varlen.full_size_tensors import VarlenFullSize

        return VarlenFullSize(self)

    def loader(self) -> Path:
        return Path(__file__).with_name("loader.py")


def _tensor_maps(problem: VarlenProblem, config: Config) -> tuple[TensorMapArgument, ...]:
    """Return the tensor maps of Q, K and V, and of O if it is stored by TMA, whose rows have the columns of all heads.

    A box has a tile's rows, or those of a page if it has fewer; for O, a warpgroup's rows.
    """
    if config.get("load") != "tma":
        return ()
    p, tile_m, tile_n = problem, int(config["tile_m"]), int(config["tile_n"])
    columns = 64 if p.head_dim % 64 == 0 else 32

    def over(name: str, heads: int, rows: int) -> TensorMapArgument:
        return ragged(f"map_{name}", name, p.dtype, heads * p.head_dim, (rows, columns), 2 * columns)

    keys = min(tile_n, p.page or tile_n)
    maps = over("q", p.heads, tile_m), over("k", p.kv_heads, keys), over("v", p.kv_heads, keys)
    return (*maps, over(OUTPUT, p.heads, 64)) if config["o_store"] == "tma" else maps


WORKLOAD = Varlen()
