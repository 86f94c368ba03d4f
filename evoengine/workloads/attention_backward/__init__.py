"""Fused attention backward: the gradients of Q, K and V of O = softmax(Q·Kᵀ/√head_dim + mask)·V.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from evoengine.records import Config, Launch
from evoengine.workloads.attention_backward.full_size import FullCase, full_plan
from evoengine.workloads.attention_backward.problem import (
    DTYPES,
    EXAMPLE,
    PREPARE,
    TAKEN,
    VALUES,
    BackwardProblem,
    parameters,
    parse_problem,
)
from evoengine.workloads.base import Case, FullSize, Tensors, Workload
from evoengine.workloads.coverage import Cell, own_tail, remainder_cells, visited_remainders

MOST_LOGITS = 1 << 18
"""limit of the logits of a case with the problem's own number of queries or keys"""
MOST_HEADS_AT_ONCE = 512
"""limit of the heads of all batch entries in one case"""
GROUPED = ("heads that share K and V", "a group of three heads, in several batch entries")
"""cells of heads"""
SHORT = (1, 2)
"""keys of a tile that the first query does not see while it sees the others: they decide whether a tile is masked"""


class AttentionBackward(Workload[BackwardProblem]):
    name = "attention-backward"
    grammar = f"b…,h…,s…,d…,{'|'.join(DTYPES)}[,causal][,kv…]; sq…,sk… for unlike lengths"
    example = EXAMPLE
    compile_time = ("head_dim", "dtype", "causal", "element_bytes")
    baseline_label = "SDPA"

    parse = staticmethod(parse_problem)
    parameters = staticmethod(parameters)
    full_plan = staticmethod(full_plan)

    @property
    def entry(self) -> str:
        return PREPARE

    def flops(self, problem: BackwardProblem) -> float:
        """Return 10·B·H·Sq·Sk·D, halved for causal: 2.5 times the forward pass, the field's own count.

        These are five products: Q·Kᵀ once more, dO·Vᵀ, and one for each gradient.
        """
        p = problem
        full = 10.0 * p.batch * p.heads * p.seq_q * p.seq_k * p.head_dim
        return full / 2 if p.causal else full

    def min_dram_bytes(self, problem: BackwardProblem) -> float:
        """Return the bytes of all inputs read once and of all gradients written once."""
        p = problem
        rows, keys = p.batch * p.heads * p.seq_q, p.batch * p.kv_heads * p.seq_k
        return 2.0 * p.head_dim * (4 * rows + 4 * keys) + 4.0 * rows

    def cases(self, problem: BackwardProblem, config: Config) -> tuple[Case[BackwardProblem], ...]:
        return tuple(replace(case, config=config, whole=problem) for case in _cases(problem, config))

    def cells(self, problem: BackwardProblem, config: Config) -> frozenset[Cell]:
        """Return remainders of queries and keys, groups of heads, and what values must show."""
        if not {"tile_m", "tile_n"} <= config.keys():
            return frozenset()
        values = VALUES if problem.causal else VALUES[:2]
        diagonal = map(_short_of_a_tile, SHORT if problem.causal else ())
        return frozenset(
            {
                *remainder_cells("queries", int(config["tile_m"]), problem.seq_q, near=1),
                *remainder_cells("keys", int(config["tile_n"]), problem.seq_k, near=1),
                *(Cell("heads", what) for what in GROUPED),
                *(Cell("values", what) for what in values),
                *(Cell("diagonal", what) for what in diagonal),
            }
        )

    def visited(self, case: Case[BackwardProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        """Return the cells that a case visits by its sizes."""
        whole, p = case.whole, case.problem
        if whole is None or not {"tile_m", "tile_n"} <= case.config.keys():
            return frozenset()
        found = {
            *visited_remainders("queries", p.seq_q, int(case.config["tile_m"]), whole.seq_q),
            *visited_remainders("keys", p.seq_k, int(case.config["tile_n"]), whole.seq_k),
        }
        if p.heads > p.kv_heads:
            found.add(Cell("heads", GROUPED[0]))
        if p.heads == 3 * p.kv_heads and p.kv_heads > 1 and p.batch > 1:
            found.add(Cell("heads", GROUPED[1]))
        if p.causal and p.seq_q <= p.seq_k:
            found.add(Cell("diagonal", _short_of_a_tile(-(p.seq_k - p.seq_q + 1) % int(case.config["tile_n"]))))
        return frozenset(found)

    def kernel_parameters(self, entry: str) -> tuple[str, ...]:
        return TAKEN[entry]

    def full_size(self) -> FullSize[FullCase]:
        from evoengine.workloads.attention_backward.full_size_tensors import BackwardFullSize

        return BackwardFullSize(self)

    def tensors(self) -> Tensors[BackwardProblem]:
        from evoengine.workloads.attention_backward.tensors import BackwardTensors

        return BackwardTensors()


def _short_of_a_tile(keys: int) -> str:
    return f"the first query ends {keys} short of a tile"


def _single(problem: BackwardProblem) -> BackwardProblem:
    return replace(problem, batch=1, heads=1, kv_heads=1)


def _cases(problem: BackwardProblem, config: Config) -> Iterator[Case[BackwardProblem]]:
    """Yield cases whose lengths are set against the configuration's tiles.

    They are single queries and keys, whole tiles, tails that end one element before and after a tile's end, the
    remainders that the problem itself leaves, and pipelines that wrap around twice. Heads are grouped as in the
    problem, and by three. Under a mask there are as many queries as keys, fewer, and more, so that rows see no key.
    """
    m, n = int(config.get("tile_m", 64)), int(config.get("tile_n", 64))
    stages, group, one = int(config.get("stages", 1)), problem.heads // problem.kv_heads, _single(problem)
    split = int(config.get("split_q", 1))
    small = replace(one, heads=2 * min(group, 2), kv_heads=2)
    several = replace(one, batch=2, heads=2 * min(group, 8), kv_heads=2)

    def case(name: str, seq_q: int, seq_k: int, draw: str = "", of: BackwardProblem = one) -> Case[BackwardProblem]:
        # sums over rows are meaningless if some rows have no gradient
        all_see = seq_k >= seq_q or not of.causal
        return Case(name, replace(of, seq_q=seq_q, seq_k=seq_k), draw or ("normal" if all_see else "ordinary"))

    yield case("one key", m + 1, 1)
    yield case("one query", 1, n + 1)
    yield case("whole tiles", 2 * m, 2 * n)
    yield case("batch and heads", 17, 33, of=several)
    yield case("heads grouped by three", m + 5, 19, of=replace(several, heads=6))
    yield case("remainders", m + own_tail(problem.seq_q, m), n + own_tail(problem.seq_k, n), of=small)
    yield case("pipeline wraps", (2 * stages * split + 2) * m - 1, 2 * n - 1)
    yield case("many keys", 2 * m - 1, 4 * n + 1)
    yield case("large logits", m + 3, 2 * n - 1, "large logits")
    yield case("one-hot rows", 2 * m + 1, n + 3, "one-hot rows")
    if problem.causal:
        square = max(m, n) + 3
        yield case("as many queries as keys", square, square, "diagonal")
        yield case("the diagonal within a tile", m + 2, m + n - 1, "diagonal")
        yield case("the first query a key short of a tile", m, m + n - 2)
        yield case("rows that see no key", m + n + 5, n - 3)
        yield case("tiles that see no key", 3 * max(m, n) + 1, n + 1, of=small)
    yield from _own_extents(problem, m, n)


def _own_extents(problem: BackwardProblem, tile_m: int, tile_n: int) -> Iterator[Case[BackwardProblem]]:
    """Yield cases of candidates that may rank: the problem's own lengths, as far as affordable, and its heads."""
    one = _single(problem)
    rows, keys = min(problem.seq_q, MOST_LOGITS // (4 * tile_n)), min(problem.seq_k, MOST_LOGITS // (4 * tile_m))
    yield Case("own queries", replace(one, seq_q=rows, seq_k=2 * tile_n + 1), "ordinary", long=True)
    yield Case("own keys", replace(one, seq_q=2 * tile_m + 1, seq_k=keys), "ordinary", long=True)
    if problem.batch * problem.heads <= MOST_HEADS_AT_ONCE:
        yield Case("own heads and batch", replace(problem, seq_q=3, seq_k=5), "ordinary", long=True, once=True)


WORKLOAD = AttentionBackward()
