"""Fused attention forward, O = softmax(Q·Kᵀ/√head_dim + mask)·V.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evoengine.records import Launch, Value
from evoengine.workloads.attention.cases import cells, gate_cases, visited
from evoengine.workloads.attention.full_size import FullCase, full_plan
from evoengine.workloads.attention.problem import EXAMPLE, LSE, AttentionProblem, parameters, parse_problem
from evoengine.workloads.base import Case, FullSize, Tensors, Workload


class Attention(Workload[AttentionProblem]):
    name = "attention"
    grammar = "b…,h…,s…,d…[,dv…],fp16|bf16[,causal][,kv…][,lse]; sq…,sk… for unlike lengths"
    example = EXAMPLE
    compile_time = ("head_dim", "head_dim_v", "dtype", "causal", "element_bytes")
    is_default = True
    baseline_label = "SDPA"

    parse = staticmethod(parse_problem)
    parameters = staticmethod(parameters)
    cases = staticmethod(gate_cases)
    cells = staticmethod(cells)
    visited = staticmethod(visited)
    full_plan = staticmethod(full_plan)

    def flops(self, problem: AttentionProblem) -> float:
        """Return 2·B·H·Sq·Sk·(D + Dv), halved for causal: the field's own count (FlashAttention's benchmarks)."""
        widths = problem.head_dim + problem.head_dim_v
        full = 2.0 * problem.batch * problem.heads * problem.seq_q * problem.seq_k * widths
        return full / 2 if problem.causal else full

    def min_dram_bytes(self, problem: AttentionProblem) -> float:
        """Return the bytes of Q, K and V read once, and of O and LSE written once."""
        q = problem.batch * problem.heads * problem.seq_q
        kv = problem.batch * problem.kv_heads * problem.seq_k
        return 2.0 * (q + kv) * (problem.head_dim + problem.head_dim_v) + 4.0 * q * problem.lse

    def constants(self, problem: AttentionProblem) -> dict[str, Value]:
        return {**super().constants(problem), **({LSE: True} if problem.lse else {})}

    def gate_launch(self, case: Case[AttentionProblem], launch: Launch) -> Launch:
        """Return the launch of a case: the space's, except for the number of blocks if that is free.

        A persistent kernel must be right with any number of blocks. It gets the largest number that leaves each at
        least two tiles of rows and the last round not filled, or one block, whatever the space states for the problem's
        size.
        """
        if case.config.get("schedule") != "static":
            return launch
        p = case.problem
        row_tiles = -(-p.seq_q // int(case.config["tile_m"])) * p.heads * p.batch
        blocks = next((n for n in range(row_tiles // 2, 1, -1) if row_tiles % n), 1)
        return replace(launch, grid=(blocks, 1, 1))

    def tensors(self) -> Tensors[AttentionProblem]:
        from evoengine.workloads.attention.tensors import AttentionTensors

        return AttentionTensors()

    def full_size(self) -> FullSize[FullCase]:
        from evoengine.workloads.attention.full_size_tensors import AttentionFullSize

        return AttentionFullSize()

    def loader(self) -> Path:
        return Path(__file__).with_name("loader.py")


WORKLOAD = Attention()
