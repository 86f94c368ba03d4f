"""`evoengine measure`: what a search without a GPU left is timed from its stored binaries; the estimates are judged."""

from __future__ import annotations

import functools
import json

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.devices.driver import GpuDevice
from evoengine.errors import MachineError, NothingFound
from evoengine.records import Kind, Measurement, Outcome, Verdict
from evoengine.search.evaluators import GpuEvaluator
from evoengine.stages.render import render
from evoengine.tuning import measure as measuring
from evoengine.tuning import setup
from evoengine.tuning.measure import unmeasured_candidates
from tests.support import faulty_device
from tests.support.numbered_search import GPU, PROBLEM, TARGET

ESTIMATES = [9.0, 1.0, 5.0, 7.0, 3.0]


@pytest.fixture
def estimated(numbered):
    """A ledger with candidates 0…4 estimated, in an order that the device will partly confirm; and one incorrect."""
    return search_without_gpu(numbered)


def search_without_gpu(numbered):
    setting, run = numbered.begin(range(6), lambda n: ("judge", "segv") if n == 2 else None)
    space, ledger = setting.space, numbered.ledger
    for number in range(6):
        config = {"family": "numbered", "number": number}
        source = render(TARGET, space, config, numbered.templates)
        trial = ledger.add_candidate(run, str(PROBLEM), GPU.key, config, (), "random", source)
        ledger.record_binary(trial, source, faulty_device.compile_task(source, GPU.arch))
        wrong = number == 5
        ledger.record_verdict(trial, Verdict("emulator", Outcome.INCORRECT if wrong else None, None, (), 1.0))
        if wrong:
            ledger.finish(trial, Outcome.INCORRECT, "wrong", 0.5, "emulator")
            continue
        ledger.record_measurement(trial, Measurement(Kind.ESTIMATED, "estimate", ESTIMATES[number], 1.0))
        ledger.finish(trial, Outcome.ESTIMATED, None, 0.5, "emulator")
    ledger.finish_run(run, "all trials done")
    return numbered


@pytest.fixture
def measure(estimated, monkeypatch):
    """Calls `evoengine measure` on that ledger with a faulty device of the given name and capability."""

    def call(*arguments, name=faulty_device.DEVICE, capability=90):
        device = GpuDevice(0, name, "GPU-0", capability, 2**34, {"sms": GPU.sms})
        monkeypatch.setattr(setup, "find_driver", lambda: ("13.0", [device]))
        monkeypatch.setattr(setup, "torch_cuda", lambda: "13.0")
        monkeypatch.setattr(measuring, "GpuEvaluator", functools.partial(GpuEvaluator, tasks=faulty_device))
        monkeypatch.setenv("XDG_CACHE_HOME", str(estimated.folder / "cache"))
        command = ["measure", *arguments, "--db", str(estimated.folder / "evo.db")]
        return CliRunner().invoke(evoengine, command, standalone_mode=False)

    return call


def test_the_best_estimates_come_first_and_only_what_is_correct(estimated):
    left = unmeasured_candidates(estimated.ledger, str(PROBLEM), GPU.key)
    assert [c.measurement.tflops for c in left] == sorted(ESTIMATES, reverse=True)


def test_all_are_timed_and_each_has_the_devices_outcome(estimated, measure):
    done = measure("--all", "--json")
    assert done.exception is None
    found = {c.config["number"]: c for c in estimated.candidates()}
    assert [found[n].outcome for n in range(6)] == [
        Outcome.MEASURED, Outcome.MEASURED, Outcome.CRASHED, Outcome.MEASURED, Outcome.MEASURED, Outcome.INCORRECT,
    ]  # fmt: skip
    assert all(found[n].measurement.tflops == 1.0 + n for n in (0, 1, 3, 4))
    assert "SIGSEGV" in found[2].reason
    summary = json.loads(done.stdout)
    assert summary["agreement"]["candidates"] == 4
    assert summary["agreement"]["spearman"] == pytest.approx(-0.4)
    pairs = sorted((p["estimated"], p["measured"]) for p in summary["estimates"])
    assert pairs == [(1.0, 2.0), (3.0, 5.0), (7.0, 4.0), (9.0, 1.0)]
    assert [b["name"] for b in summary["baselines"]] == ["MATH", "FLASH_ATTENTION"]
    assert [c["config"]["number"] for c in summary["best"]] == [0, 1, 3, 4]  # finals turn the order around


def test_top_takes_the_best_estimates_and_the_next_call_goes_on_with_the_rest(estimated, measure):
    assert measure("--top", "2").exception is None
    measured = {c.config["number"] for c in estimated.candidates() if c.outcome is Outcome.MEASURED}
    assert measured == {0, 3}
    assert measure("--all").exception is None
    assert unmeasured_candidates(estimated.ledger, str(PROBLEM), GPU.key) == []
    assert isinstance(measure("--all").exception, NothingFound)


def test_what_was_measured_is_not_timed_again_for_a_later_search(estimated, measure):
    """Number 2 crashed, and another start might bring it through."""
    assert measure("--all").exception is None
    search_without_gpu(estimated)
    left = unmeasured_candidates(estimated.ledger, str(PROBLEM), GPU.key)
    assert [c.config["number"] for c in left] == [2]


def test_no_compiler_is_touched(measure, monkeypatch):
    from evoengine.stages import toolchain

    def missing():
        raise MachineError("no NVRTC here")

    monkeypatch.setattr(toolchain, "nvrtc", missing)
    assert measure("--top", "1").exception is None


def test_another_gpu_of_the_same_architecture_is_named_with_the_one_it_was_compiled_for(measure):
    done = measure("--top", "1", name="NVIDIA H200")
    assert done.exception is None
    assert "compiled for NVIDIA H100 80GB HBM3, timed on NVIDIA H200" in done.stderr


def test_a_binary_for_another_architecture_is_refused_and_nothing_is_written(estimated, measure):
    before = len(estimated.ledger.runs())
    error = measure("--top", "1", name="NVIDIA L4", capability=89).exception
    assert isinstance(error, MachineError)
    assert "sm_90a" in str(error) and "NVIDIA L4 (sm_89)" in str(error)
    assert len(estimated.ledger.runs()) == before


def test_without_a_gpu_it_says_what_the_doctor_says(monkeypatch, estimated):
    reason = "no CUDA driver (libcuda.so.1 is missing)"
    monkeypatch.setattr(setup, "find_driver", lambda: reason)
    command = ["measure", "--db", str(estimated.folder / "evo.db")]
    error = CliRunner().invoke(evoengine, command, standalone_mode=False).exception
    assert isinstance(error, MachineError) and error.exit_code == 3
    assert reason in str(error) and "evoengine doctor" in str(error)
