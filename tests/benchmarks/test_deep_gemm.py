"""What is predicted beside DeepGEMM: configurations of the space, and shared memory as its host code computes it."""

from __future__ import annotations

import pytest

from benchmarks.deep_gemm import CONFIGURATIONS, GPU, PUBLISHED, PUBLISHED_GROUPS, Layout, known_knobs, stages_and_bytes
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.space.space import load_space
from evoengine.workloads import parse_problem


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_a_configuration_is_one_of_the_space(config):
    m, n, k = next(iter(PUBLISHED))
    _, problem = parse_problem(f"gemm:m{m},n{n},k{k},fp8_e4m3,b_nk,block_scales")
    assert load_space(asset("search_spaces") / "gemm.toml", problem, find_gpu(GPU)).contains(config)


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_so_it_is_of_groups(config):
    m, n, k, groups = next(iter(PUBLISHED_GROUPS))
    _, problem = parse_problem(f"grouped-gemm:rows={groups}x{m},n{n},k{k},fp8_e4m3,b_nk,block_scales")
    space = load_space(asset("search_spaces") / "grouped-gemm.toml", problem, find_gpu(GPU))
    assert space.contains(known_knobs(config, space))


def test_buffers_are_as_many_as_fit_beside_c_and_the_factors_of_b():
    assert stages_and_bytes(Layout(128, 128), 7168) == (5, 32768 + 256 + 224 + 5 * (32768 + 512))
    assert stages_and_bytes(Layout(256, 128), 7168)[0] == 3
