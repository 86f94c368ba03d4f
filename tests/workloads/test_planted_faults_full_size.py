"""Faults that only a problem of real size shows, one each in right kernels of all families, caught by blocks of it."""

from __future__ import annotations

import pytest

from evoengine import workloads
from evoengine.gpu import find_gpu
from evoengine.records import Outcome, Plans
from evoengine.search.evaluators import full_plan, gate_plan
from evoengine.space.space import load_space
from evoengine.stages.compile import compile_source
from evoengine.workloads.gemm.problem import split_k, stream_steps, sums_in_memory
from tests.support.exhaustive import more, planted, representatives
from tests.support.kernel_gate import emulate, execute

# 2^32 elements in each tensor: 8.6 GB
HUGE = "b16,h128,s32768,d64,fp16"
LARGER = "b24,h128,s32768,d64,fp16"
HUGE_CAUSAL = "b16,h128,s32768,d64,bf16,causal"
# of K and V alone
HUGE_KEYS = "b64,h64,sq64,sk16384,d64,fp16"
MANY_HEADS = "b2,h600,s256,d64,fp16"
MANY_ENTRIES = "b600,h4,s256,d64,fp16,kv2"
# more than 2^16 through the batch
MANY_HEADS_IN_ALL = "b1100,h64,s128,d64,fp16"
LONG = "b1,h4,s65536,d64,fp16"
LONG_CAUSAL = "b1,h4,s65536,d64,bf16,causal"
# more heads than the L2 holds K and V of, the last of them fewer than fit
BEYOND_L2 = "b15,h20,s2048,d64,fp16,causal"
EXAMPLE = "b16,h16,s2048,d64,fp16"

SCALAR = {"family": "scalar"}
WMMA = {"family": "wmma"}
MMA = {"family": "mma"}
WGMMA = {"family": "wgmma", "tile_m": 64, "tile_n": 64, "load": "cp_async", "schedule": "none"}
WGMMA_TMA = {**WGMMA, "load": "tma"}
PERSISTENT = {**WGMMA, "schedule": "static"}
PERSISTENT_TMA = {**PERSISTENT, "load": "tma"}
PERSISTENT_THREE = {**PERSISTENT, "stages": 3}
SORTED = {**WGMMA, "schedule": "longest_first"}
POINTERS = (SCALAR, WMMA, MMA, WGMMA, PERSISTENT)
BY_GRID = (SCALAR, WMMA, MMA, WGMMA, WGMMA_TMA)
ALL = (*BY_GRID, PERSISTENT)
ORDERED = (PERSISTENT, PERSISTENT_TMA, SORTED)

Q = "q = q_ + ((long long)head * seq_q + first_row) * HEAD_DIM"
O = "o = o_ + ((long long)head * seq_q + first_row) * HEAD_DIM_V"
K = "k = k_ + (long long)kv_head * seq_k * HEAD_DIM"
V = "v = v_ + (long long)kv_head * seq_k * HEAD_DIM_V"
HEAD = "blockIdx.z * heads + blockIdx.y"

