"""Draw valid configurations of the shipped spaces by seed and compile them for architectures that the executor has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from evoengine import workloads
from evoengine.errors import UsageError
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import Binary, Config, Source
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages.compile import CompileFailed, compile_source
from evoengine.stages.render import render
from evoengine.workloads.base import Target

GPUS = ("rtx2080ti", "a100", "rtx3090", "l4", "h100", "rtx5090")
"""one GPU for each of sm_75, sm_80, sm_86, sm_89, sm_90a and sm_120"""
PROBLEMS = (
    "attention:b2,h4,s1024,d64,fp16", "attention:b1,h4,s2048,d128,bf16,causal",
    "attention:b2,h8,s512,d64,bf16,causal,kv2", "attention:b1,h4,s1024,d128,fp16",
    "attention:b1,h2,s512,d256,fp16", "attention:b1,h4,sq77,sk203,d96,bf16,kv1",
    "gemm:m512,n1024,k512,fp16", "gemm:m1000,n520,k264,bf16,bias_relu", "gemm:m256,n512,k4096,fp16,bias_gelu",
    "convolution:w256,h256,fw17,fh17", "convolution:w100,h77,fw5,fh9",
    "w4a16:m300,n520,k1056,bf16,g32,zeros,bias",
    "rms_norm:rows64,hidden4096,bf16", "rms_norm:rows33,hidden1000,fp16", "rms_norm:rows16,hidden777,fp32",
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A compiled configuration."""

    target: Target
    space: SearchSpace
    config: Config
    source: Source
    binary: Binary

    @property
    def name(self) -> str:
        knobs = ",".join(f"{k}={v}" for k, v in self.config.items())
        return f"{self.target.workload.name}:{self.target.problem} {self.target.gpu.arch} {knobs}"


def draw(count: int, seed: int, gpus: Sequence[str] = GPUS) -> Iterator[Drawn]:
    """Yield `count` binaries in turns of architecture, problem and family; what the compiler refuses is drawn again."""
    random = np.random.default_rng(seed)
    groups = [group for problem in PROBLEMS for gpu in gpus for group in _groups(problem, gpu)]
    order = random.permutation(len(groups))
    made = 0
    while made < count:
        target, space, family = groups[order[made % len(groups)]]
        for config in space.sample(random, 20):
            if config["family"] != family:
                continue
            source = render(target, space, config, asset("templates"))
            with suppress(CompileFailed):
                yield Drawn(target, space, config, source, compile_source(source, target.gpu.arch))
                break
        made += 1


def _groups(problem: str, gpu: str) -> list[tuple[Target, SearchSpace, str]]:
    workload, parsed = workloads.parse_problem(problem)
    board = find_gpu(gpu)
    target = Target(workload, parsed, board)
    try:
        space = load_space(asset("search_spaces") / f"{workload.name}.toml", parsed, board, ())
    except UsageError:  # no family of the workload runs there
        return []
    return [(target, space, family) for family in space.families if family not in space.empty_families]
