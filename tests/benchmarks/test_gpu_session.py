"""The GPU session: what it writes, and what it does on a machine that has no GPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from benchmarks import gpu as session
from evoengine.devices.driver import GpuDevice, find_driver
from evoengine.ledger.store import open_ledger
from evoengine.records import Baseline, Kind
from evoengine.views import jsonable
from evoengine.views.trials import trial_json
from tests.support.exhaustive import more
from tests.support.ledger_examples import PROBLEM, a_figure, add_ranked, start_run

SCRIPT = session.ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A ledger that `--prepare` filled on this machine, run as a script from another folder."""
    folder = tmp_path_factory.mktemp("prepared")
    arguments = ["--prepare", "p.db", "--gpu", "h100", "--problem", "b1,h2,s128,d32,fp16", "--trials", "2"]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "p.db"


@pytest.mark.exhaustive
def test_prepare_leaves_binaries_of_the_sweep_and_of_the_search_for_the_gpu_that_was_named(prepared):
    with open_ledger(str(prepared), create=False) as ledger:
        found = [ledger.candidate(c.trial, with_cubin=True) for c in ledger.candidates()]
    swept = [c.config for c in found if c.run == 1]
    assert [c.run for c in found] == [1, 1, 2, 2]
    assert swept[0] != swept[1] and swept[0] == {**swept[1], "exp2_on_fma": swept[0]["exp2_on_fma"]}
    assert all(c.binary.arch == "sm_90a" and c.binary.cubin[:4] == b"\x7fELF" and c.verdict.correct for c in found)


@pytest.mark.skipif(not isinstance(find_driver(), str), reason="this machine has a GPU")
@pytest.mark.parametrize("arguments", [[], *more([["--from", "p.db"]])])
def test_without_a_gpu_it_is_exit_3_with_the_reason_and_writes_nothing(tmp_path, arguments):
    out = tmp_path / "results"
    command = [sys.executable, SCRIPT, *arguments, "--out", out]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3
    assert "no GPU to time on: no CUDA driver" in done.stderr and "--prepare" in done.stderr
    assert list(tmp_path.iterdir()) == []


DEVICE = GpuDevice(0, "NVIDIA H200", "GPU-a", 90, 2**37)


@pytest.fixture
def measured(tmp_path):
    """A ledger as `evoengine measure` leaves it, and what that printed."""
    db = tmp_path / "gpu.db"
    with open_ledger(str(db), create=True) as ledger:
        run = start_run(ledger)
        for tflops, family in ((95.0, "wmma"), (90.0, "wmma"), (12.0, "scalar")):
            config = {"family": family, "tile_m": 64, "n": int(tflops)}
            add_ranked(ledger, run, a_figure(tflops, Kind.MEASURED), config, f"kernel{tflops}")
        ledger.record_baseline(run, Baseline("FLASH_ATTENTION", "NVIDIA H200", 833.0, 330.0, (833.0,) * 12))
        best = [jsonable(trial_json(c)) for c in ledger.best(PROBLEM, "h100", top=3)]
    return db, {"run": run, "best": best, "seconds": 9.0}


@pytest.fixture
def results(measured):
    db, printed = measured
    of = session.gather(PROBLEM.removeprefix("attention:"), printed, db)
    return {**session.about(DEVICE, "13.0"), "tests": None, "problems": [of, {**of, "problem": "another"}]}


def test_problems_share_the_minutes_and_one_that_fails_loses_none_of_the_others(measured, monkeypatch, tmp_path):
    db, printed = measured
    given = []

    def run_for(command, seconds):
        given.append((command[command.index("--problem") + 1], seconds))
        return (3, None) if len(given) == 1 else (0, printed)

    monkeypatch.setattr(session, "find_driver", lambda: ("13.0", [DEVICE]))
    monkeypatch.setattr(session, "run_for", run_for)
    problems = ["b1,h2,s64,d64,fp16", PROBLEM.removeprefix("attention:")]
    arguments = ["--from", str(db), "--problem", *problems, "--no-tests", "--minutes", "10"]
    arguments += ["--out", str(tmp_path / "out")]
    assert session.main(arguments) == 1
    assert [problem for problem, _ in given] == problems
    assert [seconds for _, seconds in given] == [pytest.approx(300, abs=5), pytest.approx(600, abs=5)]
    [path] = (tmp_path / "out").iterdir()
    assert [of["problem"] for of in json.loads(path.read_text())["problems"]] == [PROBLEM]


