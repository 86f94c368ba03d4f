"""A candidate of a template may be several kernels with scratch memory: judged, predicted and exported as one."""

from __future__ import annotations

import json

import pytest

import evoengine
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import CompiledCandidate, Outcome, Source
from evoengine.space.space import load_space
from evoengine.stages.compile import compile_source
from evoengine.stages.predict import predict_binary
from evoengine.stages.render import render
from evoengine.workloads.base import Target
from tests.support.made_once import made_once
from tests.support.split_workload import KERNEL, PROBLEM, registered

CONFIG = {"family": "split", "splits": 4}


def searched(factory):
    """A ledger with one search of all three configurations."""

    def search(folder):
        with registered(folder / "own"):
            return evoengine.tune(
                PROBLEM, gpu="h100", trials=3, device="emulator", seed=1, jobs=1, db=str(folder / "l.db")
            )

    folder, result = made_once(factory, "split", search)
    return folder / "l.db", result


def test_a_search_ranks_its_candidates(tmp_path_factory):
    _, result = searched(tmp_path_factory)
    assert {c.config["splits"] for c in result.best} == {2, 4, 8}
    assert {(c.outcome, c.correct, len(c.source.launch.then)) for c in result.best} == {(Outcome.ESTIMATED, True, 1)}


def test_the_prediction_is_the_sum_over_the_kernels_with_the_cost_of_each_launch(tmp_path):
    with registered(tmp_path / "own") as workload:
        target = Target(workload, workload.parse(PROBLEM), find_gpu("h100"))
        space = load_space(workload.space_file(), target.problem, target.gpu)
        source = render(target, space, CONFIG, asset("templates"))
        binary = compile_source(source, target.gpu.arch)

        def predicted(entry, launch):
            alone = Source(source.text, entry, launch)
            return predict_binary(target, CompiledCandidate(0, alone, binary, CONFIG)).time_us

        both = predicted(source.entry, source.launch)
        first, second = (predicted(entry, launch) for entry, launch in source.launch.kernels(source.entry))
    assert both == pytest.approx(first + second)
    assert min(first, second) > 2.5, "each kernel has its launch"


def test_the_export_launches_both_over_the_same_scratch_memory(tmp_path_factory, tmp_path):
    db, result = searched(tmp_path_factory)
    with registered(tmp_path / "own"):
        evoengine.export(tmp_path / "out", db=str(db))
    described = json.loads((tmp_path / "out" / "kernel.json").read_text())
    best = result.best[0].config["splits"]
    assert described["launch"]["parameters"] == ["x", "partial"]
    assert [(k["entry"], k["grid"], k["parameters"]) for k in described["launch"]["then"]] == [
        ("combine", [8, 1, 1], ["y", "partial", "rows"])
    ]
    scratch = [p for p in described["parameters"] if "scratch" in p]
    assert [(p["name"], p["scratch"], p["zeroed"]) for p in scratch] == [("partial", 4 * 512 * best, False)]


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        pytest.param("OWN + i]", "OWN + i / 2]", Outcome.INCORRECT, id="wrong in the first"),
        pytest.param("i < SPLITS", "i < SPLITS - 1", Outcome.INCORRECT, id="a part left out by the second"),
        pytest.param("if (threadIdx.x == 0) partial", "if (blockIdx.y && !threadIdx.x) partial", Outcome.INCORRECT, id="scratch read unwritten"),
        pytest.param("row * SPLITS + i", "(row + 1) * SPLITS + i", Outcome.CRASHED, id="read behind the scratch"),
        pytest.param("__syncthreads();", "", Outcome.CRASHED, id="a race in the first"),
    ],
)  # fmt: skip
def test_a_fault_in_either_kernel_is_caught(tmp_path, old, new, outcome):
    assert old in KERNEL
    with registered(tmp_path / "own", KERNEL.replace(old, new)):
        found = evoengine.verify(CONFIG, PROBLEM, device="emulator", seed=1)
    assert (found.correct, found.candidate.outcome) == (False, outcome), found.candidate.reason
