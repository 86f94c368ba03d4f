"""Every cell of a configuration is visited by some case of the gate, and every case visits a cell that no other does."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import numpy as np
import pytest

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run_rounds
from evoengine.devices.base import VISIT
from evoengine.records import CompiledCandidate
from evoengine.search.evaluators import gate_plan
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import emulator, executor
from evoengine.stages.verify import CoverageLog, coverage_of, joined, verify
from evoengine.workloads.coverage import Cell
from tests.support.exhaustive import more
from tests.support.kernel_gate import KernelGate
from tests.workloads.ideal_visits import ideal_visits

EACH, FAST = 200, 4
"""configurations of a family, and how many of them `make test` looks at"""
ATTENTION = (
    "b2,h4,s700,d64,fp16,kv2", "b3,h6,sq300,sk1000,d128,bf16,causal,kv2", "b1,h4,sq45,sk131,d96,fp16,causal,kv1",
    "b1,h2,sq4100,sk67,d64,bf16", "b4,h3,s64,d64,fp16,kv1", "b4,h128,s250,d128,fp16,causal", "b8,h64,s250,d64,fp16",
)  # fmt: skip
GEMM = ("gemm:m1000,n768,k3000,fp16", "gemm:m777,n4096,k6000,bf16,bias", "gemm:m5000,n1024,k520,fp16")
ROWWISE = (
    "rowwise:softmax,rows1000,hidden1024,bf16", "rowwise:cross_entropy,rows777,hidden2000,fp32",
    "rowwise:layer_norm,rows99999,hidden960,fp16",
)  # fmt: skip
FAMILIES = {
    **{f"attention {family}": (family, ATTENTION) for family in ("scalar", "wmma", "mma", "wgmma")},
    "attention-backward mma": ("mma", ("attention-backward:b2,h4,s700,d64,fp16,kv2", "attention-backward:b3,h6,sq300,sk1000,d128,bf16,causal,kv2", "attention-backward:b1,h2,sq4100,sk67,d64,bf16,causal")),
    "attention-backward wgmma": ("wgmma", ("attention-backward:b2,h4,s700,d64,fp16,kv2", "attention-backward:b3,h6,sq300,sk1000,d128,bf16,causal,kv2", "attention-backward:b1,h2,sq4100,sk67,d64,bf16,causal")),
    "attention-backward scalar": ("scalar", ("attention-backward:b2,h4,s700,d64,fp16,kv2", "attention-backward:b3,h6,sq300,sk1000,d128,bf16,causal,kv2")),
    "gemm mma": ("mma", (*GEMM, "gemm:m1000,n777,k333,bf16,bias")),
    "gemm wgmma": ("wgmma", GEMM),
    **{f"rms_norm {family}": (family, ("rms_norm:rows1000,hidden512,bf16", "rms_norm:rows777,hidden200,fp32", "rms_norm:rows99999,hidden96,fp16")) for family in ("warp", "block")},
    **{f"rowwise {family}": (family, ROWWISE) for family in ("warp", "block", "cluster")},
    **{f"convolution {family}": (family, ("convolution:w300,h500,fw5,fh7", "convolution:w1001,h90,fw3,fh3")) for family in ("shared", "direct")},
    **{f"conv2d {family}": (family, ("conv2d:n2,c64,h14,w14,k64,r3,s3,pad1,fp16", "conv2d:n3,c40,h15,w17,k72,r3,s5,stride2,pad1,dilation2,bf16,bias", "conv2d:n8,c3,h64,w64,k64,r7,s7,stride2,pad3,fp16")) for family in ("mma", "direct")},
    "conv2d wgmma": ("wgmma", ("conv2d:n2,c64,h14,w14,k64,r3,s3,pad1,fp16", "conv2d:n3,c40,h15,w17,k72,r3,s5,stride2,pad1,dilation2,bf16,bias")),
}  # fmt: skip


SCHEDULES = [
    *({"schedule": "none", "cluster": cluster} for cluster in ("1x1", "2x1", "1x2")),
    *({"schedule": "none", "split_k": parts} for parts in (2, 4)),
    *({"schedule": "persistent", "cluster": cluster, "ping_pong": turns} for cluster in ("1x1", "2x1", "1x2") for turns in (False, True)),
]  # fmt: skip # a table
LONG_CASES = ("long", "own m", "own n", "squares of tiles", "a square of tiles")


@cache
def gate(problem: str) -> KernelGate:
    return KernelGate(problem)


@cache
def drawn(problem: str, family: str) -> list:
    return [config for config in gate(problem).draw(3000, seed=5) if config["family"] == family]


def configurations(name: str, count: int):
    """That many of a family, problem by problem in turn, each with its gate."""
    family, problems = FAMILIES[name]
    for number in range(count):
        found = drawn(problems[number % len(problems)], family)
        yield gate(problems[number % len(problems)]), found[number // len(problems) % len(found)]


def visited_by_case(gate: KernelGate, config) -> dict[str, set[Cell]]:
    """What each case visits, by name, were it launched."""
    workload, found = gate.target.workload, {}
    for number, (case, launch) in enumerate(gate_plan(gate.space, gate.target, config)):
        found[case.name] = set(workload.visited(case, launch, ideal_visits(case, launch)))
        found[case.name] |= workload.tensors().shown(case, workload.tensors().draw(case, number))
    return found


@pytest.mark.parametrize("count", [FAST, *more([EACH])])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_cell_of_a_configuration_is_visited(name, count):
    for own, config in configurations(name, count):
        cells = own.target.workload.cells(own.problem, config)
        visited = set().union(*visited_by_case(own, config).values())
        assert cells
        assert sorted(map(str, cells - visited)) == [], f"{own.problem} {config}"


@pytest.mark.parametrize("stages", [7, *more([1, 2, 3, 4, 5, 6, 8, 10, 12])])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda knobs: ",".join(map(str, knobs.values())))
def test_some_block_of_a_product_ends_in_each_buffer(schedule, stages):
    own = gate("gemm:m1000,n768,k3000,fp16")
    start = next(c for c in own.space.starts if c["family"] == "wgmma" and c["consumers"] == 2)
    config = {**start, "split_k": 1, "ping_pong": False, "cluster": "1x1", **schedule, "stages": stages}
    cells = {Cell("steps", f"the last in buffer {buffer}") for buffer in range(stages)}
    by_case = visited_by_case(own, config)
    assert cells - set().union(*by_case.values()) == set()
    for case, found in by_case.items():
        if case.startswith("last step"):
            short = (seen for other, seen in by_case.items() if other not in (case, *LONG_CASES))
            assert cells & found - set().union(*short), f"{case} shows nothing that no other short case does"


@pytest.mark.exhaustive
@pytest.mark.parametrize("workload", ["attention ", "gemm", "rms_norm", "rowwise", "convolution", "conv2d"])
def test_every_case_visits_a_cell_of_some_configuration_that_no_other_does(workload):
    """A case that is taken out of the plan leaves a cell unvisited, so that the test before fails."""
    owned: dict[str, int] = defaultdict(int)
    for name in (name for name in FAMILIES if name.startswith(workload)):
        for own, config in configurations(name, 60):
            by_case = visited_by_case(own, config)
            cells = own.target.workload.cells(own.problem, config)
            for case in by_case:
                others = set().union(*(found for other, found in by_case.items() if other != case))
                owned[case] += bool(cells - others)
    assert owned and min(owned.values()) > 0, {case: count for case, count in owned.items() if not count}


MEASURED = [
    ("b2,h4,s700,d64,fp16,kv2", {"family": "mma"}),
    ("gemm:m1000,n768,k3000,fp16", {"family": "wgmma", "stages": 2}),
    *more(
        [
            ("b3,h6,sq300,sk1000,d128,bf16,causal,kv2", {"family": "wmma", "stages": 1}),
            ("b3,h6,sq300,sk1000,d128,bf16,causal,kv2", {"family": "wmma", "stages": 3}),
            ("b3,h6,sq300,sk1000,d128,bf16,causal,kv2", {"family": "scalar", "stages": 2}),
            ("b3,h6,sq300,sk1000,d128,bf16,causal,kv2", {"family": "wgmma", "max_by": "bits"}),
            ("b8,h64,s250,d64,fp16", {"family": "wgmma", "schedule": "static"}),
            ("b8,h64,s250,d64,fp16", {"family": "wgmma", "cluster": 2, "rescale_above": 8}),
            ("gemm:m1000,n777,k333,bf16,bias", {"family": "mma", "stages": 1}),
            ("rms_norm:rows1000,hidden512,bf16", {"family": "block"}),
            ("convolution:w300,h500,fw5,fh7", {"family": "shared"}),
        ]
    ),
]


@pytest.mark.parametrize(("problem", "wanted"), MEASURED)
def test_what_the_emulator_counts_visits_every_cell_too(kernel_gate, problem, wanted):
    own = kernel_gate(problem)
    config = next(c for c in own.draw(3000, seed=2) if wanted.items() <= c.items())
    executable = build(own.source(config), own.target.gpu.arch)
    plan = gate_plan(own.space, own.target, config)
    verdict = verify(own.target.workload, plan, lambda rounds, seed: run_rounds(executable, rounds, seed, 60), "", 3)
    assert verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()
    assert verdict.coverage.visited == verdict.coverage.cells
    short = [(case, launch) for case, launch in plan if not case.long]
    if len(short) < len(plan):
        found = verify(own.target.workload, short, lambda rounds, seed: run_rounds(executable, rounds, seed, 60), "", 3)
        assert found.coverage is not None and found.coverage.missing


def test_a_step_that_a_warp_loses_is_no_visit(kernel_gate):
    own = kernel_gate("gemm:m1000,n768,k3000,fp16")
    config = next(
        c for c in own.draw(500, seed=2) if c["family"] == "mma" and c["stages"] == 3 and c.get("stream_steps") == 0
    )
    (wraps,) = [(c, launch) for c, launch in gate_plan(own.space, own.target, config) if c.name == "pipeline wraps"]
    visits = ideal_visits(*wraps)
    whole = own.target.workload.visited(*wraps, visits)
    visits["count"][visits["warp"] == 1] -= 1
    fewer = own.target.workload.visited(*wraps, visits)
    assert "steps: the last in buffer 1" in map(str, whole - fewer)
    assert "steps: the last in buffer 0" in map(str, fewer)


def test_a_device_that_keeps_no_count_gives_no_coverage_where_cells_need_one(kernel_gate):
    for problem, known in (("gemm:m1000,n768,k3000,fp16", False), ("convolution:w300,h500,fw5,fh7", True)):
        own = kernel_gate(problem)
        config = own.space.starts[0]
        log = CoverageLog(own.target.workload)
        for case, launch in gate_plan(own.space, own.target, config):
            log.add(case, launch, np.empty(0, VISIT), own.target.workload.tensors().draw(case, 1))
        assert (log.result() is not None) == known


def test_coverage_of_two_plans_is_joined_by_what_both_are_missing():
    cells = frozenset({Cell("rows", "a"), Cell("rows", "b"), Cell("keys", "c")})
    first, second = coverage_of(cells, {Cell("rows", "a")}), coverage_of(cells, {Cell("keys", "c"), Cell("keys", "z")})
    both = joined(first, second)
    assert (first.missing, second.missing) == (("keys: c", "rows: b"), ("rows: a", "rows: b"))
    assert both is not None and both.missing == ("rows: b",)
    assert (both.cells, both.visited) == ({"keys": 1, "rows": 2}, {"keys": 1, "rows": 1})
    assert joined(None, second) is second


@pytest.mark.parametrize("family", ["wmma", *more(["mma", "wgmma"])])
@pytest.mark.parametrize("gpu", ["h100", *more(["rtx2080ti", "a100"])])
def test_machine_code_shows_the_steps_that_the_text_does(family, gpu):
    """Products of matrices count by their size, of which ptxas cuts those of the text into several."""
    own = KernelGate("b1,h2,sq77,sk203,d64,fp16", gpu)
    if family not in own.space.families or family in own.space.empty_families:
        pytest.skip(f"no {family} on {gpu}")
    configs = [c for c in own.draw(500, seed=3) if c["family"] == family]
    for config in [c for c in configs if int(c.get("stages", 1)) == 1][:2] or configs[:2]:
        workload, source, plan = own.target.workload, own.source(config), gate_plan(own.space, own.target, config)
        binary = compile_source(source, own.target.gpu.arch)
        judges = executor(CompiledCandidate(0, source, binary)), emulator(source, own.target.gpu.arch)
        found = [verify(workload, plan, judge.run, judge.device, 3) for judge in judges]
        assert all(verdict.correct for verdict in found)
        visited = [verdict.coverage.visited.get("steps") for verdict in found]
        assert visited[0] == visited[1] == found[0].coverage.cells.get("steps") and visited[0]
