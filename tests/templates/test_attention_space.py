"""The space file against the templates: every knob matters, every start is good, the costs add up."""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from evoengine.errors import UsageError
from evoengine.paths import asset
from evoengine.records import Source, config_key
from evoengine.stages.compile import compile_source
from evoengine.stages.render import inert_knobs
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import HEAD_DIMS, parse_problem
from tests.support.exhaustive import more
from tests.support.kernel_gate import attention_space

HEADLINE = "b16,h16,s2048,d64,fp16"
KNOBS = {
    "scalar": "tile_m tile_n warps rows pad stages vector reduction alias_sp o_in min_blocks".split(),
    "wmma": "tile_m tile_n warps warps_n pad stages vector reduction lanes alias_sp o_in q_in min_blocks".split(),
    "mma": "tile_m tile_n warps stages q_in layout v_wait min_blocks".split(),
    "wgmma": (
        "tile_m tile_n stages load p_in o_store overlap pv_wait v_ahead ping_pong schedule cluster exp2_on_fma max_by "
        "rescale_above producer_registers min_blocks"
    ).split(),
}


@pytest.fixture(scope="module")
def gate(attention_gate):
    return attention_gate(HEADLINE)


@pytest.fixture(scope="module")
def machine_code(gate):
    """Configuration → its instructions on an H100, each compiled once."""

    @cache
    def of(key: str) -> bytes:
        return compile_source(gate.source(configs[key]), "sm_90a").cubin

    configs = {}

    def compiled(config) -> bytes:
        configs[config_key(config)] = config
        return of(config_key(config))

    return compiled


def moves(space, family, knob):
    """Pairs of valid configurations that differ in that knob alone (or in what it switches on), near a start first."""
    bases = [c for c in space.starts if c["family"] == family]
    bases += [c for base in bases for c in space.neighbours(base) if c["family"] == family]
    for base in bases:
        for other in space.neighbours(base):
            if other["family"] == family and knob in base and other.get(knob, base[knob]) != base[knob]:
                yield base, other


# `make test` compiles a move of these; that no text stays the same is seen of every knob below
FAST_KNOBS = [("scalar", "tile_m"), ("wmma", "q_in")]
EVERY_KNOB = [(family, knob) for family, knobs in KNOBS.items() for knob in knobs]
OTHER_KNOBS = [case for case in EVERY_KNOB if case not in FAST_KNOBS]


@pytest.mark.parametrize(("family", "knob"), [*FAST_KNOBS, *more(OTHER_KNOBS)])
def test_every_knob_changes_the_machine_code(gate, machine_code, family, knob):
    base, other = next(moves(gate.space, family, knob))
    assert machine_code(base) != machine_code(other), f"{base} and {other} compile alike"


def test_a_comment_changes_no_machine_code(gate, machine_code):
    start = gate.space.starts[0]
    source = gate.source(start)
    commented = Source(source.text + "// nothing\n", source.entry, source.launch)
    assert compile_source(commented, "sm_90a").cubin == machine_code(start)


def test_no_knob_is_forgotten_above(gate):
    active = {name: {k for c in gate.space.starts if c["family"] == name for k in c} for name in KNOBS}
    for family, knobs in KNOBS.items():
        assert set(knobs) <= {k.name for k in gate.space.knobs}
        assert active[family] - {"family"} <= set(knobs)
    assert {"family"}.union(*KNOBS.values()) == {k.name for k in gate.space.knobs}


def test_no_knob_is_inert(gate):
    assert inert_knobs(gate.target, gate.space, gate.draw(8, seed=3), asset("templates")) == ()


@pytest.mark.parametrize("problem", [HEADLINE, *more(["b2,h8,s512,d96,bf16,causal,kv2"])])
def test_unlike_configurations_never_render_alike(attention_gate, problem):
    gate = attention_gate(problem)
    configs = {config_key(c): c for c in gate.draw(300, seed=5)}
    assert len({gate.source(c).text for c in configs.values()}) == len(configs)


def test_every_family_offers_at_least_a_thousand_configurations(gate):
    counts = {family: len(attention_space(families=(family,))) for family in gate.space.families}
    assert min(counts.values()) > 1000, counts


def test_the_reference_point_of_the_hand_written_kernel_is_a_start(gate):
    known = dict(family="wmma", tile_m=64, tile_n=64, warps=8, pad=16, stages=2)
    assert any(known.items() <= start.items() for start in gate.space.starts)
    assert not gate.space.dropped_starts


PLACES = [(gpu, head_dim) for gpu in ("h100", "a100", "l4") for head_dim in HEAD_DIMS]
FAST_PLACES = [("h100", 256), ("l4", 64)]


@pytest.mark.parametrize(("gpu", "head_dim"), [*FAST_PLACES, *more(p for p in PLACES if p not in FAST_PLACES)])
def test_every_family_that_the_gpu_can_run_has_a_start_for_every_head_dim(gpu, head_dim):
    space = attention_space(f"b2,h8,s512,d{head_dim},fp16", gpu)
    assert {start["family"] for start in space.starts} == set(space.families) - space.empty_families.keys()
    assert space.empty_families.keys() <= {"wgmma"}


