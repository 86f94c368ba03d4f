"""Faults of serving and training attention that the other files do not plant: the executor's gate refuses each."""

from __future__ import annotations

from evoengine.search.evaluators import make_plans
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import planted
from tests.support.kernel_gate import execute

PAGED = "decode:b4,h8,kv2,s1000,d64,fp16,page16"
WINDOW = "decode:b2,h8,kv2,s600,sq3,d64,fp16,page16,window70"
CAPPED = "decode:b2,h8,kv2,s300,sq2,d64,fp16,page16,softcap30,alibi,sinks"
LATENT = "decode:b2,h24,kv1,s300,d576,bf16,page64"
CHUNKED = "varlen:h4,kv2,d64,bf16,causal,lens=100+1+37,kvlens=300+90+37,page16"
GRADIENTS = "attention-backward:b2,h6,sq90,sk150,d64,bf16,causal,kv2"
WHOLE = "attention-backward:b1,h2,s200,d64,fp16"
WITH_LSE = "attention:b1,h4,sq90,sk150,d64,bf16,causal,lse"
DECODE = {"tile_m": 16, "layout": "swizzle", "min_blocks": 1}
ONE = {"family": "last_block", "splits": 1, "warps": 2, "tile_n": 16, "stages": 3, **DECODE}
LAST = {"family": "last_block", "splits": 4, "warps": 2, "tile_n": 32, "stages": 2, **DECODE}
TWO = {"family": "two_kernels", "splits": 3, "warps": 2, "tile_n": 16, "stages": 2, "combine_warps": 4, **DECODE}
SHARED = {"family": "last_block", "tile_n": 16, "warps": 4, "row_warps": 1, "stages": 2, "splits": 3, **DECODE}
MMA = {"family": "mma", "tile_m": 64, "tile_n": 32}
ATOMIC = {"family": "mma", "tile_m": 32, "tile_n": 64, "warps": 4, "stages": 2, "dq": "atomic", "layout": "swizzle", "min_blocks": 1}  # fmt: skip
PASS = {**ATOMIC, "dq": "second_pass"}
WGMMA = {"family": "wgmma", "tile_m": 64, "tile_n": 128, "stages": 2, "dq": "bulk", "ds_stages": 2, "split_q": 1, "min_blocks": 1}  # fmt: skip
SPLIT = {**WGMMA, "split_q": 2}