FAULTS = [
    # name, configurations, problem, text of the good kernel, text of the broken one
    ("offset of Q in 32 bits", POINTERS, HUGE, Q, Q.replace("(long long)", "")),
    ("offset of O in 32 bits", (*POINTERS, PERSISTENT_TMA), HUGE, O, O.replace("(long long)", "")),
    ("offset of Q in 32 bits", (*POINTERS, SORTED), HUGE_CAUSAL, Q, Q.replace("(long long)", "")),
    ("offset of O in 32 bits", (*POINTERS, SORTED), HUGE_CAUSAL, O, O.replace("(long long)", "")),
    ("offset of O in 32 bits without the sign", ALL, LARGER, O, "o = o_ + ((unsigned)head * seq_q + first_row) * HEAD_DIM_V"),
    ("offset of K in 32 bits", POINTERS, HUGE, K, K.replace("(long long)", "")),
    ("offset of V in 32 bits", POINTERS, HUGE_CAUSAL, V, V.replace("(long long)", "")),
    ("offset of K in 32 bits", (SCALAR, WMMA, MMA, WGMMA), HUGE_KEYS, K, K.replace("(long long)", "")),
    ("offset of V in bytes, in 32 bits", POINTERS, HUGE, V, "v = (const T*)((const char*)v_ + kv_head * seq_k * HEAD_DIM_V * 2)"),
    ("head in 8 bits", BY_GRID, MANY_HEADS, HEAD, "blockIdx.z * heads + (unsigned char)blockIdx.y"),
    ("batch entry in 8 bits", BY_GRID, MANY_ENTRIES, HEAD, "(unsigned char)blockIdx.z * heads + blockIdx.y"),
    ("head through the batch in 16 bits", BY_GRID, MANY_HEADS_IN_ALL, HEAD, f"(unsigned short)({HEAD})"),
    ("kv head in 8 bits", POINTERS, MANY_ENTRIES, "kv_head = head / (heads / kv_heads)", "kv_head = (unsigned char)(head / (heads / kv_heads))"),
    ("tile of rows in 8 bits", BY_GRID, LONG, ": blockIdx.x,", ": (unsigned char)blockIdx.x,"),
    ("tile of rows in 8 bits", BY_GRID, LONG_CAUSAL, "gridDim.x - 1 - blockIdx.x :", "gridDim.x - 1 - (unsigned char)blockIdx.x :"),
    ("tiles of rows in 8 bits", BY_GRID, LONG_CAUSAL, "gridDim.x - 1 - blockIdx.x :", "(unsigned char)(gridDim.x - 1 - blockIdx.x) :"),
    ("first row in 16 bits", ALL, LONG, "first_row = row_tile * TILE_M", "first_row = (short)(row_tile * TILE_M)"),
    ("tile of keys in 8 bits", (SCALAR, WMMA), LONG, "(long long)tile * TILE_N * WIDTH", "(long long)(unsigned char)tile * TILE_N * WIDTH"),
    ("tile of keys in 8 bits", (MMA, WGMMA), LONG, "(long long)tile * TILE_N * WIDTH", "(long long)(unsigned char)tile * TILE_N * WIDTH"),
    ("tile of keys in 8 bits", (SCALAR, WMMA, MMA, WGMMA), LONG_CAUSAL, "limit - tile * TILE_N", "limit - (unsigned char)tile * TILE_N"),
    ("tiles of K and V counted in 8 bits", [PERSISTENT_THREE], EXAMPLE, "unsigned before;       // tiles that", "unsigned char before;  // tiles that"),
    ("blocks counted in 7 bits", [PERSISTENT], EXAMPLE, "number += opaque(gridDim.x);", "number += opaque(gridDim.x) % 128;"),
    ("heads through the batch in 16 bits", [PERSISTENT], MANY_HEADS_IN_ALL, "number < all_heads *", "number < (unsigned short)all_heads *"),
    ("number of tiles in 16 bits", [PERSISTENT, PERSISTENT_TMA], MANY_HEADS_IN_ALL, "number % row_tiles, number / row_tiles", "(unsigned short)number % row_tiles, (unsigned short)number / row_tiles"),
    ("number of tiles in 16 bits", [SORTED], "b64,h64,s4096,d64,bf16,causal", "int number = blockIdx.y * gridDim.x + blockIdx.x;", "int number = (unsigned short)(blockIdx.y * gridDim.x + blockIdx.x);"),
    ("heads beyond the L2 taken for the first", ORDERED, BEYOND_L2, "first_head + place % among", "place % among"),
    ("tiles of the heads before not taken off", [SORTED], BEYOND_L2, "number - first_head * row_tiles()", "number"),
    ("tiles of a group begun where the last ended", [PERSISTENT, PERSISTENT_TMA], BEYOND_L2, "first_head += heads_at_once(), begun = 0;", "first_head += heads_at_once();"),
]  # fmt: skip


def title(config):
    return "-".join(str(value) for knob, value in config.items() if knob in ("family", "load", "schedule", "stages"))


PLANTED = [
    pytest.param(config, problem, old, new, id=f"{name}-{title(config)}-{problem}")
    for name, configs, problem, old, new in FAULTS
    for config in configs
]


def choose(gate, wanted):
    """The first start point of the family, moved to the wanted values."""
    config = {**gate.start({"family": wanted["family"]}), **wanted}
    inactive = {"ping_pong"} if wanted["family"] == "wgmma" else set()
    inactive |= {"cluster"} if config.get("load") != "tma" else set()
    config = {knob: value for knob, value in config.items() if knob not in inactive}
    assert gate.space.why_invalid(config) is None
    return config


GOOD = sorted(
    {(title(config), problem): (config, problem) for _, configs, problem, *_ in FAULTS for config in configs}.items()
)
GOOD = [pytest.param(*found, id="-".join(name)) for name, found in GOOD]
GOOD_FAST = ("wgmma-tma-static-b1100,h64,s128,d64,fp16",)


