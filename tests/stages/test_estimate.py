"""The static estimate is made of terms that can be checked by hand."""

from __future__ import annotations

import pytest

from evoengine.gpu import find_gpu
from evoengine.records import Binary, Kind, Launch
from evoengine.stages.predict import BARRIER_CLOCKS, estimate

H100 = find_gpu("h100")


def figure(cost, registers=64, threads=256, shared=65536, blocks=264, mix=None, flops=1e6, min_dram_bytes=0.0):
    binary = Binary(b"", "sm_90a", "", "", registers, 0, 0, 0, (), mix or {}, 0.0)
    return estimate(binary, Launch((blocks, 1, 1), threads, shared), cost, H100, flops, min_dram_bytes)


def test_an_estimate_is_marked_as_one():
    m = figure({"mufu": 1e6})
    assert (m.kind, m.samples_us) == (Kind.ESTIMATED, ())
    assert "h100" in m.device


def test_one_wave_of_exponentials_takes_their_clocks():
    # 3 blocks of 65 KB fit an SM; 132 · 3 blocks are one whole wave; each needs 16,000 / 16 clocks of the SM's MUFU
    m = figure({"mufu": 16_000}, blocks=132 * 3, flops=1e9)
    assert m.terms["blocks_per_sm"] == 3
    assert m.median_us == pytest.approx(3 * 1000 / 1830)
    assert m.tflops == pytest.approx(1e9 / m.median_us / 1e6)


def test_a_lone_block_cannot_hide_its_barriers():
    without, with_barriers = figure({"mufu": 16_000}, blocks=1), figure({"mufu": 16_000, "barriers": 100}, blocks=1)
    assert with_barriers.median_us - without.median_us == pytest.approx(100 * BARRIER_CLOCKS / 1830)


def test_copies_that_overlap_cost_a_lone_block_nothing():
    copied = {"mufu": 16_000, "global_bytes": 32_000}
    assert figure(copied | {"overlap": 1}, blocks=1).median_us < figure(copied | {"overlap": 0}, blocks=1).median_us


def test_a_tail_wave_costs_more_than_its_share():
    full, one_more = figure({"mufu": 16_000}, blocks=396), figure({"mufu": 16_000}, blocks=397)
    assert one_more.median_us - full.median_us == pytest.approx(1000 / 1830)


def test_no_estimate_is_faster_than_memory_allows():
    assert figure({"mufu": 1}, min_dram_bytes=3350e3).median_us == pytest.approx(1.0)


def test_wgmma_reaches_more_of_the_tensor_peak_than_mma_sync():
    cost = {"tensor_flops": 1e8}
    assert figure(cost, mix={"HGMMA": 8}).tflops > figure(cost, mix={"HMMA": 8}).tflops


def test_blocks_that_share_an_sm_hide_one_anothers_phases_but_for_those_of_one():
    # each of three blocks: 1,000 clocks of MUFU and 500 of shared memory
    m = figure({"mufu": 16_000, "shared_bytes": 64_000}, blocks=132 * 3)
    assert m.terms["blocks_per_sm"] == 3
    assert m.median_us == pytest.approx((3 * 1000 + 500) / 1830)
    assert m.terms["waited_us"] == pytest.approx(500 / 1830)


def test_operands_that_wgmma_reads_from_shared_memory_are_no_phase_of_their_own_but_a_bound():
    cost = {"tensor_flops": 4e6, "mufu": 1600, "shared_bytes": 32_000}
    beside, bound = (figure(cost | {"shared_bytes": n}, mix={"HGMMA": 8}, blocks=1) for n in (32_000, 3_200_000))
    assert beside.median_us == figure(cost | {"shared_bytes": 0}, mix={"HGMMA": 8}, blocks=1).median_us
    assert bound.median_us == pytest.approx(25_000 / 1830)
    by_warps = figure(cost, mix={"HMMA": 8}, blocks=1).median_us
    assert by_warps > figure(cost | {"shared_bytes": 0}, mix={"HMMA": 8}, blocks=1).median_us


def test_phases_that_a_blocks_own_warps_hide_behind_the_longest_count_for_what_is_exposed():
    # 1,000 clocks of MUFU and 500 of shared memory, of which a quarter is left to wait for
    cost = {"mufu": 16_000, "shared_bytes": 64_000}
    assert figure(cost, blocks=1).median_us == pytest.approx(1500 / 1830)
    assert figure(cost | {"exposed": 0.25}, blocks=1).median_us == pytest.approx(1125 / 1830)


def test_a_family_that_states_no_work_gets_no_figure():
    # the memory alone would have bounded it: thousands of TFLOPS
    assert figure({}) is None
    assert figure({"barriers": 10, "overlap": 1, "exposed": 0.5}) is None


def test_no_estimate_is_above_the_gpus_peak_whatever_the_space_counts():
    m = figure({"mufu": 1}, flops=274.9e9)
    assert m.tflops == pytest.approx(H100.tensor_tflops)
