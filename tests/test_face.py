"""What `import evoengine` gives: these names and no others, and each does what it says on a small problem."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import evoengine
from evoengine.tuning.report import write_report
from evoengine.tuning.search import SearchOptions
from tests.support.ledger_examples import a_figure, add_ranked, start_run
from tests.support.scale_workload import PROBLEM, registered, searched

NAMES = ["EvoengineError", "Ledger", "Workload", "best", "export", "open_ledger", "register", "tune", "verify"]
CONFIG = {"family": "scale", "threads_x": 32, "per_thread": 1}


@pytest.fixture
def scale(tmp_path):
    with registered(tmp_path / "own") as workload:
        yield workload


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> str:
    return str(searched(tmp_path_factory)[0])


def test_exported_names_are_these():
    assert evoengine.__all__ == NAMES
    assert dir(evoengine) == sorted([*NAMES, "__version__"])
    for name in NAMES:
        assert getattr(evoengine, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'tuna'"):
        _ = evoengine.tuna


def test_importing_it_imports_no_tensor_library():
    code = "import sys, evoengine; print(sorted({'torch', 'cupy', 'optuna', 'sqlalchemy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_tune_returns_the_best_first_and_fills_the_ledger(tmp_path_factory, db):
    _, result = searched(tmp_path_factory)
    times = [c.measurement.median_us for c in result.best]
    assert len(times) == 2 and times == sorted(times)
    with evoengine.open_ledger(db, create=False) as ledger:
        assert isinstance(ledger, evoengine.Ledger)
        assert {c.trial for c in ledger.candidates(problem=PROBLEM)} == {c.trial for c in result.best}


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"trails": 3}, "tune has no parameter trails; it takes problem, gpu, gpu_file, kernel"),
        ({"objective": "watts"}, "names 'watts'; known objectives are"),
        ({"problem": "gemm:m1"}, "gemm:m1"),
        ({"gpu": "h1000"}, "h1000"),
    ],
)
def test_tune_refuses_what_cannot_be_meant(options, complaint):
    with pytest.raises(evoengine.EvoengineError) as error:
        evoengine.tune(**options)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_best_gives_the_candidates_of_the_last_run(tmp_path_factory, db):
    _, result = searched(tmp_path_factory)
    found = evoengine.best(db=db, top=1)
    assert (found.problem, found.gpu) == (PROBLEM, "h100")
    assert [c.trial for c in found.candidates] == [result.best[0].trial]


def test_best_of_a_ledger_that_is_not_there_says_so(tmp_path):
    with pytest.raises(evoengine.EvoengineError, match="no ledger at"):
        evoengine.best(db=str(tmp_path / "none.db"))


def test_verify_says_whether_a_configuration_is_correct(scale):
    found = evoengine.verify(CONFIG, PROBLEM, device="emulator", seed=7)
    assert found.correct and len(found.candidate.verdict.cases) == 4
    with pytest.raises(evoengine.EvoengineError, match="threads_x must be one of 32, 64, 128"):
        evoengine.verify({**CONFIG, "threads_x": 33}, PROBLEM, device="emulator")


def test_a_trial_of_before_a_knob_was_added_is_verified_with_the_knobs_default():
    config = {"family": "mma", "tile_m": 64, "tile_n": 64, "tile_k": 32, "warps": 4, "warps_n": 2, "stages": 1}
    config |= {"layout": "pad", "raster": "groups", "group_m": 1, "min_blocks": 1}  # as before split_k was a knob
    found = evoengine.verify(config, "gemm:m64,n64,k32,fp16", gpu="l4", device="emulator", seed=7)
    assert found.correct and [found.candidate.config[name] for name in ("split_k", "stream_steps")] == [1, 0]
    with pytest.raises(evoengine.EvoengineError, match="tile_n is missing"):
        evoengine.verify({name: config[name] for name in config if name != "tile_n"}, "gemm:m64,n64,k32,fp16", gpu="l4")


def test_export_writes_a_folder_that_stands_alone(scale, db, tmp_path):
    written = evoengine.export(tmp_path / "out", PROBLEM, "h100", db=db)
    assert all(path.is_file() for path in written)
    assert (tmp_path / "out" / "kernel.cubin").read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampler": "luck"}, "unknown sampler 'luck'"),
        ({"device": "tpu"}, "'tpu' is not one of auto, emulator, cuda"),
        ({"trials": 0}, "--trials is 0; it must be at least 1"),
        ({"seed": -1}, "--seed is -1; it must be from 0 to 4294967295"),
        ({"seed": 1 << 32}, "--seed is 4294967296; it must be from 0"),
        ({"problem": ""}, "the problem is empty"),
        ({"jobs": 0}, "--jobs is 0; it must be at least 1"),
        ({"minutes": float("nan")}, "--minutes is nan; it must be above 0"),
        ({"minutes": float("inf")}, "--minutes is inf; it must be above 0, or left out for no limit"),
        ({"kernel": "nowhere"}, "nowhere"),
        ({"trials": "3"}, "trials is '3', of type str; it takes a whole number or None"),
        ({"trials": 2.5}, "trials is 2.5, of type float; it takes a whole number"),
        ({"trials": True}, "trials is True, of type bool"),
        ({"problem": 7}, "problem is 7, of type int; it takes a string or None"),
        ({"families": "mma"}, "families is 'mma', of type str; it takes a sequence of strings"),
        ({"db": 3}, "db is 3, of type int; it takes a string or None"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_sentence(options, says):
    with pytest.raises(evoengine.EvoengineError, match=says):
        evoengine.tune(**options)


def test_verify_refuses_a_seed_before_it_judges(scale):
    with pytest.raises(evoengine.EvoengineError, match="--seed is -1"):
        evoengine.verify(CONFIG, "scale:n64", seed=-1)


def test_tune_takes_each_option_of_a_search_by_name_and_type():
    """As editors show them; a search's own defaults."""
    taken = dict(inspect.signature(evoengine.tune).parameters)
    options = {field.name: field.default for field in dataclasses.fields(SearchOptions)}
    assert {name: p.default for name, p in taken.items() if name not in ("echo", "unknown")} == options
    assert not any(p.annotation in (inspect.Parameter.empty, "Any") for p in taken.values())


