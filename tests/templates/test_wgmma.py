"""The wgmma family's static proof: what ptxas says of it, what its binary holds, and which banks its stores touch."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run
from evoengine.cuda_files import disassembler
from evoengine.devices.base import ScalarArgument, TensorArgument
from evoengine.records import Binary, Launch, Source
from evoengine.sass.listing import disassemble, instruction_mix
from evoengine.sass.main_loop import main_loops
from evoengine.stages.compile import compile_source
from evoengine.workloads.attention.problem import parse_problem
from tests.support.exhaustive import more
from tests.support.kernel_gate import attention_space

MANY = "b8,h64,s256,d64,fp16"
MASKED = "b16,h16,s2048,d64,bf16,causal"
PROBLEMS = ["b16,h16,s2048,d64,fp16", "b16,h16,s2048,d128,bf16,causal", "b2,h8,s512,d96,fp16,causal,kv2"]


def starts(gate):
    return [c for c in gate.space.starts if c["family"] == "wgmma"]


ALL = 99
COMPILED = [(MASKED, 1), *more((problem, ALL) for problem in (MASKED, *PROBLEMS))]
"""problem, and how many of its starts are compiled at most"""


@pytest.fixture(scope="module")
def compiled(attention_gate):
    """Problem → its first starts with their sources and binaries, compiled once."""

    @cache
    def of(problem: str, most: int):
        gate = attention_gate(problem)
        sources = [(config, gate.source(config)) for config in starts(gate)[:most]]
        return [(config, source, compile_source(source, "sm_90a")) for config, source in sources]

    return of


@pytest.mark.parametrize(("problem", "most"), COMPILED)
def test_starts_compile_to_wgmma_without_spills_or_serialisation(compiled, problem, most):
    assert compiled(problem, most)
    for config, _, binary in compiled(problem, most):
        assert (binary.spill_bytes, binary.stack_bytes, binary.warnings) == (0, 0, ()), config


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(("problem", "most"), COMPILED)
def test_products_run_beside_the_maxima_and_addresses_stay_in_uniform_registers(compiled, problem, most):
    for config, source, binary in compiled(problem, most):
        for loop in main_loops(disassemble(binary.cubin), source.entry):
            assert not loop.fences, config
            assert loop.count("R2UR") <= 1, config
            beside = loop.overlapped_maxima
            maxima = config["tile_n"] // 2  # over a thread's own scores
            assert (beside is not None and beside[0] >= maxima) if config["overlap"] else beside is None, config


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(("problem", "most"), COMPILED)
def test_their_tensor_instructions_are_hopper_ones_and_no_thread_has_local_memory(compiled, problem, most):
    head_dim = parse_problem(problem).head_dim
    for config, _, binary in compiled(problem, most):
        mix = instruction_mix(disassemble(binary.cubin))
        assert mix["HGMMA"] >= head_dim // 16 + config["tile_n"] // 16
        assert not mix.keys() & {"HMMA", "LDL", "STL"}


@pytest.mark.parametrize(("problem", "most"), COMPILED)
def test_warpgroups_never_hold_more_registers_than_the_block_was_launched_with(compiled, problem, most):
    """setmaxnreg would wait for ever, and ptxas says nothing."""
    for config, source, binary in compiled(problem, most):
        assert all_held(config, source) <= launched_with(config, binary), config


@pytest.mark.parametrize(("tile_m", "min_blocks"), [(64, 3), *more([(64, 2), (128, 2)])])
def test_nor_do_they_where_several_blocks_share_an_sm(attention_gate, tile_m, min_blocks):
    gate = attention_gate(PROBLEMS[0])
    config = {**starts(gate)[0], "tile_m": tile_m, "tile_n": 64, "overlap": False, "min_blocks": min_blocks}
    del config["pv_wait"], config["v_ahead"]
    if tile_m == 64:
        del config["ping_pong"]
    assert gate.space.contains(config), gate.space.why_invalid(config)
    source = gate.source(config)
    held, launched = all_held(config, source), launched_with(config, compile_source(source, "sm_90a"))
    assert launched - 8 * (tile_m // 64) < held <= launched  # all but what does not divide


def all_held(config, source: Source) -> int:
    """Per thread of one warpgroup each, after setmaxnreg."""
    held = registers_held(source.text)
    return held["dealloc"] + config["tile_m"] // 64 * held["alloc"]


def launched_with(config, binary: Binary) -> int:
    """Likewise, before it."""
    return (config["tile_m"] // 64 + 1) * math.ceil(binary.registers / 8) * 8


def registers_held(text: str) -> dict[str, int]:
    """What the template asks for, computed as its constants say."""
    names: dict[str, int] = {}
    for name, value in re.findall(r"constexpr int (\w+) = ([^;]+);", text):
        code = re.sub(r"(\w+) < (\w+) \? \w+ : \w+", r"min(\1, \2)", value).replace("/", "//")
        try:
            names[name] = eval(code, {"min": min}, names)  # only names and arithmetic of our own template
        except (NameError, SyntaxError, TypeError):
            continue
    return {way: names[re.search(rf"warpgroup_reg_{way}<(\w+)>\(\);", text)[1]] for way in ("dealloc", "alloc")}


@pytest.mark.parametrize("gpu", ["a100", "l4"])
def test_the_family_is_left_out_where_there_is_no_wgmma(gpu):
    space = attention_space(PROBLEMS[0], gpu)
    assert "Hopper" in space.empty_families["wgmma"]


# --- where things lie in shared memory, found by running the template's own functions on the emulator

PLACE_TILE = """
extern "C" __global__ void place(const T* from, T* to) {
    extern __shared__ __align__(1024) unsigned char shared[];
    TileK::load<128>(shared, from, TILE_N);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_N * HEAD_DIM; i += 128) to[i] = reinterpret_cast<T*>(shared)[i];
}
"""
PLACE_P = """
extern "C" __global__ void place(const T* from, T* to) {
    extern __shared__ __align__(1024) unsigned char shared[];
    Accumulator<COLUMNS> p;
    for (int i = 0; i < p.SIZE; ++i)
        p.d[i] = to_float(from[(warp() * 16 + p.row(p.half(i))) * COLUMNS + p.column(i)]);
    SharedTile<64, COLUMNS>::store(shared, warp() * 16, p);
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * COLUMNS; i += 128) to[i] = reinterpret_cast<T*>(shared)[i];
}
"""


def placed(gate, config, kernel: str, rows: int, columns: int) -> np.ndarray:
    """Byte offset in shared memory of each chunk of 16 bytes of a tile, [rows, columns / 8]."""
    source = gate.source(config)
    launch = Launch((1, 1, 1), 128, rows * columns * 2 + 8)
    kernel = kernel.replace("COLUMNS", str(columns))
    chunks = np.arange(rows * columns // 8)
    # every element holds the number of its chunk, exact in 16 bits up to 2048
    tile = torch.from_numpy(chunks.repeat(8)).to(torch.float16).view(torch.uint16).numpy()
    arguments = [TensorArgument("from", tile), TensorArgument("to", np.zeros_like(tile), output=True)]
    executable = build(Source(source.text + kernel, "place", launch), "sm_90a")
    found = run(executable, "place", launch, arguments, 0, 20.0)["to"].view(np.float16).reshape(-1, 8)
    assert (found == found[:, :1]).all(), "a chunk was torn"
    where = np.empty(len(chunks), int)
    where[found[:, 0].astype(int)] = 16 * np.arange(len(chunks))
    return where.reshape(rows, columns // 8)


def hardware_place(rows: int, columns: int, slab_bytes: int) -> np.ndarray:
    """The same by the definition of the swizzle: bits 4… of an address are XORed with bits 7… (PTX ISA, tensor
    swizzling)."""
    row, chunk = np.ogrid[:rows, : columns // 8]
    per_row = slab_bytes // 16
    address = (chunk // per_row * rows + row) * slab_bytes + chunk % per_row * 16
    return address ^ ((address >> 7) % per_row << 4)


@pytest.mark.parametrize(("head_dim", "slab_bytes"), [(96, 64), *more([(64, 128), (128, 128), (32, 64)])])
def test_tiles_lie_as_the_hardware_swizzles_them(attention_gate, head_dim, slab_bytes):
    gate = attention_gate(f"b1,h1,s256,d{head_dim},fp16")
    config = {**starts(gate)[0], "tile_n": 80, "load": "cp_async"}
    del config["cluster"]
    found = placed(gate, config, PLACE_TILE, 80, head_dim)
    np.testing.assert_array_equal(found, hardware_place(80, head_dim, slab_bytes))


@pytest.mark.parametrize(
    ("head_dim", "columns", "per_row"), [(96, 96, 4), *more([(64, 64, 8), (128, 128, 8), (64, 192, 8)])]
)
def test_stored_blocks_lie_as_the_hardware_swizzles_them(attention_gate, head_dim, columns, per_row):
    gate = attention_gate(f"b1,h1,s256,d{head_dim},fp16")
    found = placed(gate, {**starts(gate)[0], "o_store": "shared"}, PLACE_P, 64, columns)
    np.testing.assert_array_equal(found, hardware_place(64, columns, per_row * 16))


@pytest.mark.parametrize(("columns", "slab_bytes"), [(64, 128), (192, 128), (96, 64), (32, 64)])
def test_no_store_into_such_tiles_has_a_bank_conflict(columns, slab_bytes):
    place = hardware_place(64, columns, slab_bytes)
    per_row = slab_bytes // 16
    # eight lanes at a time write 128 bytes: stmatrix one column of chunks, cp.async and vectors chunks in line order
    eights = [place[row : row + 8, chunk] for row, chunk in product(range(0, 64, 8), range(columns // 8))]
    slabs = place.reshape(64, -1, per_row).swapaxes(0, 1).reshape(-1, 8)
    for addresses in [*eights, *slabs]:
        assert max(Counter(addresses // 16 % 8).values()) == 1


# --- who does which tile of rows, found by asking the template's own TileScheduler

VISIT = """
extern "C" __global__ void visit(const T* any, int* visits, int batch, int heads, int kv_heads, int seq_q, int seq_k) {
    TileScheduler scheduler = {any, any, any, const_cast<T*>(any), batch * heads, heads, kv_heads, seq_q, seq_k};
    if (threadIdx.x) return;
    for (scheduler.start(); scheduler.has_work(); scheduler.advance()) {
        const WorkTile work = scheduler.work();
        int* visit = visits + 4 * (NUMBER);
        visit[0] = work.head, visit[1] = work.first_row / TILE_M, visit[2] = blockIdx.x, ++visit[3];
    }
}
"""
# what of the scheduler tells the place in the order in which tiles begin, by schedule and mask
NUMBERS = {
    ("static", False): "scheduler.number",
    ("static", True): "scheduler.first_head * scheduler.row_tiles() + scheduler.place()",
    ("longest_first", True): "blockIdx.y * gridDim.x + blockIdx.x",
}
WALKS = [
    # problem, schedule, grid
    ("b16,h16,s2048,d64,fp16", "static", (7, 1, 1)),
    ("b16,h16,s2048,d64,fp16", "static", (132, 1, 1)),
    ("b16,h12,s2048,d64,fp16,causal,kv4", "static", (7, 1, 1)),
    ("b16,h12,s2048,d64,fp16,causal,kv4", "static", (132, 1, 1)),
    ("b16,h12,s2048,d64,fp16,causal,kv4", "longest_first", (192, 16, 1)),
]


def visits(gate, schedule: str, grid, l2_mb: int) -> np.ndarray:
    """[tile of rows in the order in which they begin, (head, tile within the head, block that does it, how often)]"""
    p = gate.problem
    text = gate.source({**starts(gate)[0], "tile_m": 128, "schedule": schedule}).text
    text = text.replace("32 << 20", f"{l2_mb} << 20") + VISIT.replace("NUMBER", NUMBERS[schedule, p.causal])
    none = np.zeros((p.batch * p.heads * p.seq_q // 128, 4), np.int32)
    arguments = [TensorArgument("any", np.zeros(64, np.uint16)), TensorArgument("visits", none, output=True)]
    arguments += [ScalarArgument(n, np.int32(getattr(p, n))) for n in ("batch", "heads", "kv_heads", "seq_q", "seq_k")]
    launch = Launch(grid, 32, 0)
    return run(build(Source(text, "visit", launch), "sm_90a"), "visit", launch, arguments, 1, 10.0)["visits"]


@pytest.mark.parametrize(("problem", "schedule", "grid"), WALKS)
@pytest.mark.parametrize("l2_mb", [2, *more([32])])
def test_every_tile_of_rows_is_done_once(attention_gate, problem, schedule, grid, l2_mb):
    found = visits(attention_gate(problem), schedule, grid, l2_mb)
    assert (found[:, 3] == 1).all()
    assert len({(head, tile) for head, tile, *_ in found.tolist()}) == len(found)


@pytest.mark.parametrize(("problem", "schedule", "grid"), [w for w in WALKS if "causal" in w[0]])
@pytest.mark.parametrize(("l2_mb", "heads_at_once"), [(2, 12), *more([(32, 192)])])
def test_long_rows_come_first_of_as_many_heads_as_the_l2_holds(
    attention_gate, problem, schedule, grid, l2_mb, heads_at_once
):
    """K and V of a head are 0.5 MB, and 3 heads share them."""
    found = visits(attention_gate(problem), schedule, grid, l2_mb)
    for part in found.reshape(-1, heads_at_once * 16, 4):
        assert len(set(part[:, 0])) == heads_at_once
        assert (np.diff(part[:, 1]) <= 0).all()


@pytest.mark.parametrize("problem", [WALKS[-2][0], *more(["b2,h16,s8192,d128,fp16,causal"])])
def test_persistent_blocks_under_a_mask_share_long_rows_and_short(attention_gate, problem):
    """Also where the L2 holds a part of the heads at a time, whose tiles are not a whole number of rounds."""
    found = visits(attention_gate(problem), "static", (132, 1, 1), 32)
    loads = np.bincount(found[:, 2], weights=found[:, 1] + 1)
    assert np.ptp(loads) <= found[:, 1].max() + 1 < loads.min()
    assert loads.max() <= 1.08 * loads.mean()


def test_the_schedules_are_for_more_tiles_of_rows_than_run_at_once(attention_gate):
    def reasons(problem):
        gate = attention_gate(problem)
        return [gate.space.why_invalid({**starts(gate)[1], "schedule": s}) for s in ("static", "longest_first")]

    assert reasons("b16,h16,s2048,d64,fp16,causal") == [None, None]
    assert reasons("b2,h16,s1024,d64,fp16,causal")[0] and not reasons("b2,h16,s1024,d64,fp16,causal")[1]
    assert all(reasons("b1,h8,s512,d64,fp16,causal"))
    assert "without a mask" in reasons("b16,h16,s2048,d64,fp16")[1]


def test_where_blocks_go_round_each_does_at_least_three_tiles_of_rows_and_no_more_run_than_fit(attention_gate):
    gate = attention_gate(MANY)
    config = {**starts(gate)[0], "schedule": "static", "tile_m": 64, "min_blocks": 2}
    del config["ping_pong"]
    for heads, blocks in ((1, 1), (2, 2), (48, 32), (1024, 264)):
        problem = parse_problem(f"b1,h{heads},s128,d64,fp16")
        assert gate.space.launch(config, problem).grid == (blocks, 1, 1)


# --- two blocks that bring K and V together


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
def test_blocks_of_a_cluster_meet_and_bring_tiles_by_tma(attention_gate, compiled):
    gate = attention_gate(PROBLEMS[0])
    together = compile_source(gate.source({**starts(gate)[0], "cluster": 2}), "sm_90a")
    config, _, by_itself = compiled(*COMPILED[0])[0]
    assert (config["load"], config.get("cluster", 1)) == ("tma", 1)
    alone, paired = (instruction_mix(disassemble(binary.cubin)) for binary in (by_itself, together))
    assert {"UCGABAR_ARV", "UCGABAR_WAIT"} <= paired.keys() and not {"UCGABAR_ARV", "UCGABAR_WAIT"} & alone.keys()
    assert "UTMALDG" in paired


def test_a_cluster_is_launched_whole_even_where_tiles_of_rows_are_odd(attention_gate):
    gate = attention_gate(PROBLEMS[0])
    config = {**starts(gate)[0], "tile_m": 128}
    for rows, alone, paired in ((1, 1, 2), (128, 1, 2), (129, 2, 2), (300, 3, 4)):
        problem = parse_problem(f"b3,h2,sq{rows},sk300,d64,fp16")
        assert gate.space.launch({**config, "cluster": 1}, problem).grid == (alone, 2, 3)
        assert gate.space.launch({**config, "cluster": 2}, problem).grid == (paired, 2, 3)


def test_a_cluster_halves_the_traffic_of_k_and_v_and_nothing_else(attention_gate):
    gate = attention_gate(PROBLEMS[0])
    alone, paired = (gate.space.cost({**starts(gate)[0], "cluster": n}) for n in (1, 2))
    q_and_o = 2 * 2 * 192 * 64
    assert paired["global_bytes"] - q_and_o == (alone["global_bytes"] - q_and_o) / 2
    assert {name for name in alone if alone[name] != paired[name]} == {"global_bytes", "barriers"}


@pytest.mark.parametrize(
    ("problem", "knobs", "why"),
    [
        (MANY + ",causal", {"cluster": 2}, "different numbers of keys"),
        (MANY, {"cluster": 2, "schedule": "static"}, "in adjacent pairs"),
        (MANY, {"cluster": 2, "load": "cp_async"}, "cluster is set where it is inactive"),
    ],
)
def test_a_cluster_is_for_tma_without_a_mask_and_blocks_in_the_order_of_rows(attention_gate, problem, knobs, why):
    gate = attention_gate(problem)
    assert why in gate.space.why_invalid({**starts(gate)[0], **knobs})


def test_what_a_block_waits_for_falls_with_the_warpgroups_that_work_beside_one_another(attention_gate):
    space = attention_gate(PROBLEMS[0]).space
    start = {**starts(attention_gate(PROBLEMS[0]))[0], "ping_pong": False}
    exposed = [
        space.cost({**start, "tile_m": 64 * n, "overlap": o})["exposed"] for n in (1, 2, 3) for o in (False, True)
    ]
    assert exposed == sorted(exposed, reverse=True) and len(set(exposed)) == len(exposed)
    assert exposed[-1] > 0 and exposed[0] <= 1.0
