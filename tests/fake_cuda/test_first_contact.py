"""First contact with a machine that is not quite right, by the real command line on the stand-in driver.

Each fault gives the person a sentence and the remedy, and costs no candidate its place.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest

from evoengine.ledger.store import open_ledger
from evoengine.records import Baseline, RefusedBaseline
from tests.fake_cuda.library import NAME, ROOT, environment
from tests.support.command_server import CommandServer
from tests.support.exhaustive import more
from tests.support.made_once import made_once, shared_folder

SMALL = "b1,h2,s64,d32,fp16"


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory):
    """Calls `evoengine ARGUMENTS…` on the stand-in, with its settings, in a folder."""
    shared = shared_folder(tmp_path_factory) / "stand-in-server"
    shared.mkdir(exist_ok=True)
    server = CommandServer(tmp_path_factory.mktemp("commands"), shared, [SMALL], environment(shared))

    def call(folder, *arguments, **settings):
        return server.call(list(map(str, arguments)), folder, environment(folder, **settings))

    yield call
    server.close()


@pytest.fixture
def evoengine(stand_in, tmp_path):
    return partial(stand_in, tmp_path)


@pytest.fixture(scope="session")
def timed(stand_in, tmp_path_factory):
    """A search on a GPU that others use too, on which one baseline never ends: its folder and finished process."""

    def made(folder):
        times = folder / "times.json"
        times.write_text('{"SDPA MATH": Infinity}')
        options = ("--device", "cuda", "--db", "a.db", "--json")
        return stand_in(folder, *search(*options), processes=2, times=times)

    return made_once(tmp_path_factory, "timed", made)


@pytest.fixture(scope="session")
def gated(stand_in, tmp_path_factory):
    """A search where a GPU is, but torch is a CPU-only build: its folder and finished process."""
    return made_once(tmp_path_factory, "gated", lambda folder: stand_in(folder, *search("--db", "a.db"), torch=""))


def search(*options, trials=1):
    few = ("--family", "scalar", "--trials", trials, "--jobs", 1, "--seed", 3)
    return ("search", "--gpu", "h100", "--problem", SMALL, *few, *options)


def finding(done, name):
    return next(f for f in json.loads(done.stdout)["findings"] if f["name"] == name)


# ── what is right ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_doctor_names_driver_versions_and_power_limit(evoengine):
    done = evoengine("doctor", "--json")
    assert done.returncode == 0
    assert finding(done, "GPU")["what"] == f"{NAME} (sm_90, 80 GiB, power limit 700 W), driver for CUDA 13.0"
    assert "torch 13.0" in finding(done, "CUDA versions")["what"]
    assert "times candidates on the GPU" in evoengine("doctor").stderr


def test_a_search_times_candidates_and_every_figure_says_on_what(timed):
    folder, done = timed
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    assert {c["device"] for c in best} == {NAME}
    assert {c["tflops_kind"] for c in best} == {"measured"} and all(c["vs_baseline"] > 0 for c in best)
    assert f"gated and timed on {NAME}" in done.stderr
    with open_ledger(str(folder / "a.db"), create=False) as ledger:
        [run] = ledger.runs()
        assert (run.device.name, run.device.driver) == (NAME, "CUDA 13.0")
        assert (run.device.versions["power limit"], run.device.versions["MIG"]) == ("700 W", "off")


@pytest.mark.exhaustive  # the same commands one by one are above and in tests/benchmarks/test_gpu_session.py
def test_a_gpu_session_writes_its_results_under_the_stand_ins_name(tmp_path):
    options = ("--no-tests", "--problem", SMALL, "--trials", "1", "--out", str(tmp_path / "out"))
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "out").iterdir()
    assert path.name.startswith("stand-in-driver-without-a-gpu-")
    assert json.loads(path.read_text())["gpu"] == NAME


# ── a driver that is too old ────────────────────────────────────────────────────────────────────────────────────────

RECIPE = (
    "update it to 580 or later, or in a new environment, without constraints.txt: "
    "pip install 'torch==2.9.1' 'evoengine[cuda12]'"
)


@pytest.mark.parametrize("device", ["auto", *more(["cuda"])])
def test_a_driver_for_cuda_12_ends_a_search_before_its_first_candidate(evoengine, tmp_path, device):
    done = evoengine(*search("--device", device, "--db", "a.db"), driver=12040)
    assert done.returncode == 3
    assert "the GPU's driver is for CUDA 12.4 and cannot run NVRTC of CUDA 13." in done.stderr
    assert RECIPE in done.stderr and "--device emulator" in done.stderr
    assert not (tmp_path / "a.db").exists()


def test_doctor_says_so_too(evoengine):
    done = evoengine("doctor", "--json", driver=12040)
    assert done.returncode == 3
    found = finding(done, "CUDA versions")
    assert not found["here"] and RECIPE in found["remedy"]


def test_binaries_made_for_a_later_cuda_are_not_spent_on_an_old_driver(evoengine, gated):
    db = gated[0] / "a.db"
    before = outcomes(db)
    done = evoengine("measure", "--db", db, driver=12040, torch="12.8")
    assert done.returncode == 3 and "cannot run a binary by nvrtc 13." in done.stderr
    assert outcomes(db) == before and "uncompilable" not in before


def test_a_driver_for_cuda_11_is_told_to_be_updated(evoengine):
    done = evoengine("doctor", "--json", driver=11080)
    assert finding(done, "CUDA versions")["remedy"] == "update it to 580 or later"


# ── torch without CUDA ──────────────────────────────────────────────────────────────────────────────────────────────


def test_auto_falls_back_to_the_emulator_with_a_line_where_torch_is_cpu_only(gated):
    folder, done = gated
    assert done.returncode == 0
    assert f"{NAME} is here, but torch is a CPU-only build: PIP_CONFIG_FILE=/dev/null pip install" in done.stderr
    assert outcomes(folder / "a.db") == ["estimated"]


def test_cuda_is_exit_3_with_the_command_where_torch_is_cpu_only(evoengine):
    done = evoengine(*search("--device", "cuda", "--db", "a.db"), torch="")
    assert done.returncode == 3
    assert "--device cuda" in done.stderr and "pip install --force-reinstall" in done.stderr
    assert "gates on the CPU" in evoengine("doctor", torch="").stderr


# ── MIG, other processes, faults in the middle ──────────────────────────────────────────────────────────────────────


def test_a_mig_instance_is_named_as_such(evoengine):
    assert "MIG 1g.10gb" in finding(evoengine("doctor", "--json", mig=1), "GPU")["what"]


@pytest.mark.exhaustive
def test_a_mig_instance_is_timed_by_its_own_uuid(evoengine, tmp_path):
    done = evoengine(*search("--device", "cuda", "--db", "a.db"), mig=1)
    assert done.returncode == 0, done.stderr
    with open_ledger(str(tmp_path / "a.db"), create=False) as ledger:
        [run] = ledger.runs()
        assert run.device.uuid.startswith("MIG-ff") and run.device.versions["MIG"] == "on"
        assert ledger.best(run.problem, "h100", top=1)[0].measurement.terms["sm_mhz"] == 1980.0


def test_other_processes_on_the_gpu_are_named(timed):
    _, done = timed
    assert f"other processes use {NAME} (4000000, 4000001)" in done.stderr
    assert done.returncode == 0


def test_memory_that_others_hold_ends_a_search_with_the_bytes(evoengine, tmp_path):
    done = evoengine(*search("--device", "cuda", "--db", "a.db"), others_bytes=80 << 30)
    assert done.returncode == 3
    assert "bytes of GPU memory" in done.stderr and "are free" in done.stderr
    assert "uncompilable" not in outcomes(tmp_path / "a.db")


@pytest.mark.exhaustive  # tests/devices/test_cuda.py shows it of the runner
def test_an_error_in_one_kernel_costs_that_candidate_alone(evoengine, tmp_path):
    done = evoengine(*search("--device", "cuda", "--db", "a.db", trials=3), break_="45:700")
    assert done.returncode == 0, done.stderr
    found = outcomes(tmp_path / "a.db")
    assert found.count("measured") >= 1 and set(found) <= {"measured", "crashed"} and "crashed" in found


def test_a_baseline_that_never_ends_is_left_out(timed):
    folder, done = timed
    assert done.returncode == 0, done.stderr
    with open_ledger(str(folder / "a.db"), create=False) as ledger:
        found = ledger.baselines(1)
    assert [b.name for b in found if isinstance(b, Baseline)] == ["FLASH_ATTENTION"]
    why = {b.name: b.reason for b in found if isinstance(b, RefusedBaseline)}
    assert "no end after" in why["MATH"] and "EFFICIENT_ATTENTION" in why
    assert outcomes(folder / "a.db") == ["measured"]


def outcomes(db):
    with open_ledger(str(db), create=False) as ledger:
        return sorted(str(c.outcome) for c in ledger.candidates() if c.outcome)