def judge(gate, config, source):
    """On the cases of the problem's own extents and at full size alone: the small ones miss all of these faults."""
    plan = [(case, launch) for case, launch in gate_plan(gate.space, gate.target, config) if case.long]
    plans = Plans(plan, (), full_plan(gate.space, gate.target, config))
    return emulate(gate.target.workload, source, plans, seed=7)


# one fault of each class; the others of a class run with `make test-all`
FAST = (
    "offset of Q in 32 bits-scalar",
    "number of tiles in 16 bits-wgmma-tma",
)


@pytest.mark.parametrize(("config", "problem", "old", "new"), representatives(PLANTED, *FAST))
def test_a_planted_fault_is_caught(attention_gate, config, problem, old, new):
    gate = attention_gate(problem)
    config = choose(gate, config)
    found = judge(gate, config, gate.doctored(config, old, new))
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert found.reason


@pytest.mark.parametrize(("config", "problem"), representatives(GOOD, *GOOD_FAST))
def test_the_good_kernel_beside_it_passes(attention_gate, config, problem):
    gate = attention_gate(problem)
    config = choose(gate, config)
    verdict = judge(gate, config, gate.source(config))
    assert verdict.correct, verdict.reason
    assert verdict.cases


PRODUCTS = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("w4a16, C in 32 bits", MMA, "w4a16:m70000,n40000,k256,fp16", "(long long)row * to.n + col", "row * to.n + col"),
    ("w4a16, C in 32 bits", {"family": "wgmma"}, "w4a16:m70000,n40000,k256,fp16", "(long long)row * to.n + col", "row * to.n + col"),
    ("w4a16, A in 32 bits", MMA, "w4a16:m600000,n512,k4096,fp16", "a + (long long)work.first_row * k", "a + work.first_row * k"),
    ("w4a16, tiles of columns in 8 bits", {"family": "mma", "split_k": 1, "stream_steps": 0}, "w4a16:m16,n40000,k1024,fp16", "qweight + (long long)(first_k / 8) * n + work.first_col", "qweight + (long long)(first_k / 8) * n + work.first_col % 32768"),
    ("groups, C in 32 bits", {"family": "wgmma"}, "grouped-gemm:rows=40000+50000+3,n40000,k64,bf16,b_nk", "(long long)work.begin * n", "work.begin * n"),
    ("groups, a tile's begin in 16 bits", MMA, "grouped-gemm:rows=40000+50000+3,n1024,k64,bf16,b_nk", "(long long)work.begin * n", "(long long)(unsigned short)work.begin * n"),
]  # fmt: skip


