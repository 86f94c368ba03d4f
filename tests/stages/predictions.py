"""A family's first start point, compiled, and the figure predicted for it."""

from __future__ import annotations

from functools import cache

from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import CompiledCandidate, Config
from evoengine.space.space import load_space
from evoengine.stages.compile import compile_source
from evoengine.stages.predict import predict_figure
from evoengine.stages.render import render
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import parse_problem
from evoengine.workloads.base import Target

ATTENTION = find_workload("attention")
H100, L4 = find_gpu("h100"), find_gpu("l4")
PROBLEM = parse_problem("b2,h4,s512,d32,fp16")
COST = {"mufu": 16_000.0}


@cache
def made(family: str, gpu=H100, problem=PROBLEM) -> CompiledCandidate:
    """The family's first start point, compiled."""
    space = load_space(asset("search_spaces") / "attention.toml", problem, gpu, (family,))
    config: Config = space.starts[0]
    source = render(Target(ATTENTION, problem, gpu), space, config, asset("templates"))
    return CompiledCandidate(1, source, compile_source(source, gpu.arch), config)


def figure(contender: CompiledCandidate, gpu=H100, problem=PROBLEM, cost=COST):
    return predict_figure(Target(ATTENTION, problem, gpu), contender, cost)
