"""Candidates of a small problem with times of their own, measured on the stand-in driver."""

from __future__ import annotations

from evoengine.gpu import find_gpu
from evoengine.records import L2, Baseline, Clocks, LaunchMode, Policy
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import AttentionProblem, parse_problem
from evoengine.workloads.base import Target

PROBLEM = parse_problem("b2,h8,s64,d32,fp16,causal,kv2")
H100 = find_gpu("h100")
US = {"SDPA FLASH_ATTENTION": 300.0, "SDPA MATH": 900.0}


def contender(trial, us, change=None):
    from tests.fake_cuda.programs import contender as made

    return made(PROBLEM, trial, us, change)


def target(problem: AttentionProblem | None = None) -> Target:
    return Target(find_workload("attention"), problem or PROBLEM, H100)


STREAM = Policy(LaunchMode.STREAM, L2.COLD, Clocks.BOOST)
SDPA = Baseline("FLASH_ATTENTION", "stand-in", 300.0, 1.0, (), STREAM)


def judge(stage, candidate, incumbent=None, seed=5, rival=SDPA, of=None):
    plan = [(case, candidate.source.launch) for case in find_workload("attention").cases(PROBLEM, {})[:3]]
    return stage.measure(of or target(), candidate, plan, seed, incumbent, rival)


FULL = PROBLEM.batch * PROBLEM.heads * PROBLEM.seq_q * PROBLEM.head_dim


def at_full_size(change):
    """The fault shows at the full problem alone, as one that the gate's small cases cannot have."""

    def changed(out, launch):
        if out.numel() == FULL:
            return change(out)

    return changed