@pytest.mark.parametrize("mask", ["", ",causal"])
def test_rows_of_v_unlike_those_of_k_are_for_wgmma_which_starts_with_flash_attention_3_s_tile(mask):
    space = attention_space(f"b2,h16,s8192,d192,dv128,bf16{mask}", "h100")
    assert {start["family"] for start in space.starts} == {"wgmma"}
    assert (128, 128) in {(start["tile_m"], start["tile_n"]) for start in space.starts}
    assert all("rows of V" in space.empty_families[family] for family in ("scalar", "wmma", "mma"))


def test_o_leaves_by_way_of_the_memory_of_q_only_where_its_rows_are_no_longer():
    space = attention_space("b2,h16,s2048,d64,dv128,bf16", "h100")
    starts = [{**start, "o_store": "direct"} for start in space.sample(np.random.default_rng(1), 20)]
    assert starts and all(space.contains(start) for start in starts)
    assert all("shared memory of Q" in space.why_invalid({**start, "o_store": "shared"}) for start in starts)


def test_a_gpu_without_wgmma_is_told_that_such_rows_are_for_it_alone():
    with pytest.raises(UsageError, match=r"rows of V other than those of Q and K are for wgmma alone"):
        attention_space("b2,h16,s2048,d192,dv128,bf16", "a100")


def test_starts_are_unlike_one_another(gate):
    assert all(a != b for a, b in combinations(gate.space.starts, 2))


def test_every_named_cost_is_stated_by_every_family(gate):
    names = {"tensor_flops", "fp32_flops", "mufu", "shared_bytes", "global_bytes", "barriers", "overlap"}
    names |= {"tensor_instructions"}
    for start in gate.space.starts:
        assert set(gate.space.cost(start)) - {"exposed", "producer_warpgroups"} == names


def test_the_blocks_of_the_wmma_family_do_the_problems_flops(gate):
    for start in (s for s in gate.space.starts if s["family"] == "wmma"):
        total = gate.space.cost(start)["tensor_flops"] * math.prod(gate.space.launch(start).grid)
        assert total == find_workload("attention").flops(gate.problem)


@pytest.mark.parametrize(
    "shape", ["b1,h2,sq130,sk1024", *more(["b1,h1,s64", "b1,h4,s100", "b2,h8,s512", "b4,h32,s2048"])]
)
@pytest.mark.parametrize("head_dim", [64, *more([128])])
def test_a_mask_makes_no_block_dearer_however_few_tiles_there_are(shape, head_dim):
    full, masked = attention_space(f"{shape},d{head_dim},fp16"), attention_space(f"{shape},d{head_dim},fp16,causal")
    drawn = [c for c in masked.sample(np.random.default_rng(3), 200) if full.contains(c)]
    assert {c["family"] for c in drawn} == set(KNOBS)
    for config in [c for c in drawn if c.get("schedule") != "static"]:  # whose blocks take turns of unlike length
        under_mask, without = masked.cost(config), full.cost(config)
        assert all(under_mask[name] <= without[name] * (1 + 1e-9) for name in without), config


def test_where_all_blocks_begin_at_once_the_longest_decides_under_a_mask():
    """A block that sees all keys takes as long as without a mask: 64 blocks on 132 SMs."""
    full, masked = attention_space("b1,h4,s2048,d64,fp16"), attention_space("b1,h4,s2048,d64,fp16,causal")
    start = next(c for c in masked.starts if c["family"] == "wgmma" and c["tile_m"] == 128 and c["schedule"] == "none")
    assert masked.cost(start)["mufu"] == full.cost(start)["mufu"]


@pytest.mark.parametrize("lengths", ["sq1024,sk4096", *more(["s2048"])])
def test_under_a_mask_they_do_those_of_the_tiles_they_walk(lengths):
    problem = parse_problem(f"b2,h8,{lengths},d64,fp16,causal")
    space = attention_space(str(problem))
    for config in (c for c in space.sample(np.random.default_rng(2), 100) if c["family"] == "wmma"):
        m, n = config["tile_m"], config["tile_n"]
        ends = [row + m + problem.seq_k - problem.seq_q for row in range(0, problem.seq_q, m)]
        walked = sum(math.ceil(end / n) for end in ends) / len(ends)
        assert space.cost(config)["tensor_flops"] == pytest.approx(walked * 4 * m * n * 64, rel=0.05)


def test_the_exponentials_are_one_per_score_and_the_rescaling(gate):
    problem = gate.problem
    scores = problem.batch * problem.heads * problem.seq_q * problem.seq_k
    for config in [*gate.space.starts, *gate.draw(200, seed=9)]:
        total = gate.space.cost(config)["mufu"] * math.prod(gate.space.launch(config).grid)
        assert total >= scores * (1 - config.get("exp2_on_fma", 0.0)), config


def test_padding_that_ends_bank_conflicts_lowers_the_shared_traffic(gate):
    start = next(s for s in gate.space.starts if s["family"] == "wmma")
    traffic = {pad: gate.space.cost({**start, "pad": pad})["shared_bytes"] for pad in (0, 8, 16)}
    assert traffic[8] < traffic[16] < traffic[0]
