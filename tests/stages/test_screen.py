"""Screens reject what can never run, and what spills where no clock will judge it."""

from __future__ import annotations

import pytest

from evoengine.gpu import find_gpu
from evoengine.records import Binary, Launch, Source
from evoengine.stages.screen import screen_binary, screen_launch

H100, L4 = find_gpu("h100"), find_gpu("l4")


def launch(threads=128, shared=1024, grid=(1, 1, 1)) -> Launch:
    return Launch(grid, threads, shared)


def source(**geometry) -> Source:
    return Source("", "kernel", launch(**geometry))


def binary(registers=64, spill=0, shared=0, mix=None) -> Binary:
    return Binary(b"", "sm_90a", "", "nvrtc", registers, spill, 0, shared, (), mix or {}, 1.0)


@pytest.mark.parametrize(
    ("gpu", "bad", "reason"),
    [
        (H100, launch(threads=2048), "2048 threads"),
        (H100, launch(threads=0), "0 threads"),
        (H100, Launch((1, 1, 1), 130, 0, (1, 65)), "65 threads along z; 64"),
        (H100, launch(shared=232449), "232449 bytes of shared memory per block; h100 has 232448"),
        (L4, launch(shared=120000), "l4 has 101376"),
        (H100, launch(grid=(1, 70000, 1)), "65535"),
    ],
)
def test_an_impossible_launch_says_why(gpu, bad, reason):
    assert reason in screen_launch(bad, gpu)


def test_the_largest_launch_passes():
    assert screen_launch(launch(threads=1024, shared=232448, grid=(2**20, 65535, 65535)), H100) is None


def test_a_block_need_not_be_of_whole_warps():
    assert screen_launch(Launch((1, 1, 1), 48, 0, (3, 1)), H100) is None


@pytest.mark.parametrize(
    ("found", "geometry", "reason"),
    [
        (binary(registers=65), source(threads=1024), "66560 registers per block"),
        (binary(shared=4096), source(shared=232448), "static and dynamic"),
        (binary(spill=4), source(), "4 bytes of register spills"),
    ],
)
def test_a_binary_that_does_not_fit_says_why(found, geometry, reason):
    assert reason in screen_binary(found, geometry, H100, {}, timed=False)


def test_a_spill_is_left_to_the_clock_where_there_is_one():
    assert screen_binary(binary(spill=4), source(), H100, {}, timed=True) is None


def test_a_good_binary_passes():
    assert screen_binary(binary(), source(), H100, {}, timed=False) is None


def test_a_binary_that_lost_products_says_so():
    found = screen_binary(binary(mix={"HMMA": 32}), source(), H100, {"tensor_instructions": 128.0}, timed=True)
    assert found.startswith("32 tensor-core instructions where one tile takes 128")


@pytest.mark.parametrize("mix", [{"HMMA": 128}, {"HGMMA": 130, "FADD": 4}, {}])
def test_a_binary_with_enough_products_or_without_a_listing_passes(mix):
    assert screen_binary(binary(mix=mix), source(), H100, {"tensor_instructions": 128.0}, timed=False) is None
