"""Recorded spaces, T4 files and several objectives through the real command line."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace

import optuna
import pytest

from evoengine.ledger.store import open_ledger
from evoengine.ledger.transfer import IMPORTED
from evoengine.records import Kind
from tests.cli.conftest import SMALL
from tests.support.exhaustive import more
from tests.support.ledger_examples import a_figure, add_ranked, start_run
from tests.support.recorded import cache


@pytest.fixture(scope="module")
def replayed(evoengine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replayed")
    file, db = cache(folder / "test.json"), folder / "evo.db"
    done = evoengine("search", "--device", f"recorded:{file}", "--trials", 99, "--seed", 1, "--db", db, "--json")
    assert done.returncode == 0, done.stderr
    assert "24/99 · 22 recorded · 2 uncompilable" in done.stderr  # and not correct: nobody gated it here
    return db, json.loads(done.stdout)


def test_a_recorded_space_is_searched_to_its_end(replayed):
    _, summary = replayed
    assert summary["ended"] == "every valid configuration was tried"
    assert summary["outcomes"] == {"recorded": 22, "uncompilable": 2}
    best = summary["best"][0]
    assert (best["config"], best["median_us"]) == ({"block": 128, "tile": 4, "padding": 0}, 1000.0)
    assert (best["tflops"], best["tflops_kind"]) == (None, "recorded")


@pytest.mark.parametrize("command", [["best"], ["history"], ["report"], ["show", "1", "--lineage"]])
def test_a_time_stands_under_its_unit_and_not_under_tflops(replayed, evoengine, command):
    shown = evoengine(*command, "--db", replayed[0]).stdout
    assert " rec." in shown and "µs" in shown and "TFLOPS" not in shown


@pytest.mark.parametrize("command", ["best", *more(["history", "report"])])
def test_a_recorded_problem_is_named_as_the_ledger_names_it(replayed, evoengine, command):
    named = evoengine(command, "--problem", "recorded:test", "--json", "--db", replayed[0])
    assert named.returncode == 0, named.stderr
    assert named.stdout == evoengine(command, "--json", "--db", replayed[0]).stdout
    assert evoengine(command, "--problem", "recorded:other", "--db", replayed[0]).returncode == 1


def test_its_ledger_and_study_are_like_any_others(replayed, evoengine):
    db, _ = replayed
    assert json.loads(evoengine("best", "--json", "--db", db).stdout)["config"]["block"] == 128
    with sqlite3.connect(db) as connection:
        assert connection.execute("SELECT count(*) FROM candidates WHERE outcome = 'recorded'").fetchone() == (22,)
    study = study_of(db)
    assert study.study_name.endswith("· recorded runs per second")  # nobody counted the operations
    assert (study.metric_names, study.best_value) == (["runs per second (recorded)"], pytest.approx(1000.0))


def test_the_default_sampler_names_parents_and_the_report_tells_what_paid(evoengine, tmp_path):
    file, db = cache(tmp_path / "test.json"), tmp_path / "evo.db"
    evoengine("search", "--device", f"recorded:{file}", "--trials", 20, "--seed", 1, "--db", db)
    told = json.loads(evoengine("report", "--json", "--db", db).stdout)
    assert told["lineage"][0]["parent"] is None
    assert told["effects"], "no trial was derived from another"
    best = json.loads(evoengine("best", "--json", "--db", db).stdout)["trial"]
    path = json.loads(evoengine("show", best, "--lineage", "--json", "--db", db).stdout)
    assert path["lineage"] == told["lineage"]


def test_a_recorded_search_ends_when_its_time_is_up_and_names_no_kernel_to_export(evoengine, tmp_path):
    arguments = ("--device", f"recorded:{cache(tmp_path / 'test.json')}", "--db", tmp_path / "evo.db")
    done = evoengine("search", *arguments, "--minutes", 1e-9)
    assert (done.returncode, "time is up" in done.stderr) == (1, True)
    assert "--export" not in evoengine("search", *arguments, "--trials", 2).stderr


def test_a_recorded_search_says_that_it_has_times_alone(evoengine, tmp_path):
    file, db = cache(tmp_path / "test.json"), tmp_path / "evo.db"
    done = evoengine("search", "--device", f"recorded:{file}", "--objective", "tflops,registers", "--db", db)
    assert (done.returncode, "has only times" in done.stderr, db.exists()) == (2, True, False)


@pytest.mark.parametrize(("name", "said"), [("bad.json", "is not a recorded space"), ("gone.json", "cannot read")])
def test_a_file_that_records_nothing_is_refused(evoengine, tmp_path, name, said):
    (tmp_path / "bad.json").write_text("{}")
    file = tmp_path / name
    for command in (["search", "--device", f"recorded:{file}"], ["import", file]):
        done = evoengine(*command, "--db", tmp_path / "evo.db")
        assert done.returncode == 2
        assert said in done.stderr and "Traceback" not in done.stderr
        assert not (tmp_path / "evo.db").exists()


def test_another_tuners_file_comes_into_the_ledger_whole(evoengine, tmp_path):
    file, db = cache(tmp_path / "test.json"), tmp_path / "evo.db"
    assert evoengine("import", file, "--db", db).returncode == 0
    found = json.loads(evoengine("history", "--json", "--db", db).stdout)["trials"]
    assert len(found) == 24
    assert {c["outcome"] for c in found} == {"recorded", "uncompilable"}
    assert "None" not in evoengine("report", "--db", db).stdout


def test_a_run_goes_out_as_t4_and_comes_back_the_same_but_for_its_origin(evoengine, searched, tmp_path):
    """And but for its machine code, which is compiled again for the export."""
    db, file, other = searched[0] / "evo.db", tmp_path / "run.json", tmp_path / "other.db"
    assert evoengine("export", file, "--format", "t4", "--db", db).returncode == 0
    assert json.loads(file.read_text())["schema_version"] == "1.1.0"
    assert evoengine("import", file, "--db", other).returncode == 0
    assert evoengine("export", tmp_path / "again.json", "--db", other).returncode == 0
    assert json.loads((tmp_path / "again.json").read_text().replace(IMPORTED, "")) == json.loads(file.read_text())
    there, back = (json.loads(evoengine("history", "--json", "--db", d).stdout)["trials"] for d in (db, other))
    assert {c.pop("imported_from") for c in back} == {"run.json"} != {c.pop("imported_from") for c in there} == {None}
    assert back == there
    for name in ("space_text", "sampler", "seed", "objectives"):
        column = [sqlite3.connect(d).execute(f"SELECT {name} FROM runs").fetchall() for d in (db, other)]
        assert column[0] == column[1] != [("",)]
    assert evoengine("best", "--export", tmp_path / "out", "--db", other).returncode == 0
    assert (tmp_path / "out" / "kernel.cubin").read_bytes()[:4] == b"\x7fELF"
    described = json.loads((tmp_path / "out" / "kernel.json").read_text())
    assert (described["verdict"]["device"], described["provenance"]["imported_from"]) == ("emulator", "run.json")


@pytest.mark.parametrize("command", ["import", *more(["search"])])
def test_another_tuners_samples_go_out_again(evoengine, tmp_path, command):
    file, db = cache(tmp_path / "test.json"), tmp_path / "evo.db"
    arguments = [file] if command == "import" else ["--device", f"recorded:{file}", "--trials", 24]
    assert evoengine(command, *arguments, "--db", db).returncode == 0
    assert evoengine("export", tmp_path / "out.json", "--db", db).returncode == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    there = {tuple(e["configuration"].values()): e["times"].get("runtimes") for e in results}
    assert (there[32, 1, 0], there[256, 4, 0]) == (pytest.approx([5500.0]), None)


def study_of(db):
    [summary] = optuna.get_all_study_summaries(f"sqlite:///{db}")
    return optuna.load_study(study_name=summary.study_name, storage=f"sqlite:///{db}")


def test_an_imported_run_has_a_study_for_the_dashboard(evoengine, searched, tmp_path):
    file, other = tmp_path / "run.json", tmp_path / "other.db"
    evoengine("export", file, "--db", searched[0] / "evo.db")
    assert evoengine("import", file, "--db", other).returncode == 0
    there, back = study_of(searched[0] / "evo.db"), study_of(other)
    assert back.study_name == there.study_name
    assert back.study_name.endswith("estimated TFLOPS")
    shown = [[(t.params, t.values, t.state, t.user_attrs["outcome"]) for t in s.trials] for s in (there, back)]
    assert sorted(map(str, shown[0])) == sorted(map(str, shown[1])) != []


def test_another_tuners_run_has_one_too_with_every_value_of_its_knobs(evoengine, tmp_path):
    db = tmp_path / "evo.db"
    assert evoengine("import", cache(tmp_path / "test.json"), "--db", db).returncode == 0
    study = study_of(db)
    assert (study.study_name.split(" · ")[-1], len(study.trials)) == ("recorded runs per second", 24)
    assert study.best_params == {"block": 128, "tile": 4, "padding": 0}
    assert study.trials[0].distributions["block"].choices == (32, 64, 128, 256)


def foreign(file, path):
    """The file as another tool would have it."""
    data = json.loads(file.read_text())
    for own in (data["metadata"], *data["results"]):
        del own["evoengine"]
    path.write_text(json.dumps(data))
    return path


def test_estimates_are_not_replayed_as_if_they_were_recorded(evoengine, searched, tmp_path):
    file, db = tmp_path / "run.json", tmp_path / "other.db"
    evoengine("export", file, "--db", searched[0] / "evo.db")
    others = foreign(file, tmp_path / "foreign.json")
    replays = [["search", "--device", f"recorded:{path}"] for path in (file, others)]
    for command in (*replays, ["import", others]):
        done = evoengine(*command, "--db", db)
        assert (done.returncode, "has estimated times alone" in done.stderr, db.exists()) == (2, True, False)
        assert "Traceback" not in done.stderr


def test_of_a_mixed_run_what_was_timed_is_replayed_and_the_rest_named(evoengine, tmp_path):
    db, file = tmp_path / "mixed.db", tmp_path / "run.json"
    with open_ledger(str(db), create=True) as ledger:
        run = start_run(ledger)
        for tile, kind in ((32, Kind.ESTIMATED), (64, Kind.MEASURED), (128, Kind.ESTIMATED)):
            add_ranked(ledger, run, a_figure(500.0 + tile, kind), {"family": "wmma", "tile_m": tile}, f"tile_{tile}")
    assert evoengine("export", file, "--db", db).returncode == 0
    commands = (["search", "--device", f"recorded:{file}"], ["import", foreign(file, tmp_path / "foreign.json")])
    for n, command in enumerate(commands):
        done = evoengine(*command, "--db", tmp_path / f"{n}.db")
        assert (done.returncode, "2 configurations that have only an estimated time" in done.stderr) == (
            0,
            True,
        ), done.stderr
        found = json.loads(evoengine("history", "--json", "--db", tmp_path / f"{n}.db").stdout)["trials"]
        assert [(c["config"]["tile_m"], c["tflops_kind"]) for c in found] == [(64, "recorded")]
    assert evoengine("import", file, "--db", tmp_path / "own.db").returncode == 0
    found = json.loads(evoengine("history", "--json", "--db", tmp_path / "own.db").stdout)["trials"]
    assert [c["tflops_kind"] for c in found] == ["estimated", "measured", "estimated"]


@pytest.mark.parametrize(
    ("part", "named"), [({}, "'verdict'"), ({"verdicts": [], "occupancy": "high"}, "occupancy must be float")]
)
def test_a_file_of_ours_that_is_damaged_is_refused(evoengine, searched, tmp_path, part, named):
    file = tmp_path / "run.json"
    evoengine("export", file, "--db", searched[0] / "evo.db")
    data = json.loads(file.read_text())
    del data["results"][0]["evoengine"]["verdicts"]
    data["results"][0]["evoengine"] |= part
    file.write_text(json.dumps(data))
    done = evoengine("import", file, "--db", tmp_path / "other.db")
    assert (done.returncode, named in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    assert not (tmp_path / "other.db").exists()


def test_a_run_that_is_not_there_names_those_that_are(evoengine, searched, tmp_path):
    done = evoengine("export", tmp_path / "x.json", "--run", 9, "--db", searched[0] / "evo.db")
    assert (done.returncode, "1 to 1" in done.stderr) == (2, True)


def test_an_export_is_never_written_over_its_ledger(evoengine, replayed, tmp_path):
    db = shutil.copy(replayed[0], tmp_path)
    done = evoengine("export", db, "--db", tmp_path / "." / "evo.db")
    assert (done.returncode, "is the ledger itself" in done.stderr) == (2, True), done.stderr
    assert len(json.loads(evoengine("history", "--json", "--db", db).stdout)["trials"]) == 24


@pytest.mark.exhaustive
def test_two_objectives_give_a_front(evoengine, searched, tmp_path):
    db = shutil.copy(searched[0] / "evo.db", tmp_path)  # where the start points' binaries are
    arguments = ("--problem", SMALL, "--trials", 8, "--seed", 2, "--jobs", 1, "--db", db, "--device", "emulator")
    done = evoengine("search", *arguments, "--objective", "tflops,registers")
    assert done.returncode == 0, done.stderr
    front = json.loads(evoengine("best", "--pareto", "--json", "--db", db).stdout)["trials"]
    assert len(front) > 1
    assert front == sorted(front, key=lambda c: -c["tflops"]) == sorted(front, key=lambda c: -c["registers"])
    [name] = [s.study_name for s in optuna.get_all_study_summaries(f"sqlite:///{db}") if len(s.directions) == 2]
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{db}")
    assert {tuple(t.values) for t in study.best_trials} >= {(c["tflops"], c["registers"]) for c in front}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--objective", "tflops,magic"], "known objectives are"),
        (["--objective", "tflops,registers", "--sampler", "cmaes"], "only one objective"),
        (["--device", "gpu"], "recorded:FILE"),
    ],
)
def test_a_wrong_objective_or_device_is_refused(evoengine, tmp_path, arguments, names):
    done = evoengine("search", *arguments, "--db", tmp_path / "evo.db")
    assert done.returncode == 2
    assert names in done.stderr
    assert not (tmp_path / "evo.db").exists()


def test_a_front_has_figures_of_one_device_only(evoengine, tmp_path):
    """One name stands for GPUs of unlike speed, as for `best` without a front."""
    db = tmp_path / "evo.db"
    with open_ledger(str(db), create=True) as ledger:
        run = start_run(ledger, objectives="tflops,registers")
        fast, slow = a_figure(900.0, Kind.MEASURED), a_figure(500.0, Kind.MEASURED)
        add_ranked(ledger, run, fast, name="elsewhere")
        here = add_ranked(ledger, run, replace(slow, device="NVIDIA H100 PCIe"), name="here")
    front = json.loads(evoengine("best", "--pareto", "--json", "--db", db).stdout)["trials"]
    assert [c["trial"] for c in front] == [here]


def test_a_front_of_one_objective_says_how_to_get_one(evoengine, searched):
    done = evoengine("best", "--pareto", "--db", searched[0] / "evo.db")
    assert (done.returncode, "--objective tflops,registers" in done.stderr) == (2, True)


def test_an_import_says_that_a_file_names_no_gpu_and_contradicts_itself(evoengine, tmp_path):
    results = [
        {"configuration": {"block": block}, "invalidity": "correct", "objectives": ["time"],
         "measurements": [{"name": "time", "value": ms, "unit": "ms"}]}
        for block, ms in ((32, 2.0), (64, 1.0), (32, 3.0))
    ]  # fmt: skip
    file = tmp_path / "nameless.json"
    file.write_text(json.dumps({"schema_version": "1.0.0", "metadata": {"timeunit": "ms"}, "results": results}))
    done = evoengine("import", file, "--db", tmp_path / "evo.db")
    assert done.returncode == 0, done.stderr
    assert "configurations with contradicting figures in the file: 1; the last of each counts" in done.stderr
    assert "the file names no GPU: its figures are kept as those of unknown" in done.stderr
