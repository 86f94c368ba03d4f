"""Kernels broken on purpose, one fault each, all caught by the gate on the emulator; the kernel they were made from
passes."""

from __future__ import annotations

import pytest

from evoengine.records import Outcome
from tests.support.exhaustive import more, representatives

PLAIN = "b2,h4,s256,d64,fp16"
CAUSAL_GROUPED = "b2,h8,s256,d64,bf16,causal,kv2"
# start points of the space: the hand-written 8-warp kernel, whose warps share rows, and a double-buffered scalar one
WMMA = {"family": "wmma", "warps_n": 2, "stages": 2}
SCALAR = {"family": "scalar", "stages": 2}
BOTH = (WMMA, SCALAR)

FAULTS = [
    # name, configurations, problem, text of the good kernel, text of the broken one
    ("missing barrier before a tile is read", BOTH, PLAIN, "copy_async_wait<PENDING>();\n    __syncthreads();", "copy_async_wait<PENDING>();"),
    ("missing barrier between scores and softmax", [WMMA], PLAIN, "rows_sync();\n        softmax.update", "softmax.update"),
    ("missing barrier between softmax and product", [WMMA], PLAIN, "rows_sync();\n        rescale_o", "rescale_o"),
    ("missing warp barrier between weights and product", [SCALAR], PLAIN, "        __syncwarp();\n    }\n\n    __device__ float normalise", "    }\n\n    __device__ float normalise"),
    ("wrong scale", BOTH, PLAIN, "scale * LOG2_E", "scale"),
    ("O not rescaled when the maximum moves", [WMMA], PLAIN, "rescale_o(out, factors);\n        issue_pv", "issue_pv"),
    ("O not rescaled when the maximum moves", [SCALAR], PLAIN, "out[i][j] * rescale[i]", "out[i][j]"),
    ("sum not rescaled when the maximum moves", [WMMA], PLAIN, "row_sum *= factor;", ""),
    ("sum not rescaled when the maximum moves", [SCALAR], PLAIN, "row_sum *= factor;", ""),
    ("tail mask one key too far", BOTH, PLAIN, "return limit - tile * TILE_N;", "return limit - tile * TILE_N + 1;"),
    ("tail mask one key too short", BOTH, PLAIN, "return limit - tile * TILE_N;", "return limit - tile * TILE_N - 1;"),
    ("heads and batch swapped in the stride", BOTH, PLAIN, "head / (heads / kv_heads)", "head % heads * gridDim.z + head / heads"),
    ("last rows of an output tile not written", [WMMA], PLAIN, "if (row < work.rows)", "if (row < work.rows && row < TILE_M - 16)"),
    ("last rows of an output tile not written", [SCALAR], PLAIN, "if (row_of(i) >= work.rows) continue;", "if (row_of(i) >= work.rows || i == ROWS - 1) continue;"),
    ("cp.async not waited for", BOTH, PLAIN, "copy_async_wait<PENDING>();", ""),
    ("cp.async waited for too laxly", BOTH, PLAIN, "pipeline_wait<STAGES - 2>();", "pipeline_wait<STAGES - 1>();"),
    ("stage reused while it is read", BOTH, PLAIN, "request(tile + STAGES - 1);\n    }", "request(tile + STAGES);\n    }"),
    ("read past the end of the tensors", BOTH, PLAIN, "bool exists = row < rows;", "bool exists = row <= rows;"),
    ("write past the end of O", [WMMA], PLAIN, "if (row < work.rows)", "if (row <= work.rows)"),
    ("write past the end of O", [SCALAR], PLAIN, "if (row_of(i) >= work.rows) continue;", "if (row_of(i) > work.rows) continue;"),
    ("more buffers used than there are", BOTH, PLAIN, "i % STAGES * ELEMENTS", "i % (STAGES + 1) * ELEMENTS"),
    ("shared memory overrun", [WMMA], PLAIN, "    softmax.start();\n", "    softmax.start();\n    if (threadIdx.x == 5) shared[BYTES_T + BYTES_S + BYTES_P + BYTES_F + BYTES_O] = 1;\n"),
    ("shared memory overrun", [SCALAR], PLAIN, "    loader.start();\n", "    loader.start();\n    if (threadIdx.x == 5) shared[BYTES_T + BYTES_P + BYTES_S + BYTES_ROWS + BYTES_O] = 1;\n"),
    ("scores summed in fp16 overflow", [SCALAR], PLAIN, "s[i][j] = fmaf(a[i].y, b.y, fmaf(a[i].x, b.x, s[i][j]));", "s[i][j] = __half2float(__float2half(fmaf(a[i].y, b.y, fmaf(a[i].x, b.x, s[i][j]))));"),
    ("maximum not taken off, weights overflow fp16", [WMMA], PLAIN, "exp2_approx(x.x - row_max)", "exp2_approx(x.x)"),
    ("K and V swapped", BOTH, PLAIN, "k = k_ + (long long)kv_head", "k = v_ + (long long)kv_head"),
    ("barrier in a divergent branch", BOTH, PLAIN, "copy_async_wait<PENDING>();\n    __syncthreads();", "copy_async_wait<PENDING>();\n    if (threadIdx.x < 64) __syncthreads();"),
    ("barrier that early threads never reach", BOTH, PLAIN, "    loader.start();\n", "    if (threadIdx.x >= work.rows) return;\n    loader.start();\n"),
    ("causal diagonal hidden", BOTH, CAUSAL_GROUPED, "row + diagonal + 1)", "row + diagonal)"),
    ("causal diagonal one too far", BOTH, CAUSAL_GROUPED, "row + diagonal + 1)", "row + diagonal + 2)"),
    ("causal mask aligned to the upper left", BOTH, CAUSAL_GROUPED, "diagonal = seq_k - seq_q;", "diagonal = 0;"),
    ("wrong kv head of a group", BOTH, CAUSAL_GROUPED, "head / (heads / kv_heads)", "head % kv_heads"),
    ("input changed", BOTH, PLAIN, "    loader.start();\n", "    if (threadIdx.x == 0) const_cast<T*>(k)[0] = to_float(k[0]) > 0 ? q[0] : k[0];\n    loader.start();\n"),
]  # fmt: skip
PLANTED = [
    pytest.param(config, problem, old, new, id=f"{name}-{config['family']}")
    for name, configs, problem, old, new in FAULTS
    for config in configs
]


