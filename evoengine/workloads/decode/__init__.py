"""Decode attention: a few queries of each sequence over a long cache of keys and values, contiguous or in pages.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from evoengine.devices.base import DTYPE_BYTES
from evoengine.records import Config, Launch, Value
from evoengine.workloads.base import Case, FullSize, IndexBound, Tensors, Workload
from evoengine.workloads.coverage import Cell
from evoengine.workloads.decode.cases import FullCase, cells, full_plan, gate_cases, visited
from evoengine.workloads.decode.problem import (
    CACHES,
    COMBINED,
    DTYPES,
    EXAMPLE,
    DecodeProblem,
    parameters,
    parse_problem,
)


class Decode(Workload[DecodeProblem]):
    name = "decode"
    grammar = (
        f"b…,h…[,kv…],s…[,sq…],d…,{'|'.join(DTYPES)}[,{'|'.join(CACHES)}][,page…][,window…][,softcap…][,alibi][,sinks]"
    )
    example = EXAMPLE
    compile_time = ("head_dim", "dtype", "element_bytes", "page", "window", "softcap", "alibi", "sinks")
    baseline_label = "SDPA"

    parse = staticmethod(parse_problem)
    parameters = staticmethod(parameters)
    cases = staticmethod(gate_cases)
    cells = staticmethod(cells)
    full_plan = staticmethod(full_plan)

    def constants(self, problem: DecodeProblem) -> dict[str, Value]:
        """Return the compile-time values, with those of `cache` and `latent` only where the problem has them."""
        of_cache = {"cache": problem.cache} if problem.cache else {}
        of_latent = {"latent": True, "head_dim_v": problem.head_dim_v} if problem.latent else {}
        return super().constants(problem) | of_cache | of_latent

    def flops(self, problem: DecodeProblem) -> float:
        """Return 2·B·H·Sq·S·(D + Dv), as of attention without a mask, where S are the keys within the window."""
        p = problem
        return 2.0 * p.batch * p.heads * p.seq_q * p.keys * (p.head_dim + p.head_dim_v)

    def min_dram_bytes(self, problem: DecodeProblem) -> float:
        """Return the bytes of the keys and values of all sequences read once, of q, o, the table and the lengths."""
        p = problem
        cache = len(p.caches) * p.batch * p.keys * p.kv_heads * p.head_dim
        queries = p.batch * p.seq_q * p.heads * (p.head_dim + p.head_dim_v)
        return float(p.key_bytes * cache + DTYPE_BYTES[p.dtype] * queries + 4 * p.batch * (p.table_width + 1))

    def visited(self, case: Case[DecodeProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        return visited(case)

    def kernel_parameters(self, entry: str) -> tuple[str, ...] | None:
        return COMBINED if entry == "combine" else None

    def indices(self, problem: DecodeProblem, config: Config, seed: int) -> Mapping[str, np.ndarray]:
        """Return full lengths, and a table of all pages in a drawn order."""
        lengths = np.full(problem.batch, problem.seq_k, np.int32)
        table = np.random.default_rng(seed).permutation(problem.pages).astype(np.int32)
        return {"lengths": lengths.view(np.uint8)} | ({"block_table": table.view(np.uint8)} if problem.page else {})

    def index_bounds(self, problem: DecodeProblem) -> tuple[IndexBound, ...]:
        """Return those of lengths, and of the pages that a sequence of its length has."""
        lengths = IndexBound("lengths", problem.seq_k)
        if not problem.page:
            return (lengths,)
        return lengths, IndexBound("block_table", problem.pages - 1, "lengths", problem.page)

    def full_size(self) -> FullSize[FullCase]:
        from evoengine.workloads.decode.full_size_tensors import DecodeFullSize

        return DecodeFullSize()

    def tensors(self) -> Tensors[DecodeProblem]:
        from evoengine.workloads.decode.tensors import DecodeTensors

        return DecodeTensors()


WORKLOAD = Decode()
