"""The ways of the wgmma GEMM that are predicted: the space admits each."""

from __future__ import annotations

import pytest

from benchmarks.gemm_hopper import GPU, WAYS, configuration
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.space.space import load_space
from evoengine.workloads import parse_problem


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.problem}-{way.name}")
def test_every_way_is_a_configuration_of_the_space(way):
    space = load_space(asset("search_spaces") / "gemm.toml", parse_problem(way.problem)[1], find_gpu(GPU))
    assert space.contains(configuration(way))
