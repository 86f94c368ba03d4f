"""Fused attention forward, O = softmax(Q·Kᵀ/√head_dim + mask)·V: what it costs and the cases a candidate must pass.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `attention_torch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from evoengine.problem import Problem
from evoengine.records import Config

ENTRY = "attention"
COMPILE_TIME = ("head_dim", "dtype", "causal", "element_bytes")
"""the problem's names that a template may bake into its text; all others are arguments of the kernel"""


def flops(problem: Problem) -> float:
    """4·B·H·Sq·Sk·D, halved for causal: the field's own count, so that figures compare (FlashAttention's benchmarks)."""
    full = 4.0 * problem.batch * problem.heads * problem.seq_q * problem.seq_k * problem.head_dim
    return full / 2 if problem.causal else full


def least_bytes(problem: Problem) -> float:
    """Device-memory traffic that no kernel can avoid: Q, K and V read once, O written once."""
    q = problem.batch * problem.heads * problem.seq_q
    kv = problem.batch * problem.kv_heads * problem.seq_k
    return 2.0 * (2 * q + 2 * kv) * problem.head_dim


@dataclass(frozen=True, slots=True)
class Case:
    """One question put to a candidate: a small problem and a way to draw its inputs.

    `config` is the candidate's: some kernels take arguments that hang on it (`attention_torch.tensor_maps`).
    """

    name: str
    problem: Problem
    draw: str = "normal"
    config: Config = field(default_factory=dict, hash=False)


def cases(problem: Problem, config: Config) -> tuple[Case, ...]:
    """The gate's cases for a configuration: small problems that share the compile-time part of `problem`.

    Lengths are set against the configuration's tiles, so that every candidate meets a ragged tail and a pipeline that
    wraps around at least twice (2·stages + 1 tiles: fewer let a stage that is reused too early go unseen).
    """
    tile_m, tile_n = int(config.get("tile_m", 64)), int(config.get("tile_n", 64))
    tiles = 2 * int(config.get("stages", 1)) + 1
    group = min(problem.heads // problem.kv_heads, 3)
    kv_heads = 1 if problem.kv_heads == 1 and problem.heads > 1 else 2
    small = replace(problem, batch=1, heads=kv_heads * group, kv_heads=kv_heads)
    single = replace(small, heads=group, kv_heads=1)

    def at(base: Problem, seq_q: int, seq_k: int) -> Problem:
        return replace(base, seq_q=min(seq_q, seq_k) if problem.causal else seq_q, seq_k=seq_k)

    found = [
        Case("one row", at(small, 1, 1)),
        Case("one query", at(small, 1, tile_n + 1)),
        Case("whole tiles", at(small, tile_m, 2 * tile_n)),
        Case("batch and heads", replace(at(small, 17, 33), batch=3)),
        Case("ragged 113x203", at(small, 113, 203)),
        Case("pipeline wraps", at(single, tile_m // 2 + 3, tiles * tile_n + 5)),
        Case("large logits", at(single, tile_m + 1, 2 * tile_n + 1), "large logits"),
        Case("large products", at(single, tile_m // 2, tile_n + 9), "large products"),
        Case("constant V", at(single, tile_m - 1, tile_n + 7), "constant V"),
        Case("one-hot rows", at(single, tile_m + 3, 2 * tile_n - 3), "one-hot rows"),
        Case("late maximum", at(single, tile_m, 3 * tile_n + 1), "late maximum"),
    ]
    if config.get("schedule") == "static":
        # at least two blocks that go through several tiles of rows, the last round not filled
        found.append(Case("blocks go round", replace(at(single, tile_m + 1, 2 * tile_n + 1), batch=-(-4 // group))))
    if not problem.causal:
        found.append(Case("one key", at(small, 239, 1)))
        found.append(Case("permuted K and V", at(single, tile_m - 5, 2 * tile_n + 9), "permuted"))
    return tuple(replace(case, config=config) for case in found)
