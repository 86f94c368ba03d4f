"""What verify's --config takes, and what best --export writes when a trial is named."""

from __future__ import annotations

import io
import json

import pytest

from evoengine.cli.verify import MOST_BYTES, Given, read_config
from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from evoengine.tuning.exporting import export_trial
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, a_figure, add_ranked, start_run

TEXT = json.dumps(CONFIG)


@pytest.fixture
def db(tmp_path) -> str:
    """Trial 1 is incorrect, 2 suspect, 3 unfinished."""
    file = str(tmp_path / "evo.db")
    with open_ledger(file, create=True) as ledger:
        run = start_run(ledger)
        wrong = add_ranked(ledger, run, a_figure(40.0))
        ledger.finish(wrong, Outcome.INCORRECT, "off by 1", None, "emulator")
        add_ranked(ledger, run, a_figure(40.0, suspect="above the roofline"))
        ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), "start")
    return file


def test_json_a_file_standard_input_and_a_trial_give_the_same_knobs(db, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(TEXT)
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    for text in (TEXT, str(tmp_path / "config.json"), "-"):
        assert read_config(text, db) == Given(CONFIG)
    assert read_config("1", db) == Given(CONFIG, PROBLEM, GPU)


def test_of_what_show_and_kernel_json_have_the_config_is_taken(tmp_path):
    (tmp_path / "kernel.json").write_text(json.dumps({"kernel": "attention", "config": CONFIG}))
    assert read_config(str(tmp_path / "kernel.json"), None).config == CONFIG


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object of knobs and values, not list"),
        ("none.json", "neither JSON nor a trial's number, and cannot be read as a file: No such file"),
        (".", "cannot be read as a file: Is a directory"),
        ("a\0b", "cannot be read as a file"),
        ('{"tile_m": [64]}', r"gives tile_m \[64\]; a knob is a number, text, true or false"),
        ('{"tile_m": null}', "gives tile_m null"),
        ('{"tile_m": NaN}', "gives tile_m NaN"),
        ('{"tile_m": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ("77", "there is no trial 77"),
        ("9" * 400, "there is no trial 9"),
    ],
)
def test_what_is_no_configuration_is_refused_with_a_sentence(db, text, said):
    with pytest.raises(UsageError, match=said):
        read_config(text, db)


def test_no_file_however_large_is_read_whole(monkeypatch):
    class Endless(io.StringIO):
        def read(self, size=-1):
            assert 0 < size <= MOST_BYTES + 1
            return " " * size

    monkeypatch.setattr("sys.stdin", Endless())
    with pytest.raises(UsageError, match="exceeds 1048576 characters"):
        read_config("-", None)


@pytest.mark.parametrize(
    ("trial", "ended"), [(1, "incorrect: off by 1"), (2, "suspect: above the roofline"), (3, "pending")]
)
def test_a_trial_that_is_not_correct_is_not_exported_and_its_end_is_named(db, tmp_path, trial, ended):
    with pytest.raises(NothingFound, match=f"trial {trial} is not exported: .* its outcome is {ended}"):
        export_trial(tmp_path / "out", trial, db=db)
    assert not (tmp_path / "out").exists()


def test_a_trial_that_is_slower_than_the_best_is_exported(evoengine, searched, tmp_path):
    db = searched[0] / "evo.db"
    ranked = json.loads(evoengine("best", "--json", "--top", 2, "--db", db).stdout)["trials"]
    done = evoengine("best", "--trial", ranked[1]["trial"], "--export", tmp_path / "out", "--db", db)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out" / "kernel.json").read_text())
    assert written["provenance"]["trial"] == ranked[1]["trial"] and written["config"] == ranked[1]["config"]


@pytest.mark.parametrize("others", [[], ["--export", "out", "--pareto"], ["--export", "out", "--top", 3]])
def test_a_trial_goes_with_export_alone(evoengine, others):
    done = evoengine("best", "--trial", 1, *others)
    assert done.returncode == 2 and "--trial 1 takes only --export" in done.stderr


@pytest.mark.exhaustive
def test_a_trials_verdict_is_repeated_on_its_own_problem(evoengine, searched):
    done = evoengine("verify", "--config", 1, "--json", "--db", searched[0] / "evo.db")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with open_ledger(str(searched[0] / "evo.db"), create=False) as ledger:
        assert (found["problem"], found["config"]) == (ledger.candidate(1).problem, ledger.candidate(1).config)