def test_results_name_the_gpu_and_the_date_and_keep_what_was_observed(results, tmp_path):
    path = session.file_for(results, tmp_path / "out")
    session.write(results, path)
    written = json.loads(path.read_text())
    assert path.name == f"nvidia-h200-{written['date']}.json"
    assert (written["gpu"], written["driver"]) == ("NVIDIA H200", "CUDA 13.0")
    first, second = written["problems"]
    assert (first["problem"], second["problem"]) == (PROBLEM, "another")
    assert first["best"][0]["terms"] == {"memory_us": 12.5}
    assert first["baselines"] == [{"name": "FLASH_ATTENTION", "tflops": 330.0, "median_us": 833.0, "samples": 12}]
    assert first["session"] == {"run": 1, "seconds": 9.0}


def test_results_of_the_same_day_do_not_overwrite_one_another(results, tmp_path):
    """Nor where one of them was taken away."""
    paths = []
    for _ in range(3):
        paths.append(session.file_for(results, tmp_path))
        session.write(results, paths[-1])
    day = results["date"]
    assert [p.name for p in paths] == [f"nvidia-h200-{day}{n}.json" for n in ("", "-2", "-3")]
    paths[1].unlink()
    assert session.file_for(results, tmp_path) == paths[1]


def test_what_was_measured_of_a_problem_is_kept_when_the_session_is_killed_in_the_next(measured, monkeypatch, tmp_path):
    db, printed = measured
    begun = []

    def run_for(command, seconds):
        begun.append(command)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return 0, printed

    monkeypatch.setattr(session, "find_driver", lambda: ("13.0", [DEVICE]))
    monkeypatch.setattr(session, "run_for", run_for)
    own = PROBLEM.removeprefix("attention:")
    with pytest.raises(KeyboardInterrupt):
        session.main(["--from", str(db), "--problem", own, own, "--no-tests", "--out", str(tmp_path / "out")])
    [path] = (tmp_path / "out").iterdir()
    assert [of["problem"] for of in json.loads(path.read_text())["problems"]] == [PROBLEM]


def test_each_table_has_every_backend_and_the_best_of_each_family_fastest_first(results):
    lines = session.tables(results).splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert rows == 2 * ["kernel", "SDPA flash_attention", "evoengine wmma (trial 1)", "evoengine scalar (trial 3)"]
    assert [line.split(" on ")[0] for line in lines if " on NVIDIA H200" in line] == [PROBLEM, "another"]


LOG = """
tests/devices/test_cuda.py::test_good[wgmma, Q in registers] PASSED      [ 10%]
tests/devices/test_cuda.py::test_bad FAILED                              [ 20%]
tests/test_gpu.py::test_broken ERROR                                     [ 30%]
tests/test_gpu.py::test_left SKIPPED (needs two GPUs)                    [ 40%]
tests/test_gpu.py::test_under_way """


def test_a_log_of_the_tests_names_what_failed():
    found = session.read_log(LOG, 1.0)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["names"] == ["tests/devices/test_cuda.py::test_bad", "tests/test_gpu.py::test_broken"]


def with_pytest(monkeypatch, code):
    start = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **how: start([sys.executable, "-u", "-c", code], **how))


def test_tests_that_do_not_even_start_are_a_failure_and_not_the_end_of_the_session(monkeypatch, tmp_path):
    with_pytest(monkeypatch, "raise SystemExit(4)")
    found = session.run_tests(tmp_path / "out" / "tests.log")
    assert (found["failed"], found["names"]) == (1, ["pytest did not start"])


def test_when_time_is_up_the_tests_that_ended_are_kept(monkeypatch, tmp_path):
    with_pytest(monkeypatch, f"import time; print({LOG!r}); time.sleep(60)")
    monkeypatch.setattr(session, "TEST_SECONDS", 2.0)
    found = session.run_tests(tmp_path / "tests.log")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 3, 1)
    assert found["names"][-1] == "time was up after 2 s"
    assert (tmp_path / "tests.log").read_text().startswith(LOG)


ENDLESS = """
import json, signal, sys
signal.sigwait([signal.SIGINT])
print(json.dumps({"run": 1}))
sys.exit(130)
"""


def test_when_time_is_up_the_session_ends_it_as_ctrl_c_does_and_keeps_what_there_is():
    # blocked from its beginning, the signal waits until the process is up to take it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        assert session.run_for([sys.executable, "-c", ENDLESS], 1.0) == (130, {"run": 1})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert session.run_for([sys.executable, "-c", "import sys; sys.exit(3)"], 30) == (3, None)


def test_the_session_fits_its_minutes():
    """With half a minute of search for each problem, the least there is."""
    least = session.SWEEP_SECONDS + len(session.PROBLEMS) * (session.RESERVE_SECONDS + 30)
    assert least < 60 * session.MINUTES
    options = session.parse([])
    command = session.searching(options, options.problem[0], "x.db", 200.0)
    assert float(command[command.index("--minutes") + 1]) == pytest.approx(200 / 60)
