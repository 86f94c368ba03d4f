"""Fused attention forward, O = softmax(Q·Kᵀ/√head_dim + mask)·V: what it costs and the cases a candidate must pass.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evoengine.devices.base import Parameter
from evoengine.records import Config, Launch, Plan
from evoengine.workloads.attention.full_size import FullCase, full_plan, long_cases
from evoengine.workloads.attention.parameters import parameters
from evoengine.workloads.attention.problem import EXAMPLE, AttentionProblem, parse_problem
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Workload

LONG = 4096
"""keys of the longest case: 64 steps of a tile of 64, over which errors of sums kept in 16 bits add up. Tiles of more
than 64 rows get half as many: the emulator computes whole tiles, and this case would take a third of the gate's time"""


class Attention(Workload[AttentionProblem]):
    name = "attention"
    grammar = "b…,h…,s…,d…[,dv…],fp16|bf16[,causal][,kv…]; sq…,sk… for unlike lengths"
    example = EXAMPLE
    compile_time = ("head_dim", "head_dim_v", "dtype", "causal", "element_bytes")
    is_default = True
    baseline_label = "SDPA"

    def parse(self, text: str) -> AttentionProblem:
        return parse_problem(text)

    def flops(self, problem: AttentionProblem) -> float:
        """2·B·H·Sq·Sk·(D + Dv), halved for causal: the field's own count (FlashAttention's benchmarks)."""
        widths = problem.head_dim + problem.head_dim_v
        full = 2.0 * problem.batch * problem.heads * problem.seq_q * problem.seq_k * widths
        return full / 2 if problem.causal else full

    def min_dram_bytes(self, problem: AttentionProblem) -> float:
        """Q, K and V read once, O written once."""
        q = problem.batch * problem.heads * problem.seq_q
        kv = problem.batch * problem.kv_heads * problem.seq_k
        return 2.0 * (q + kv) * (problem.head_dim + problem.head_dim_v)

    def cases(self, problem: AttentionProblem, config: Config) -> tuple[Case[AttentionProblem], ...]:
        return (*small_cases(problem, config), *long_cases(problem, config))

    def gate_launch(self, case: Case[AttentionProblem], launch: Launch) -> Launch:
        """The launch of a case: the space's, but for the number of blocks where that is free.

        A persistent kernel must be right with any number of blocks. It gets the most that leave each at least two tiles
        of rows and the last round not filled, or one block, whatever the space says of the problem's size.
        """
        if case.config.get("schedule") != "static":
            return launch
        p = case.problem
        row_tiles = -(-p.seq_q // int(case.config["tile_m"])) * p.heads * p.batch
        blocks = next((n for n in range(row_tiles // 2, 1, -1) if row_tiles % n), 1)
        return replace(launch, grid=(blocks, 1, 1))

    def parameters(self, problem: AttentionProblem, config: Config) -> tuple[Parameter, ...]:
        return parameters(problem, config)

    def tensors(self) -> Tensors[AttentionProblem]:
        from evoengine.workloads.attention.tensors import AttentionTensors

        return AttentionTensors()

    def full_plan(self, problem: AttentionProblem, config: Config, launch_of: LaunchOf) -> Plan:
        return full_plan(problem, config, launch_of)

    def full_size(self) -> FullSize[FullCase]:
        from evoengine.workloads.attention.full_size_tensors import AttentionFullSize

        return AttentionFullSize()

    def loader(self) -> Path:
        return Path(__file__).with_name("loader.py")


def small_cases(problem: AttentionProblem, config: Config) -> tuple[Case[AttentionProblem], ...]:
    """The gate's cases for a configuration: small problems that share the compile-time part of `problem`.

    Lengths are set against the configuration's tiles, so that every candidate meets whole tiles, tails that end 1 and 2
    keys before a tile's end and shortly behind one, the remainders that the problem itself leaves, and a pipeline that
    wraps around at least twice (2·stages + 1 tiles: fewer let a stage that is reused too early go unseen). One case has
    the problem's own number of query heads per KV head.
    """
    tile_m, tile_n = int(config.get("tile_m", 64)), int(config.get("tile_n", 64))
    tiles = 2 * int(config.get("stages", 1)) + 1
    group = problem.heads // problem.kv_heads
    single = replace(problem, batch=1, heads=1, kv_heads=1)
    kv_heads = 1 if problem.kv_heads == 1 and problem.heads > 1 else 2
    small = replace(single, heads=kv_heads * min(group, 2), kv_heads=kv_heads)
    grouped = replace(single, batch=2, heads=kv_heads * group, kv_heads=kv_heads)
    own_m, own_n = problem.seq_q % tile_m or tile_m // 3 + 1, problem.seq_k % tile_n or tile_n // 3 + 1

    long = LONG if tile_m <= 64 else LONG // 2
    any_order = "normal" if problem.causal else "permuted"

    def at(base: AttentionProblem, seq_q: int, seq_k: int) -> AttentionProblem:
        return replace(base, seq_q=min(seq_q, seq_k) if problem.causal else seq_q, seq_k=seq_k)

    found = [
        Case("one key", at(single, tile_m + 2, 1)),
        Case("one query", at(small, 1, tile_n + 1)),
        Case("whole tiles", at(small, tile_m, 2 * tile_n)),
        Case("batch and heads", at(grouped, 17, 33)),
        Case("remainders", at(small, tile_m + own_m, tile_n + own_n)),
        Case("pipeline wraps", at(single, tile_m // 2 + 3, (tiles + 1) * tile_n - 1), any_order),
        Case("extreme logits, one key short", at(single, tile_m - 1, 2 * tile_n - 1), "extreme logits"),
        Case("extreme logits, two keys short", at(single, tile_m + 1, 2 * tile_n - 2), "extreme logits"),
        Case("constant columns", at(single, tile_m - 2, tile_n + 3), "constant columns"),
        Case("one-hot rows", at(single, tile_m + 3, 2 * tile_n - 3), "one-hot rows"),
        Case("late maximum", at(single, tile_m, 3 * tile_n + 1), "late maximum"),
        Case("long", at(single, min(max(tile_m, 32), 64), long + tile_n - 1 - long % tile_n), "long"),
    ]
    if config.get("schedule") == "static":
        found.append(Case("blocks are persistent", at(replace(small, batch=2), tile_m + 1, 2 * tile_n + 1)))
    if problem.causal:
        found.append(Case("as many queries as keys", at(single, *[max(tile_m, tile_n) + 3] * 2)))
    return tuple(replace(case, config=config) for case in found)