@planted(("wanted", "problem", "old", "new"), PRODUCTS, "w4a16, C")
def test_a_fault_of_a_product_is_caught_in_machine_code(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    config = gate.configuration(wanted)
    plans = Plans([], (), full_plan(gate.space, gate.target, config))
    for source, right in ((gate.source(config), True), (gate.doctored(config, old, new), False)):
        found = execute(gate.target.workload, source, compile_source(source, gate.target.gpu.arch), plans, seed=7)
        assert found.correct == right, found.reason or "the fault escaped"
        assert found.cases


COUNTER = "arrived + share.tile *", "arrived + (unsigned char)share.tile *"
SUMS = "(long long)share.tile * share.most", "(long long)(unsigned char)share.tile * share.most"
SUMS_32 = "(long long)share.tile * share.most", "share.tile * share.most"
C_32 = "(long long)row * to.n + col", "row * to.n + col"
# 264 tiles; and many more, which spaces have whole blocks for
W4A16_TILES, GEMM_TILES = "w4a16:m16,n33792,k4096,fp16", "gemm:m16,n16896,k4096,bf16,b_nk"
W4A16_HUGE, GEMM_HUGE = "w4a16:m140000,n80000,k1152,fp16", "gemm:m140000,n80000,k1088,bf16,b_nk"
GEMM_MANY, GEMM_DEEP = "gemm:m256,n40000,k8192,bf16,b_nk", "gemm:m64,n1024,k32768,bf16,b_nk"
CONV_TILES, CONV_HUGE = "conv2d:n64,c64,h28,w28,k1280,r3,s3,pad1,bf16", "conv2d:n40,c16,h512,w512,k256,r3,s3,pad1,bf16"
SPLIT = {"family": "mma", "split_k": 4}
STREAM = {"family": "mma", "split_k": 1, "stream_steps": 8}
STREAM_WGMMA = {"family": "wgmma", "split_k": 1, "stream_steps": 10}
STREAM_CLUSTER = {"family": "wgmma", "cluster": "1x2", "stream_steps": 8}

SHARED = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("w4a16 split, a tile's counter in 8 bits", SPLIT, W4A16_TILES, *COUNTER),
    ("w4a16 stream, a tile's counter in 8 bits", STREAM, W4A16_TILES, *COUNTER),
    ("w4a16 split, a tile's sums in 8 bits", SPLIT, W4A16_TILES, *SUMS),
    ("w4a16 stream, a tile's sums in 8 bits", STREAM, W4A16_TILES, *SUMS),
    ("w4a16 split, sums in 32 bits", SPLIT, W4A16_HUGE, *SUMS_32),
    ("w4a16 stream, sums in 32 bits", STREAM, W4A16_HUGE, *SUMS_32),
    ("w4a16 split, C in 32 bits", SPLIT, W4A16_HUGE, *C_32),
    ("w4a16 stream, C in 32 bits", STREAM, W4A16_HUGE, *C_32),
    ("w4a16 split, steps behind the 127th left out", SPLIT, "w4a16:m16,n4096,k32768,fp16", "part * share + min(part, left), share +", "min(part * share + min(part, left), 127), share +"),
    ("gemm split, a tile's counter in 8 bits", SPLIT, GEMM_TILES, *COUNTER),
    ("gemm split, a tile's sums in 8 bits", SPLIT, GEMM_TILES, *SUMS),
    ("gemm split, sums in 32 bits", SPLIT, GEMM_HUGE, *SUMS_32),
    ("gemm split, C in 32 bits", SPLIT, GEMM_HUGE, *C_32),
    ("gemm split, B in 32 bits", SPLIT, "gemm:m16,n65536,k65536,bf16", "(long long)first_k * n", "first_k * n"),
    ("gemm split, steps in 8 bits", SPLIT, GEMM_DEEP, "int share = steps / SPLIT_K", "int share = (unsigned char)steps / SPLIT_K"),
    ("gemm split, a part's first step in 8 bits", SPLIT, GEMM_DEEP, "part * share + min(part, left), share +", "(unsigned char)(part * share + min(part, left)), share +"),
    ("gemm stream, a tile's counter in 8 bits", STREAM, GEMM_MANY, *COUNTER),
    ("gemm stream, sums in 32 bits", STREAM, GEMM_HUGE, *SUMS_32),
    ("gemm stream, C in 32 bits", STREAM, GEMM_HUGE, *C_32),
    ("gemm stream, steps of all tiles in 16 bits", STREAM, GEMM_MANY, "int first = tile() * steps /", "int first = (unsigned short)(tile() * steps) /"),
    ("gemm stream by wgmma, a tile's counter in 8 bits", STREAM_WGMMA, GEMM_MANY, *COUNTER),
    ("gemm stream by wgmma, sums in 32 bits", STREAM_WGMMA, GEMM_HUGE, *SUMS_32),
    ("gemm stream in clusters, a tile's counter in 8 bits", STREAM_CLUSTER, GEMM_MANY, *COUNTER),
    ("gemm stream in clusters, sums in 32 bits", STREAM_CLUSTER, GEMM_HUGE, *SUMS_32),
    ("conv2d split, a tile's counter in 8 bits", SPLIT, CONV_TILES, *COUNTER),
    ("conv2d split, a tile's sums in 8 bits", SPLIT, CONV_TILES, *SUMS),
    ("conv2d split, sums in 32 bits", SPLIT, CONV_HUGE, *SUMS_32),
    ("conv2d split, y in 32 bits", SPLIT, CONV_HUGE, *C_32),
    ("conv2d split, a part's first step in 6 bits", SPLIT, "conv2d:n1,c1024,h14,w14,k256,r3,s3,pad1,bf16", "part * share + min(part, left), share +", "(part * share + min(part, left)) % 64, share +"),
]  # fmt: skip
SMALL = {
    "conv2d": "conv2d:n1,c256,h14,w14,k256,r3,s3,pad1,bf16",
    "w4a16": "w4a16:m16,n8192,k4096,fp16",
    "gemm": "gemm:m16,n4096,k4096,bf16,b_nk",
}


@planted(("wanted", "problem", "old", "new"), SHARED, "w4a16 split, a tile's counter")
def test_a_fault_of_blocks_that_share_tiles_is_caught_in_machine_code(kernel_gate, wanted, problem, old, new):
    """A space shares no tiles where there are so many; a configuration of a small problem shows what would happen."""
    gate = kernel_gate(problem)
    config = kernel_gate(SMALL[problem.partition(":")[0]]).configuration(wanted)
    plans = Plans([], (), full_plan(gate.space, gate.target, config))
    assert all(case.tiles for case, _ in plans.full)
    for source, right in ((gate.source(config), True), (gate.doctored(config, old, new), False)):
        found = execute(gate.target.workload, source, compile_source(source, gate.target.gpu.arch), plans, seed=7)
        assert found.correct == right, found.reason or "the fault escaped"


