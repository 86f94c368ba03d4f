"""Faults of the kind that mma.sync, ldmatrix and a ring of copies invite, planted one at a time; all are caught."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run
from evoengine.devices.base import ScalarArgument, TensorArgument
from evoengine.records import Launch, Outcome, Source
from tests.support.exhaustive import more, planted

PLAIN = "b2,h4,s256,d64,fp16"
CAUSAL = "b2,h8,s256,d64,bf16,causal,kv2"
# start points of the space
APART = {"family": "mma", "stages": 2, "v_wait": "before_softmax"}  # Q in registers, one stripe per warp
TOGETHER = {"family": "mma", "stages": 2, "v_wait": "with_k", "tile_m": 128}  # Q in registers, two stripes
SINGLE = {"family": "mma", "stages": 1, "layout": "swizzle"}  # Q in shared memory, one buffer each
PADDED = {"family": "mma", "stages": 1, "layout": "pad"}

K_ARRIVES = "pipeline_wait<2 * STAGES - 2>();\n        request_v"
V_ARRIVES = "pipeline_wait<2 * STAGES - 2>();\n        request_k"
FAULTS = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("K waited for too laxly", APART, PLAIN, K_ARRIVES, K_ARRIVES.replace("- 2>", "- 1>")),
    ("K waited for too laxly, one buffer", SINGLE, PLAIN, K_ARRIVES, K_ARRIVES.replace("- 2>", "- 1>")),
    ("V read before it arrived", APART, PLAIN, V_ARRIVES, V_ARRIVES.replace("- 2>", "- 1>")),
    ("V read before it arrived, one buffer", SINGLE, PLAIN, V_ARRIVES, V_ARRIVES.replace("- 2>", "- 1>")),
    ("V not waited for at all", SINGLE, PLAIN, "        loader.wait_v(tile);\n", ""),
    ("both waited for too laxly", TOGETHER, PLAIN, "pipeline_wait<STAGES - 2>", "pipeline_wait<STAGES - 1>"),
    ("Q read before it arrived", APART, PLAIN, "pipeline_wait<2 * STAGES - 1>", "pipeline_wait<2 * STAGES>"),
    ("Q read before all threads brought theirs", TOGETHER, PLAIN, "pipeline_wait<STAGES - 1>();", "copy_async_wait<STAGES - 1>();"),
    ("V's place taken before all are done with it", APART, PLAIN, "pipeline_wait<2 * STAGES - 2>();\n        request_v(tile + STAGES - 1);", "copy_async_wait<2 * STAGES - 2>();\n        request_v(tile + STAGES - 1);\n        __syncthreads();"),
    ("K's place taken before all are done with it", SINGLE, PLAIN, "pipeline_wait<2 * STAGES - 2>();\n        request_k(tile + STAGES);", "copy_async_wait<2 * STAGES - 2>();\n        request_k(tile + STAGES);\n        __syncthreads();"),
    ("a place taken one tile too early", TOGETHER, PLAIN, "request(tile + STAGES - 1);\n    }", "request(tile + STAGES);\n    }"),
    ("the tile beside it read", APART, PLAIN, "shared_address(tiles.v.tile(tile))", "shared_address(tiles.v.tile(tile + 1))"),
    ("more buffers used than there are", TOGETHER, PLAIN, "buffers + i % STAGES", "buffers + i % (STAGES + 1)"),
    ("chunks read where they were not put", SINGLE, PLAIN, "exchange((chunk % Tile::SPAN ^ Tile::swizzle(row)) * 16)", "exchange(chunk % Tile::SPAN * 16)"),
    ("swizzle by the wrong bits of the row", APART, PLAIN, "exchange((chunk % Tile::SPAN ^ Tile::swizzle(row)) * 16)", "exchange((chunk % Tile::SPAN ^ Tile::swizzle(row / 2)) * 16)"),
    ("padding forgotten by the reader", PADDED, PLAIN, "row_bytes((row * Tile::ROW_CHUNKS", "row_bytes((row * Tile::CHUNKS"),
    ("V not transposed", SINGLE, PLAIN, "ldmatrix_x4_trans(b,", "ldmatrix_x4(b,"),
    ("K taken in the order of operand A", SINGLE, PLAIN, "lane_chunk(column + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2)", "lane_chunk(column + lane() % 16, lane() / 16)"),
    ("P packed in the wrong order", TOGETHER, PLAIN, "a[j] = pack(", "a[j / 4 * 4 + j % 2 * 2 + j / 2 % 2] = pack("),
    ("P packed the wrong way round", TOGETHER, PLAIN, "pack(d[2 * j], d[2 * j + 1])", "pack(d[2 * j + 1], d[2 * j])"),
    ("the maximum of half a row", SINGLE, PLAIN, "lanes_max<LANES>(tile_max)", "lanes_max<LANES / 2>(tile_max)"),
    ("the sum of half a row", SINGLE, PLAIN, "lanes_sum<LANES>(row_sum)", "lanes_sum<LANES / 2>(row_sum)"),
    ("O not rescaled when the maximum moves", SINGLE, PLAIN, "            rescale_o(out[i], rescale);\n", ""),
    ("sum not rescaled when the maximum moves", SINGLE, PLAIN, "row_sum *= factor;", ""),
    ("maximum not scaled", SINGLE, PLAIN, "rescale(top[half] * scale)", "rescale(top[half])"),
    ("the second stripe's rows mistaken", TOGETHER, PLAIN, "int row = stripe_row(i) + o[i].row", "int row = stripe_row(0) + o[i].row"),
    ("outputs copied before all lanes have left theirs", APART, PLAIN, "    __syncwarp();\n#pragma unroll\n    for (int first", "#pragma unroll\n    for (int first"),
    ("last row of the tail not written", APART, PLAIN, "if (row >= work.rows) break;", "if (row >= work.rows - 1) break;"),
    ("a row too many written", APART, PLAIN, "if (row >= work.rows) break;", "if (row > work.rows) break;"),
    ("keys read past the end", SINGLE, PLAIN, "exists ? 16 : 0", "16"),
    ("one key too many read", SINGLE, PLAIN, "exists = row < rows &&", "exists = row <= rows &&"),
    ("tail mask one key too far", TOGETHER, PLAIN, "return limit - tile * TILE_N;", "return limit - tile * TILE_N + 1;"),
    ("a lane's first column forgotten in the mask", SINGLE, PLAIN, " - lane() % 4 * 2;  //", ";  //"),
    ("mask left out where only upper rows need it", TOGETHER, CAUSAL, "return visible(0, tile) < TILE_N;", "return visible(TILE_M - 1, tile) < TILE_N;"),
    ("causal diagonal hidden", TOGETHER, CAUSAL, "row + diagonal + 1)", "row + diagonal)"),
    ("causal diagonal one too far", APART, CAUSAL, "row + diagonal + 1)", "row + diagonal + 2)"),
    ("causal mask off where lengths differ", SINGLE, CAUSAL, "diagonal = seq_k - seq_q;", "diagonal = 0;"),
    ("causal mask one off where lengths differ", SINGLE, CAUSAL, "diagonal = seq_k - seq_q;", "diagonal = seq_k - seq_q - (seq_k > seq_q);"),
    ("wrong kv head of a group", APART, CAUSAL, "head / (heads / kv_heads)", "head % kv_heads"),
]  # fmt: skip


# one fault of each class; the others of a class run with `make test-all`
FAST = (
    "K waited for too laxly",
    "chunks read where they were not put",
    "a row too many written",
)


@planted(("config", "problem", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(attention_gate, config, problem, old, new):
    gate = attention_gate(problem)
    config = gate.start(config)
    found = gate.judge(config, gate.doctored(config, old, new))
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert found.reason


@pytest.mark.parametrize("problem", [CAUSAL, *more([PLAIN])])
@pytest.mark.parametrize(
    "config", [APART, *more([TOGETHER, SINGLE, PADDED])], ids=["apart", "together", "single", "padded"]
)
def test_the_good_kernel_beside_it_passes(attention_gate, config, problem):
    gate = attention_gate(problem)
    verdict = gate.judge(gate.start(config))
    assert verdict.correct, verdict.reason


# ---- offsets beyond 2^31: no case can hold such tensors, so WorkTile alone is asked where it would read and write

LONG = "b32,h32,s131072,d128,bf16,causal,kv8"
ASK = """
extern "C" __global__ void ask(const T* any, long long* found, int heads, int kv_heads, int seq_q, int seq_k) {
    WorkTile work(any, any, any, const_cast<T*>(any), heads, kv_heads, seq_q, seq_k);
    found[0] = work.q - any, found[1] = work.k - any, found[2] = work.v - any, found[3] = work.o - any;
}
"""


def offsets(gate, source: Source) -> list[int]:
    """Where the block of the first rows of the last head and batch entry begins in Q, K, V and O, in elements."""
    problem, (blocks, _, _) = gate.problem, source.launch.grid
    parts = {part.split(":")[0]: part for part in source.text.split("// ---- ")}
    text = "// " + parts["types"] + "// " + parts["work_tile"]
    last = {
        "blockIdx.x": blocks - 1,
        "gridDim.x": blocks,
        "blockIdx.y": problem.heads - 1,
        "blockIdx.z": problem.batch - 1,
    }
    for name, value in last.items():
        assert name in text
        text = text.replace(name, f"{value}")
    scalars = [ScalarArgument(n, np.int32(getattr(problem, n))) for n in ("heads", "kv_heads", "seq_q", "seq_k")]
    found = TensorArgument("found", np.zeros(4, np.int64), output=True)
    arguments = (TensorArgument("any", np.zeros(64, np.uint16)), found, *scalars)
    executable = build(Source(text + ASK, "ask", Launch((1, 1, 1), 32, 0)), "sm_80")
    return run(executable, "ask", Launch((1, 1, 1), 32, 0), arguments, 1, 10.0)["found"].tolist()


def right_offsets(problem) -> list[int]:
    q = (problem.batch * problem.heads - 1) * problem.seq_q * problem.head_dim
    kv = (problem.batch * problem.kv_heads - 1) * problem.seq_k * problem.head_dim
    return [q, kv, kv, q]


@pytest.fixture
def long_gate(attention_gate):
    return attention_gate(LONG)


def test_offsets_of_long_sequences_pass_2_to_the_31(long_gate):
    source = long_gate.source(long_gate.start({"family": "mma"}))
    assert min(right_offsets(long_gate.problem)) > 2**31
    assert offsets(long_gate, source) == right_offsets(long_gate.problem)


@pytest.mark.parametrize("tensor", ["(long long)head * seq_q", "(long long)kv_head * seq_k"])
def test_a_32_bit_offset_is_caught(long_gate, tensor):
    broken = long_gate.doctored(long_gate.start({"family": "mma"}), tensor, tensor.removeprefix("(long long)"))
    assert offsets(long_gate, broken) != right_offsets(long_gate.problem)