FAULTS = [
    # name, configuration, problem, text of the good kernels, text of the broken ones
    ("a page's last key looked up in the next page", ONE, PAGED, "pages[key / PAGE] * PAGE", "pages[(key + 1) / PAGE] * PAGE"),
    ("a step at the boundary of splits counted twice", TWO, PAGED, "(long long)all / SPLITS) - first_step;", "(long long)all / SPLITS) - first_step + (blockIdx.x + 1 < SPLITS);"),
    ("weights of splits without keys", TWO, PAGED, "float weight = state.y > 0.0f ? exp2_approx(state.x - top) : 0.0f;\n    float sum", "float weight = exp2_approx(state.x - top);\n    float sum"),
    ("a maximum that begins at 0", ONE, PAGED, "float top = MASKED, sum = 0.0f;", "float top = 0.0f, sum = 0.0f;"),
    ("a sink in the split of the last keys, which may have none", LAST, CAPPED, "if (blockIdx.x == 0) {\n            float sink", "if (blockIdx.x == SPLITS - 1 && sum > 0.0f) {\n            float sink"),
    ("slopes and sinks of heads counted from each tile's first row", ONE, CAPPED, "return head + (first_row + row) % group;", "return head + row % group;"),
    ("a key before the window where a tile begins with it", ONE, WINDOW, "visible(rows - 1) - WINDOW)", "visible(rows - 1) - WINDOW - 1)"),
    ("a step left out that the window's first key is the last of", TWO, WINDOW, "max(0, seen - WINDOW) / (WARPS * TILE_N)", "max(0, seen - WINDOW + 1) / (WARPS * TILE_N)"),
    ("rows behind the tile combined", LAST, PAGED, "row < work.rows; row += WARPS) combine", "row < TILE_M; row += WARPS) combine"),
    ("one count for a tile of rows of all sequences", LAST, PAGED, "arrived + blockIdx.z * gridDim.y + blockIdx.y", "arrived + blockIdx.y"),
    ("a head too many combined", TWO, PAGED, "if (head < heads) combine_splits", "if (head <= heads) combine_splits"),
    ("latent: a split's state of the first part of its keys alone", SHARED, LATENT, "for (int part = 0; part < WARPS; ++part)", "for (int part = 0; part < 1; ++part)"),
    ("varlen: keys counted for a tile's first row", MMA, CHUNKED, "min(seq_k, first_row + rows + diagonal)", "min(seq_k, first_row + 1 + diagonal)"),
    ("varlen: a chunk's rows begin where its keys do", MMA, CHUNKED, "seq_q = batch.cu_q[s + 1] - q_begin;", "seq_q = min(batch.cu_q[s + 1] - q_begin, batch.cu_kv[s + 1] - kv_begin - 64);"),
    ("varlen: pages of the chunk in place of the sequence's", MMA, CHUNKED, "{from, table, tile * TILE_N, kv_stride}", "{from, table, max(0, tile * TILE_N - max(0, diagonal)), kv_stride}"),
    ("LSE of a lagging maximum", {"family": "wgmma"}, WITH_LSE, "return (row_max + log2f(lanes_sum<LANES>(row_sum)))", "return (row_max + log2f(fmaxf(1.0f, lanes_sum<LANES>(row_sum) - 1.0f)))"),
    ("dK of every third head", ATOMIC, GRADIENTS, "(kv_head * group + step / turns) * seq_q", "(kv_head / kv_heads * heads + kv_head % kv_heads + step / turns * kv_heads) * seq_q"),
    ("sums of dQ zeroed in the first batch entry alone", ATOMIC, GRADIENTS, "float* zeros = dq_sum + ((long long)head *", "float* zeros = dq_sum + ((long long)blockIdx.y *"),
    ("delta of dO alone", ATOMIC, WHOLE, "read_vector<8>(o + element), y", "read_vector<8>(dout + element), y"),
    ("LSE of the pass in base e", PASS, GRADIENTS, "top[i][half] = row < rows ? -LOG2_E * lse", "top[i][half] = row < rows ? -lse"),
    ("a row of dQ behind a head's last", ATOMIC, WHOLE, "if (first + row < seq_q) write_vector<2>", "if (first + row <= seq_q) write_vector<2>"),
    ("wgmma: dP that is not weighed", WGMMA, WHOLE, "ds.d[i] = p.d[i] * (ds.d[i] - less.x);", "ds.d[i] = ds.d[i] - p.d[i] * less.x;"),
    ("wgmma: dV of the masked scores", WGMMA, GRADIENTS, "        convert(p, weights_p);\n", "        issue<HEAD_DIM>(p, own_k, Walked::k_major(tiles.queries(step)), 0);\n        wait_for<0>(p);\n        convert(p, weights_p);\n"),
    ("wgmma: tiles of queries from the first in all parts", SPLIT, WHOLE, "return first_tile + (first_step + step) % turns;", "return first_tile + step % turns;"),
    ("wgmma: a head's first part in all parts", SPLIT, GRADIENTS, "return kv_head * group + (first_step + step) / turns;", "return kv_head * group + step / turns;"),
]  # fmt: skip
FAST = ("a page's last key", "sums of dQ zeroed in the first batch")


@planted(("wanted", "problem", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    config = (
        gate.configuration(wanted)
        if len(wanted) < 4
        else {k.name: wanted[k.name] for k in gate.space.knobs if k.name in wanted}
    )
    assert gate.space.why_invalid(config) is None
    source = gate.doctored(config, old, new)
    binary = compile_source(source, gate.target.gpu.arch)
    found = execute(gate.target.workload, source, binary, make_plans(gate.space, gate.target, config), 7)
    assert found.outcome is not None and found.reason, "the fault escaped"
