"""The attention space, and a gate that judges any workload's kernels on the emulator."""

from __future__ import annotations

from functools import cache

import numpy as np

from evoengine import workloads
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import CompiledCandidate, Outcome, Plans, Rejection, Source
from evoengine.search.evaluators import full_plan, gate_plan
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import emulator, executor, judge_whole
from evoengine.stages.render import render
from evoengine.stages.verify import CannotJudge
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import parse_problem
from evoengine.workloads.base import Target


def attention_target(problem: str = "b16,h16,s2048,d64,fp16", gpu: str = "h100") -> Target:
    return Target(find_workload("attention"), parse_problem(problem), find_gpu(gpu))


@cache
def space_of(problem: str, gpu: str = "h100", families: tuple[str, ...] = ()) -> SearchSpace:
    """The space of a problem's workload; half a second of a core, and the same for all tests."""
    workload, parsed = workloads.parse_problem(problem)
    return load_space(asset("search_spaces") / f"{workload.name}.toml", parsed, find_gpu(gpu), families)


def attention_space(
    problem: str = "b16,h16,s2048,d64,fp16", gpu: str = "h100", families: tuple[str, ...] = ()
) -> SearchSpace:
    """That of the workload which needs no name."""
    return space_of(problem, gpu, families)


def emulate(workload, source, plans, seed, arch="sm_90a"):
    """The emulator's verdict on a text, or a Rejection where it cannot be built."""
    try:
        return judge_whole(emulator(source, arch), workload, plans, seed)
    except CannotJudge as error:
        return Rejection(Outcome.UNCOMPILABLE, str(error))


def execute(workload, source, binary, plans, seed):
    """The executor's verdict on a binary. Raises CannotJudge where it cannot be executed."""
    return judge_whole(executor(CompiledCandidate(0, source, binary)), workload, plans, seed)


class KernelGate:
    """Renders configurations of a workload's space and puts them, or a doctored text of them, through the gate."""

    def __init__(self, problem: str, gpu: str = "h100") -> None:
        workload, self.problem = workloads.parse_problem(problem)
        self.target = Target(workload, self.problem, find_gpu(gpu))
        self.space = space_of(problem, gpu)

    def start(self, wanted):
        """The space's first start point that has these values."""
        return next(c for c in self.space.starts if wanted.items() <= c.items())

    def configuration(self, wanted):
        """The first start point that has these values, else the first of many draws."""
        return next(c for c in (*self.space.starts, *self.draw(500, seed=1)) if wanted.items() <= c.items())

    def source(self, config) -> Source:
        return render(self.target, self.space, config, asset("templates"))

    def judge(self, config, source: Source | None = None, seed: int = 7, beside=()):
        """The verdict on the workload's cases, those `beside` them and those at full size."""
        plan = gate_plan(self.space, self.target, config)
        plan += [(case, self.space.launch(config, case.problem)) for case in beside]
        full = full_plan(self.space, self.target, config)
        plans = Plans(plan, (), full)
        return emulate(self.target.workload, source or self.source(config), plans, seed, self.target.gpu.arch)

    def judge_binary(self, config, source: Source | None = None, seed: int = 7):
        """The executor's verdict on the machine code of the configuration's kernel, or of `source`, by the cases."""
        source = source or self.source(config)
        binary = compile_source(source, self.target.gpu.arch)
        return execute(self.target.workload, source, binary, Plans(gate_plan(self.space, self.target, config)), seed)

    def doctored(self, config, old: str, new: str) -> Source:
        source = self.source(config)
        assert old in source.text, f"the template has no {old!r} any more"
        return Source(source.text.replace(old, new), source.entry, source.launch)

    def refutes(self, config, old: str, new: str) -> bool:
        """Whether the gate rejects the configuration's kernel with the fault `new` in place of `old`, and says why."""
        found = self.judge(config, self.doctored(config, old, new))
        return found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG) and bool(found.reason)

    def draw(self, count: int, seed: int):
        return self.space.sample(np.random.default_rng(seed), count)