def test_a_path_may_be_text_and_a_ledger_a_path(tmp_path_factory, db, scale):
    assert evoengine.best(db=Path(db)).candidates == evoengine.best(db=db).candidates
    trial = evoengine.best(db=db).candidates[0]
    found = evoengine.verify(trial.trial, db=Path(db), device="emulator")
    assert found.correct and found.candidate.config == trial.config
    with pytest.raises(evoengine.EvoengineError, match="db is 3, of type int; it takes a string or a path or None"):
        evoengine.best(db=3)


def test_a_problem_is_found_by_any_of_its_forms(tmp_path):
    """The ledger has it with its workload's name and all of its parts; the command line takes less."""
    with evoengine.open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        add_ranked(ledger, start_run(ledger), a_figure(10.0))
        ledger_problem = ledger.runs()[0].problem
    short = ledger_problem.removeprefix("attention:")
    assert short != ledger_problem
    found = evoengine.best(short, db=tmp_path / "evo.db")
    assert found == evoengine.best(ledger_problem, db=tmp_path / "evo.db")
    assert write_report(tmp_path / "report.html", short, db=str(tmp_path / "evo.db")).problem == ledger_problem


def test_results_fit_a_screen(scale, tmp_path_factory, db):
    _, result = searched(tmp_path_factory)
    found = evoengine.best(db=db)
    verified = evoengine.verify(CONFIG, PROBLEM, device="emulator", seed=7)
    assert repr(verified).startswith("Verified(correct, estimated ") and f"seed 7: {PROBLEM} on " in repr(verified)
    for shown in (result, found, found.candidates[0], verified):
        assert len(repr(shown).splitlines()) < 24 and max(map(len, repr(shown).splitlines())) < 240
    assert f"trial {found.candidates[0].trial} of run" in repr(found)


PROGRAM = "import evoengine\nprint(evoengine.tune({problem!r}, gpu='h100', trials=1, db={db!r}))"


@pytest.mark.exhaustive
def test_a_program_on_standard_input_searches(tmp_path):
    program = PROGRAM.format(problem="gemm:m64,n64,k64,fp16", db=str(tmp_path / "a.db"))
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, "SearchResult(run 1" in done.stdout) == (0, True), done.stderr


@pytest.mark.exhaustive
def test_a_program_without_a_guard_is_told_so(tmp_path):
    (tmp_path / "p.py").write_text(PROGRAM.format(problem="gemm:m64,n64,k64,fp16", db=str(tmp_path / "a.db")))
    done = subprocess.run([sys.executable, tmp_path / "p.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.endswith('put the call below `if __name__ == "__main__":`\n'), (
        done.stderr
    )