# one fault of each class; the others of a class run with `make test-all`
FAST = (
    "missing barrier before a tile is read-wmma",
    "missing warp barrier between weights and product-scalar",
    "scores summed in fp16 overflow",
)


@pytest.mark.parametrize(("config", "problem", "old", "new"), representatives(PLANTED, *FAST))
def test_a_planted_fault_is_caught(attention_gate, config, problem, old, new):
    gate = attention_gate(problem)
    config = gate.start(config)
    found = gate.judge(config, gate.doctored(config, old, new))
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert found.reason


@pytest.mark.parametrize("problem", [CAUSAL_GROUPED, *more([PLAIN])])
@pytest.mark.parametrize("config", [*more(BOTH[:1]), *BOTH[1:]], ids=["wmma", "scalar"])
def test_the_good_kernel_beside_it_passes(attention_gate, config, problem):
    gate = attention_gate(problem)
    verdict = gate.judge(gate.start(config))
    assert verdict.correct, verdict.reason


def test_at_least_twelve_kinds_of_fault_are_planted():
    assert len({name for name, *_ in FAULTS}) >= 12


@pytest.mark.parametrize(
    ("fault", "outcome", "names"),
    [
        ("barrier in a divergent branch", Outcome.HUNG, "__syncthreads"),
        ("read past the end of the tensors", Outcome.CRASHED, "thread"),
        *more([("write past the end of O", Outcome.CRASHED, "thread")]),
        *more([("shared memory overrun", Outcome.CRASHED, "thread 5")]),
    ],
)
def test_the_reason_names_what_happened_and_where(attention_gate, fault, outcome, names):
    _, configs, problem, old, new = next(f for f in FAULTS if f[0] == fault)
    gate = attention_gate(problem)
    config = gate.start(configs[0])
    found = gate.judge(config, gate.doctored(config, old, new))
    assert found.outcome is outcome
    assert names in found.reason and "attention" in found.reason