@pytest.mark.exhaustive
def test_a_stream_of_many_steps_is_judged_by_the_executor_alone(kernel_gate):
    """Its blocks touch more pages than the emulator has."""
    gate = kernel_gate(GEMM_HUGE.replace(",b_nk", ""))
    config = {**kernel_gate(SMALL["gemm"]).configuration(STREAM), "stream_steps": 192}
    plans = Plans([], (), full_plan(gate.space, gate.target, config)[:1])
    for source, right in ((gate.source(config), True), (gate.doctored(config, *C_32), False)):
        found = execute(gate.target.workload, source, compile_source(source, gate.target.gpu.arch), plans, seed=7)
        assert found.correct == right, found.reason or "the fault escaped"
    found = emulate(gate.target.workload, gate.source(config), plans, seed=7, arch=gate.target.gpu.arch)
    assert [case.part for case in found.cases] == [
        "no block at full size: they touch more memory than the emulator has"
    ]


SHARING = (
    "w4a16:m16,n4096,k4096,fp16",
    "w4a16:m64,n4096,k14336,bf16,g32,zeros,bias",
    "w4a16:m16,n28672,k8192,bf16",
    "gemm:m16,n4096,k4096,bf16,b_nk",
    "gemm:m512,n4104,k14336,bf16",
    "gemm:b3,m500,n520,k4104,fp16,bias_gelu,residual",
    "gemm:m256,n1024,k4096,bf16,swiglu",
    "conv2d:n1,c256,h14,w14,k256,r3,s3,pad1,bf16",
    "conv2d:n2,c512,h14,w14,k520,r1,s1,fp16,bias_relu,residual",
)


@pytest.mark.parametrize("problem", more(SHARING))
def test_right_kernels_whose_blocks_share_tiles_pass(kernel_gate, problem):
    """All start points that do, and of drawn configurations one of each kind, by executor and emulator."""
    gate, kinds = kernel_gate(problem), {}
    for config in filter(sums_in_memory, gate.draw(500, seed=1)):
        kinds.setdefault((config["family"], split_k(config), stream_steps(config) > 0, config.get("cluster")), config)
    configs = [*filter(sums_in_memory, gate.space.starts), *kinds.values()]
    assert configs
    for config in configs:
        plans = Plans([], (), full_plan(gate.space, gate.target, config))
        source = gate.source(config)
        binary = compile_source(source, gate.target.gpu.arch)
        found = execute(gate.target.workload, source, binary, plans, seed=7)
        assert found.correct, (config, found.reason)
        found = emulate(gate.target.workload, source, plans, seed=8, arch=gate.target.gpu.arch)
        assert found.correct, (config, found.reason)


@pytest.mark.parametrize("name", sorted(workloads.workloads()))
def test_each_start_point_of_each_workload_is_judged_at_full_size(kernel_gate, name):
    workload = workloads.find_workload(name)
    gate = kernel_gate(f"{name}:{workload.example}".replace(f"{name}:{name}:", f"{name}:"))
    assert [config for config in gate.space.starts if not full_plan(gate.space, gate.target, config)] == []


GRIDS = [
    pytest.param(SCALAR, "heads", "min(heads, 64)", MANY_HEADS, id="heads"),
    pytest.param(MMA, "batch", "min(batch, 255)", MANY_ENTRIES, id="batch"),
    pytest.param(WMMA, "ceil_div(seq_q, tile_m)", "min(ceil_div(seq_q, tile_m), 256)", LONG, id="rows"),
]


@pytest.mark.parametrize(("config", "extent", "broken", "problem"), representatives(GRIDS, "rows"))
def test_a_grid_too_small_for_the_problem_is_caught(tmp_path, attention_gate, config, extent, broken, problem):
    gate = attention_gate(problem)
    config, family = choose(gate, config), config["family"]
    text = gate.space.text
    start = text.index(f"[launch.{family}]")
    assert f'"{extent}"' in text[start:]
    path = tmp_path / "space.toml"
    path.write_text(text[:start] + text[start:].replace(f'"{extent}"', f'"{broken}"', 1))
    space = load_space(path, gate.problem, find_gpu("h100"), (family,))
    plan = full_plan(space, gate.target, config)
    found = emulate(gate.target.workload, gate.source(config), Plans([], (), plan), seed=7)
    assert found.outcome is Outcome.INCORRECT
    assert "tiles of rows, which should be" in found.reason
