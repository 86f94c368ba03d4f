"""Attention over packed and paged sequences: kernels are right on the emulator, broken ones are not, bad problems are
refused, and figures count the sequences' own lengths."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from evoengine.cuda_files import disassembler
from evoengine.devices.base import VisitKind
from evoengine.errors import UsageError
from evoengine.records import CompiledCandidate, Outcome, Plans, Source
from evoengine.search.evaluators import full_plan, gate_plan
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import emulator, executor, judge_whole
from evoengine.stages.predict import predict_binary
from evoengine.stages.verify import make_arguments, make_round
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import visits_by_block
from evoengine.workloads.varlen.tensors import NO_PAGE
from tests.support.exhaustive import more, planted, representatives
from tests.support.kernel_gate import execute

PACKED = "varlen:h4,kv2,d64,bf16,causal,lens=100+0+37,kvlens=130+5+37"
FULL = "varlen:h4,kv2,d64,fp16,lens=100+0+37,kvlens=130+5+37"
PAGED = "varlen:h4,kv2,d64,bf16,causal,lens=100+0+37,kvlens=130+5+37,page16"
SINGLES = "varlen:h2,d32,fp16,lens=70+1,kvlens=90+1,page1"
LARGE_PAGES = "varlen:h2,d64,fp16,causal,lens=70+1,kvlens=90+1,page48"
SMALL = {"family": "mma", "tile_m": 64, "tile_n": 32}
FIND = "place -= __shfl_sync(0xffffffffu, upto, 31);"

FAULTS = [
    # name, problem, text of the good kernel, text of the broken one
    ("tail not masked", PACKED, "if (work.masked(tile))", "if (false)"),
    ("tail mask one key too far", FULL, "return limit - tile * TILE_N;", "return limit - tile * TILE_N + 1;"),
    ("keys of another sequence", PACKED, "k = batch.k + (long long)kv_begin", "k = batch.k + (long long)q_begin"),
    ("values of another sequence", PACKED, "v = batch.v + (long long)kv_begin", "v = batch.v + (long long)q_begin"),
    ("a sequence's end one key too far", PACKED, "batch.cu_kv[s + 1] - kv_begin", "batch.cu_kv[s + 1] - kv_begin + 1"),
    ("a sequence's end one key too near", FULL, "batch.cu_kv[s + 1] - kv_begin", "max(0, batch.cu_kv[s + 1] - kv_begin - 1)"),
    ("a sequence's begin one row too far", PACKED, "q_begin = batch.cu_q[s]", "q_begin = batch.cu_q[s] + 1"),
    ("mask aligned to the upper left", PACKED, "diagonal = seq_k - seq_q;", "diagonal = 0;"),
    ("the sum over 32 sequences without the last", PACKED, "place -= __shfl_sync(0xffffffffu, upto, 31);", "place -= __shfl_sync(0xffffffffu, upto, 30);"),
    ("stored past the sequence's end", PACKED, "if (row >= work.rows) break;", "if (row > work.rows) break;"),
    ("a sequence's last rows not stored", PACKED, "if (row >= work.rows) break;", "if (row >= work.rows - 1) break;"),
    ("last tile of rows lost", PACKED, "+ TILE_M - 1) / TILE_M", ") / TILE_M"),
    ("last tile of keys lost", FULL, "(max(keys, 0) + TILE_N - 1) / TILE_N", "max(keys, 0) / TILE_N"),
    ("a key behind the end loaded", PAGED, "exists = first + row < count;", "exists = first + row <= count;"),
    ("order of the sequences not looked up", PACKED, "return {order[place - level * among]", "return {int(place - level * among)"),
    ("tiles counted of unsorted sequences", FULL, "int s = order[j];", "int s = j;"),
    ("sequences behind the 32nd lost", PACKED, FIND, "break;"),
    ("sequences behind the 32nd counted from 0", PACKED, FIND, ""),
    ("blocks behind the last tile at work", PACKED, "if (found.sequence < 0) return;", ""),
    ("rows that see no key not cleared", PACKED, "if (visible(first_row + out.row(half), 0) > 0) continue;", "continue;"),
    ("rows of no key left unwritten", PACKED, "work.clear_o(THREADS);", ""),
    ("wrong kv head of a group", PACKED, "kv_head = head / (batch.heads / batch.kv_heads);", "kv_head = head % batch.kv_heads;"),
    ("rows of one head taken for all heads'", FULL, "kv_stride = batch.kv_heads * HEAD_DIM;", "kv_stride = HEAD_DIM;"),
    ("pages taken in order", PAGED, "(long long)table[key / PAGE] * PAGE", "(long long)(key / PAGE) * PAGE"),
    ("one page for a whole tile", PAGED, "table[key / PAGE]", "table[before / PAGE]"),
    ("page of the key before", PAGED, "table[key / PAGE]", "table[max(key - 1, 0) / PAGE]"),
    ("table of the sequence before", PAGED, "(long long)s * batch.table_width", "(long long)max(s - 1, 0) * batch.table_width"),
    ("table as wide as the sequence's own pages", PAGED, "* batch.table_width;", "* ((seq_k + PAGE - 1) / PAGE);"),
    ("slot in the page by its tile", LARGE_PAGES, "key % PAGE)", "key % TILE_N)"),
    ("a page's slots in reverse", PAGED, "+ key % PAGE", "+ PAGE - 1 - key % PAGE"),
]  # fmt: skip
FAST = ("mask aligned to the upper left", "sequences behind the 32nd lost", "one page for a whole tile")
"""one of lengths, of the order and of pages; the others run with `make test-all`"""


@planted(("problem", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, problem, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(SMALL), old, new), "the fault escaped"


ROUNDS = "varlen:h16,kv2,d64,bf16,causal,lens=512+37+2000"
PERSISTENT = {"family": "wgmma", "schedule": "static", "tile_m": 128, "load": "cp_async"}
WGMMA_FAULTS = [
    # name, text of the good kernel, text of the broken one
    ("last round of persistent blocks lost", "return number() < total;", "return begun + int(gridDim.x) <= total;"),
    ("rounds all forwards, counted backwards", "begun += opaque(gridDim.x), backwards", "begun += opaque(gridDim.x) - 1, backwards"),
    ("tiles of one head alone counted", "batch.all_row_tiles() * batch.heads", "batch.all_row_tiles()"),
    ("rows of no key left unwritten", "work.clear_o(128 * CONSUMERS);", ""),
    ("rows that see no key not cleared", "work.clear_unseeing(consumer.o, warp() * 16);", ""),
    ("stored past the sequence's end", "if (row < work.rows) write_vector", "if (row <= work.rows) write_vector"),
    ("a key behind the end loaded", "bool exists = row < count;", "bool exists = row <= count;"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("old", "new"), [pytest.param(*fault[1:], id=fault[0]) for fault in WGMMA_FAULTS])
def test_a_fault_planted_in_a_persistent_kernel_is_caught(kernel_gate, old, new):
    gate = kernel_gate(ROUNDS)
    config = gate.configuration(PERSISTENT | {"o_store": "shared"})
    source = gate.source(config)
    broken = Source(source.text.replace(old, new), source.entry, source.launch)  # in both loaders
    assert old in source.text
    found = gate.judge(config, broken)
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG) and found.reason, "the fault escaped"


BY_TMA = PERSISTENT | {"load": "tma"}
STORED = BY_TMA | {"o_store": "tma"}
PAGES_16 = f"{ROUNDS},page16"
LOAD = "        Tile::load(to.tile(tile), map, to.full_of(tile), row, col,"
TMA_FAULTS = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("rows behind the end loaded", BY_TMA, ROUNDS, f"tile * TILE_N);\n{LOAD} work.found.k_end, FAR);", f"tile * TILE_N) - 1;\n{LOAD} work.found.k_end + 1, FAR);"),
    ("last row not loaded", BY_TMA, ROUNDS, f"tile * TILE_N);\n{LOAD} work.found.k_end, FAR);", f"tile * TILE_N) + 1;\n{LOAD} work.found.k_end - 1, FAR);"),
    ("keys of another sequence", BY_TMA, ROUNDS, "row, col, work.found.k_end, FAR);", "row, col, work.found.q_end, FAR);"),
    ("queries from the sequence's begin", BY_TMA, ROUNDS, "row_of(work.found.seq_q, work.first_row);", "row_of(work.found.seq_q, 0);"),
    ("columns of another head", BY_TMA, ROUNDS, "row, work.head * HEAD_DIM, work", "row, work.kv_head * HEAD_DIM, work"),
    ("stored past the sequence's end", STORED, ROUNDS, "row, work.found.q_end, FAR);\n    }", "row - 1, work.found.q_end + 1, FAR);\n    }"),
    ("told of a tile before the last is read", BY_TMA, ROUNDS, "barrier_wait(q.empty_of(0), q.phase(0) % 2 ^ 1);\n        *found", "*found"),
    ("told of a tile after Q is there", BY_TMA, ROUNDS, "        *found = next;\n        if (has_keys)", "        if (!has_keys) *found = next;\n        if (has_keys)"),
    ("never told that none is left", BY_TMA, ROUNDS, "if (elect_one()) tiles.hand_over({-1}, false);", ""),
    ("tiles without keys not handed over", BY_TMA, ROUNDS, "if (work.rows == 0) continue;", "if (work.tiles == 0) continue;"),
    ("tiles without keys left unwritten", BY_TMA, ROUNDS, "work.clear_o(128 * CONSUMERS);", ""),
    ("tiles without keys never released", BY_TMA, ROUNDS, "                tiles.release_q();", ""),
    ("a page's free slots loaded", BY_TMA, PAGES_16, "max(0, min(PAGE, work.seq_k - key + slot))", "PAGE"),
    ("one page for a whole tile", BY_TMA, PAGES_16, "work.table[key / PAGE] : 0", "work.table[tile * TILE_N / PAGE] : 0"),
    ("a box of the page before", BY_TMA, PAGES_16, "first * Tile::SLAB_BYTES", "max(0, first - BOX) * Tile::SLAB_BYTES"),
    ("slots from the page's begin", BY_TMA, f"{ROUNDS},page256", "key = tile * TILE_N + first, slot = key % PAGE;", "key = tile * TILE_N + first, slot = 0;"),
    ("maxima of negative scores of the lower rows", BY_TMA | {"max_by": "bits"}, ROUNDS, "min(bits[0], bits[1]) < 0", "bits[0] < 0"),
    ("maxima of negative scores of the upper rows", BY_TMA | {"max_by": "bits"}, ROUNDS, "min(bits[0], bits[1]) < 0", "bits[1] < 0"),
    ("table read behind the sequence", BY_TMA, PAGES_16, "key < work.seq_k ? work.table[key / PAGE] : 0", "work.table[key / PAGE]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "problem", "old", "new"),
    representatives([pytest.param(*f[1:], id=f[0]) for f in TMA_FAULTS], "rows behind", "told of a tile after"),
)
def test_a_fault_planted_in_a_kernel_by_tma_is_caught(kernel_gate, config, problem, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(config), old, new), "the fault escaped"


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [PERSISTENT, BY_TMA, STORED], ids=["cp_async", "tma", "stored by tma"])
@pytest.mark.parametrize("problem", [ROUNDS, PAGES_16])
def test_the_persistent_kernel_passes(kernel_gate, problem, config):
    gate = kernel_gate(problem)
    verdict = gate.judge(gate.configuration(config))
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (PAGED, SMALL),
        *more([(PACKED, SMALL), (FULL, SMALL), (SINGLES, SMALL), (LARGE_PAGES, SMALL)]),
        *more([(ROUNDS, BY_TMA | {"max_by": "bits"}), (FULL, {"family": "wgmma", "max_by": "bits"})]),
    ],
)
def test_the_good_kernel_passes_with_every_cell_visited(kernel_gate, problem, wanted):
    gate = kernel_gate(problem)
    config = gate.configuration(wanted)
    verdict = gate.judge(config, beside=[Case("the problem itself", gate.problem, config=config)])
    assert verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()


EACH = 40
DRAWN = [
    "varlen:h2,kv1,d64,fp16,lens=77+130+1,kvlens=203+130+9",
    "varlen:h4,kv2,d128,bf16,causal,lens=101+0+40,page16",
    "varlen:h3,kv1,d96,fp16,causal,lens=45+5,kvlens=131+64,page64",
    "varlen:h2,d256,bf16,causal,lens=83+200",
    "varlen:h2,d32,bf16,causal,lens=139+50+50,kvlens=139+20+70,page5",
    "varlen:h5,kv1,d192,fp16,lens=3x9,page1",
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(EACH))
def test_a_valid_configuration_passes(kernel_gate, number):
    gate = kernel_gate(DRAWN[number % len(DRAWN)])
    config = gate.draw(1, seed=number)[0]
    verdict = gate.judge(config, seed=number, beside=[Case("the problem itself", gate.problem, config=config)])
    assert verdict.outcome is None, f"{gate.problem} {config}: {verdict.reason}"


@pytest.mark.parametrize("schedule", ["none", *more(["longest_first"])])
def test_tiles_of_rows_begin_with_those_that_see_most_keys(kernel_gate, schedule):
    gate = kernel_gate("varlen:h14,kv1,d32,fp16,causal,lens=40+200+70+0+130")
    config = gate.configuration(SMALL | {"schedule": schedule, "v_wait": "with_k", "q_in": "shared"})
    workload, source = gate.target.workload, gate.source(config)
    drawn = workload.tensors().draw(Case("", gate.problem, config=config), 3)
    arguments = make_arguments(workload.parameters(gate.problem, config), drawn.inputs)
    done = emulator(source, "sm_90a").run([make_round(workload, source.launch, arguments)], 3)
    steps = visits_by_block(done.visits, VisitKind.COPY_WAIT, range(config["warps"]))
    sorted_heads = schedule == "longest_first"
    assert source.launch.grid == ((14, 10, 1) if sorted_heads else (10, 14, 1))
    of_a_head = [steps[place * 14 if sorted_heads else place] for place in range(10)]
    assert of_a_head == [7, 6, 5, 4, 4, 3, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("h4,kv4,d64,fp16,lens=3+3+3+5", "varlen:h4,d64,fp16,lens=3x3+5"),
        ("varlen:lens=2x7+0,kvlens=9+7+1,causal,bf16,d128,kv1,h8,page16,pool9", "varlen:h8,kv1,d128,bf16,causal,lens=2x7+0,kvlens=9+7+1,page16,pool9"),
        ("varlen:h1,d32,fp16,lens=5,page4,pool2", "varlen:h1,d32,fp16,lens=5,page4"),
    ],
)  # fmt: skip
def test_a_problem_is_written_as_it_is_read(given, written):
    problem = parse_problem(given if given.startswith("varlen") else f"varlen:{given}")[1]
    assert str(problem) == written
    assert parse_problem(written)[1] == problem


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h4,d64,fp16,lens=3+-5", "of which '-5' is not a length: write numbers from 0 on"),
        ("h4,d64,fp16,lens=", "of which '' is not a length"),
        ("h4,d64,fp16,lens=3+5,kvlens=8", "lens names 2 lengths and kvlens 1; each sequence has one of either"),
        ("h4,d64,fp16,lens=0+0", "no sequence has a query"),
        ("h4,d64,fp16,lens=2147483647+1", "add up to 2147483648 rows"),
        ("h4,d64,fp16,lens=3,page0", "has page 0; it must be from 1 to"),
        ("h4,d64,fp16,lens=3,page-16", "has a part 'page-16' that is not h, kv, d, page, pool with a number"),
        ("h4,d64,fp16,lens=40,page16,pool2", "a pool of 2 pages of 16, and its sequences need 3"),
        ("h4,d64,fp16,lens=40,pool39", "a pool of 39 rows, and its sequences need 40"),
        (
            "h4,d64,fp16,lens=40,alibi",
            "'alibi' that is not h, kv, d, page, pool with a number, lens=…, kvlens=…, or fp16",
        ),
        ("h4,d64,fp16,casual,lens=40", "did you mean causal?"),
        ("h4,d64,fp16,lens=40,klens=80", "did you mean kvlens?"),
        ("h4,d64,fp16,lens=40,pages16", "did you mean page?"),
        ("h4,kv3,d64,fp16,lens=40", "4 heads over 3 kv heads"),
        ("h4,d60,fp16,lens=40", "head_dim is 60; the templates cover 32,"),
        ("h65535,d256,fp16,lens=40", "a row of all heads has 16776960 elements; it may have 8388608"),
        ("h4,d64,lens=40", "does not give dtype"),
        ("h4,d64,fp16,fp16,lens=40", "gives dtype twice"),
        ("h4,d64,fp16,lens=512+0x5", "lens=512+0x5, of which '0x5' has no sequences; leave it out"),
        ("h4,d64,fp16,lens=70000x1", "has lens of 70000 sequences; they must be from 1 to 65536"),
    ],
)
def test_a_bad_problem_is_refused_by_what_is_wrong(text, says):
    with pytest.raises(UsageError) as refused:
        parse_problem(f"varlen:{text}")
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_figures_count_the_lengths_themselves():
    workload, square = parse_problem("varlen:h2,kv1,d64,fp16,causal,lens=100+50")
    padded, equal = parse_problem("attention:b2,h2,kv1,s100,d64,fp16,causal")
    assert workload.flops(square) == 4 * 2 * 64 * (100 * 100 + 50 * 50) / 2
    assert workload.flops(parse_problem("varlen:h2,kv1,d64,fp16,causal,lens=2x100")[1]) == padded.flops(equal)
    chunk = parse_problem("varlen:h2,kv1,d64,fp16,causal,lens=10+4,kvlens=100+2")[1]
    assert workload.flops(chunk) == 4 * 2 * 64 * (10 * 100 - 50 + 2)
    assert workload.min_dram_bytes(square) == 2 * 2 * 64 * (2 * 150 + 150)


@pytest.mark.parametrize("problem", [PACKED, FULL, PAGED])
def test_the_reference_is_sdpa_of_each_sequence(problem):
    workload, p = parse_problem(problem)
    drawn = workload.tensors().draw(Case("", p), 3).inputs
    found = workload.tensors().reference(p, drawn)["o"]
    q, k, v = (drawn[name].double() for name in "qkv")
    if p.page:
        k, v = (pool[drawn["table"][2, :3].long()].flatten(0, 1)[:37] for pool in (k, v))
    else:
        k, v = k[135:172], v[135:172]
    expected = scaled_dot_product_attention(
        q[None, 100:].transpose(1, 2),
        k[None].transpose(1, 2),
        v[None].transpose(1, 2),
        is_causal=p.causal,
        enable_gqa=True,
    )[0].transpose(0, 1)
    assert torch.allclose(found[100:], expected) and found.shape == (137, 4, 64)


def test_a_query_that_sees_no_key_has_zeros_and_slots_of_no_sequence_hold_nan():
    workload, p = parse_problem("varlen:h1,d32,fp16,causal,lens=5+2,kvlens=3+0,page2,pool4")
    drawn = workload.tensors().draw(Case("", p), 3).inputs
    found = workload.tensors().reference(p, drawn)["o"]
    assert not found[[0, 1, 5, 6]].any() and found[2:5].any()
    assert int(drawn["k"].isnan().all(-1).sum()) == 4 * 2 - 3
    assert drawn["table"].tolist()[1] == [NO_PAGE, NO_PAGE]


def test_shared_pages_are_those_of_the_longest_sequence():
    workload, p = parse_problem("varlen:h1,d32,fp16,lens=9+20+1,page4")
    table = workload.tensors().draw(Case("", p, "shared pages"), 3).inputs["table"]
    assert table[0, :2].tolist() == table[1, :2].tolist() and table[0, 2] not in table[1]
    assert not math.isnan(float(workload.tensors().draw(Case("", p), 3).inputs["q"].float().sum()))


MMA = {"family": "mma", "tile_m": 128, "tile_n": 64, "schedule": "longest_first"}
WGMMA = {"family": "wgmma", "tile_m": 128, "tile_n": 128, "schedule": "none", "load": "cp_async"}
PERSISTENT_TMA = {"family": "wgmma", "tile_m": 128, "tile_n": 128, "schedule": "static", "load": "tma"}


@pytest.mark.skipif(not disassembler(), reason="needs nvdisasm")
@pytest.mark.exhaustive
@pytest.mark.parametrize("wanted", [MMA, WGMMA, PERSISTENT_TMA], ids=["mma", "wgmma", "wgmma by tma"])
def test_sequences_of_one_length_take_at_most_5_percent_longer_than_padded_ones(kernel_gate, wanted):
    """By prediction, with the same knobs."""
    packed = kernel_gate("varlen:h16,kv4,d128,bf16,causal,lens=8x2048")
    padded = kernel_gate("attention:b8,h16,kv4,s2048,d128,bf16,causal")
    config = packed.configuration(wanted)
    same = config | ({"cluster": 1} if config.get("load") == "tma" else {})
    assert predicted_us(packed, config) < 1.05 * predicted_us(padded, same)


def predicted_us(gate, config):
    source = gate.source(config)
    binary = compile_source(source, "sm_90a")
    return predict_binary(gate.target, CompiledCandidate(0, source, binary, config)).time_us


# --- keys and rows beyond 16 bits

FAR_KEYS = "varlen:h4,kv2,d128,bf16,causal,lens=4+9,kvlens=200000+50"
FAR_ROWS = "varlen:h2,kv1,d64,fp16,lens=200000+5,kvlens=40+7"
ANY_MMA, ANY_COPY, ANY_TMA = (
    {"family": "mma"},
    {"family": "wgmma", "load": "cp_async"},
    {"family": "wgmma", "load": "tma"},
)
FAR_FAULTS = [
    ("keys", ANY_MMA, FAR_KEYS, "(long long)(tile * TILE_N) * kv_stride", "(long long)(tile * TILE_N & 0xffff) * kv_stride"),
    ("keys in pages", ANY_COPY, f"{FAR_KEYS},page1", "return {from, table, tile * TILE_N, kv_stride}", "return {from, table, tile * TILE_N & 0xffff, kv_stride}"),
    ("keys in pages, by TMA", ANY_TMA, f"{FAR_KEYS},page16", "work.table[key / PAGE] : 0", "work.table[(key & 0xffff) / PAGE] : 0"),
    ("rows of Q", ANY_MMA, FAR_ROWS, "q = batch.q + (long long)(q_begin + first_row)", "q = batch.q + (long long)(q_begin + (first_row & 0xffff))"),
    ("rows of O", ANY_COPY, FAR_ROWS, "o = batch.o + (long long)(q_begin + first_row)", "o = batch.o + (long long)(q_begin + (first_row & 0xffff))"),
    ("rows of Q, by TMA", ANY_TMA, FAR_ROWS, "work.first_row)", "work.first_row & 0xffff)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "problem", "old", "new"),
    representatives([pytest.param(*f[1:], id=f"{f[0]} of 16 bits") for f in FAR_FAULTS], "keys of 16 bits"),
)
def test_keys_and_rows_of_too_few_bits_are_caught_where_a_sequence_has_as_many(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    config = gate.configuration(wanted)
    plan = Plans([one for one in gate_plan(gate.space, gate.target, config) if one[0].name.startswith("far ")])
    for source, outcomes in (
        (gate.source(config), (None,)),
        (gate.doctored(config, old, new), (Outcome.INCORRECT, Outcome.CRASHED)),
    ):
        binary = compile_source(source, gate.target.gpu.arch)
        found = execute(gate.target.workload, source, binary, plan, 7)
        assert found.outcome in outcomes, found.reason


# --- blocks of the problem's own launch

LONG = "varlen:h32,kv8,d128,bf16,causal,lens=300x2048+3000"
PAGED_LARGE = "varlen:h32,kv8,d128,bf16,lens=400x70,kvlens=400x6000,page16"
SMALL_TILES = {"family": "mma", "tile_m": 64, "tile_n": 64}
CP_ASYNC = {"family": "wgmma", "tile_m": 128, "load": "cp_async", "schedule": "none"}
FULL_FAULTS = [
    ("rows of Q at offsets of 32 bits", SMALL_TILES, LONG, "q = batch.q + (long long)(q_begin", "q = batch.q + (int)(q_begin"),
    ("rows of O at offsets of 32 bits", CP_ASYNC, LONG, "o = batch.o + (long long)(q_begin", "o = batch.o + (int)(q_begin"),
    ("keys at offsets of 32 bits", SMALL_TILES, PAGED_LARGE, "((long long)table[key / PAGE] * PAGE + key % PAGE)", "(int)(table[key / PAGE] * PAGE + key % PAGE)"),
    ("pages of 16 bits", CP_ASYNC, PAGED_LARGE, "(long long)table[key / PAGE]", "(long long)(table[key / PAGE] & 0xffff)"),
    ("sequences of 8 bits", SMALL_TILES, PAGED_LARGE, "(long long)s * batch.table_width", "(long long)(s & 255) * batch.table_width"),
    ("the first rows of a sequence's end by TMA", BY_TMA, LONG, "q_end = cu_q[s + 1], k_end", "q_end = cu_q[s + 1] & 0x7ffff, k_end"),
]  # fmt: skip


def full_size(gate, config, source):
    plans = Plans((), (), full_plan(gate.space, gate.target, config))
    binary = compile_source(source, gate.target.gpu.arch)
    return judge_whole(executor(CompiledCandidate(0, source, binary, config)), gate.target.workload, plans, 5)


@pytest.mark.parametrize(
    ("wanted", "problem", "old", "new"),
    representatives([pytest.param(*f[1:], id=f[0]) for f in FULL_FAULTS], "pages of 16 bits"),
)
def test_a_fault_that_no_small_case_shows_is_caught_at_full_size(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    config = gate.configuration(wanted)
    found = full_size(gate, config, gate.doctored(config, old, new))
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED) and found.reason, "the fault escaped"


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (SMALL_TILES, LONG),
        *more([(c, p) for p in (LONG, PAGED_LARGE, ROUNDS) for c in (SMALL_TILES, CP_ASYNC, BY_TMA, STORED)][1:]),
        *more([(CP_ASYNC, "varlen:h3,d64,fp16,causal,lens=9x100+3,kvlens=9x40+700,page7,pool5000")]),
    ],
)
def test_a_right_kernel_passes_at_full_size(kernel_gate, wanted, problem):
    gate = kernel_gate(problem)
    config = gate.configuration(wanted)
    found = full_size(gate, config, gate.source(config))
    assert found.outcome is None, found.reason
    assert [case.name for case in found.cases] == ["full grid"]
