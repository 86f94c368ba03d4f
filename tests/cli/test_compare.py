"""`evoengine compare`: two runs beside each other, figures of unlike kinds, devices and policies never mixed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import UsageError
from evoengine.ledger.store import open_ledger
from evoengine.records import Device, Kind, Outcome
from tests.support.ledger_examples import PROBLEM, SPACE, SUSTAINED, a_figure, add_ranked, start_run

H200 = Device("NVIDIA H200", "GPU-1", "sm_90", "CUDA 13.0", {"torch": "2.6"})


def timed(us: float, kind: Kind = Kind.MEASURED):
    return replace(a_figure(42.0, kind), median_us=us, tflops=100.0 / us)


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    """Runs 1 and 2 of one problem, measured; run 3, of another, estimated; run 4 without a trial."""
    file = tmp_path_factory.mktemp("compare") / "evo.db"
    with open_ledger(str(file), create=True) as ledger:
        first = start_run(ledger, device=H200)
        for n, us in enumerate((30.0, 20.0, 10.4, 10.0)):  # trials 1 to 4
            add_ranked(ledger, first, timed(us), {"n": n}, f"a{n}")
        ledger.record_measurement(4, timed(1.0, Kind.ESTIMATED))
        ledger.record_measurement(1, timed(0.9, Kind.ESTIMATED))
        ledger.record_measurement(4, replace(timed(5.0), policy=SUSTAINED))
        ledger.finish(
            ledger.add_candidate(first, PROBLEM, "h100", {"n": 9}, (), None), Outcome.HUNG, "late", None, None
        )
        other = replace(H200, driver="CUDA 13.1", versions={"torch": "2.7"})
        space = type("Space", (), {**vars(SPACE), "sha256": "6" * 64})
        second = start_run(ledger, device=other, sampler="evolution", seed=2, space=space)
        for n, us in ((3, 12.5), (2, 10.4), (7, 12.6)):  # trials 6 to 8
            add_ranked(ledger, second, timed(us), {"n": n}, f"b{n}")
        ledger.add_candidate(second, PROBLEM, "h100", {"n": 9}, (), None)
        add_ranked(ledger, second, replace(timed(0.1), suspect="too fast"), {"n": 0}, "b0")
        third = start_run(ledger, problem="attention:other", device=Device("emulator"))
        trial = ledger.add_candidate(third, "attention:other", "h100", {"n": 0}, (), None)
        ledger.record_measurement(trial, timed(3.0, Kind.ESTIMATED))
        ledger.finish(trial, Outcome.ESTIMATED, None, None, "emulator")
        start_run(ledger)
    return file


def compared(db: Path, *runs: int) -> dict:
    done = CliRunner().invoke(
        evoengine, ["compare", *map(str, runs), "--json", "--db", str(db)], catch_exceptions=False
    )
    assert done.exit_code == 0
    return json.loads(done.stdout)


def test_outcomes_and_settings_stand_beside_each_other(db):
    found = compared(db, 1, 2)
    assert (found["runs"], found["comparable"], found["trials"]) == ([1, 2], True, [5, 5])
    assert found["outcomes"] == {"hung": [1, 0], "measured": [4, 3], "suspect": [0, 1], "pending": [0, 1]}
    assert found["differences"] == {
        "driver": ["CUDA 13.0", "CUDA 13.1"], "torch": ["2.6", "2.7"], "sampler": ["tpe", "evolution"],
        "seed": ["1", "2"], "space SHA-256": ["5" * 64, "6" * 64],
    }  # fmt: skip


def test_best_figures_are_of_one_kind_and_policy_each(db):
    boost, sustained, estimated = compared(db, 1, 2)["figures"]
    assert (boost["kind"], boost["policy"]["clocks"]) == ("measured", "boost")
    assert [(r["best"]["trial"], r["best"]["us"], r["figures"]) for r in boost["runs"]] == [(4, 10.0, 4), (7, 10.4, 3)]
    assert (sustained["kind"], sustained["policy"]["clocks"]) == ("measured", "sustained")
    assert (estimated["kind"], estimated["model"]) == ("estimated", "machine code")
    assert [f["runs"][1] for f in (sustained, estimated)] == [None, None]
    assert estimated["runs"][0]["best"]["us"] == 0.9


def test_trials_until_a_figure_is_near_the_best_are_counted_from_the_runs_first(db):
    first, second = compared(db, 1, 2)["figures"][0]["runs"]
    assert (first["near_own"], first["near_both"]) == (3, 3)  # 10.4 is within 5 % of 10.0
    assert (second["near_own"], second["near_both"]) == (2, 2)
    second, first = compared(db, 2, 1)["figures"][0]["runs"]
    assert (first["near_both"], second["best"]["place"]) == (3, 2)


def test_configurations_that_both_tried_have_their_figures_compared(db):
    found = compared(db, 1, 2)
    shared = {s["config"]["n"]: s for s in found["shared"]}
    assert sorted(shared) == [0, 2, 3, 9]
    assert (shared[3]["trials"], shared[3]["us"], shared[3]["ratio"]) == ([4, 6], [10.0, 12.5], 0.8)
    assert (shared[2]["ratio"], shared[0]["ratio"], shared[9]["ratio"]) == (1.0, None, None)
    assert (shared[9]["outcomes"], shared[0]["outcomes"]) == (["hung", "pending"], ["measured", "suspect"])
    assert found["median_ratio"] == 0.9 and found["shared"][0] == shared[3]


def test_runs_of_unlike_problems_are_shown_and_not_compared(db):
    found = compared(db, 1, 3)
    assert not found["comparable"] and found["differences"]["problem"] == [PROBLEM, "attention:other"]
    standings = [run for figures in found["figures"] for run in figures["runs"] if run]
    assert standings and {run["near_both"] for run in standings} == {None}
    (shared,) = found["shared"]
    assert (shared["config"], shared["ratio"], shared["kind"]) == ({"n": 0}, None, None)


def test_a_run_without_trials_is_shown(db):
    found = compared(db, 4, 2)
    assert (found["trials"], found["shared"], found["median_ratio"]) == ([0, 5], [], None)
    assert [f["runs"][0] for f in found["figures"]] == [None]


def test_the_finals_winner_is_the_best_of_its_run(tmp_path):
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        for run in (start_run(ledger), start_run(ledger)):
            won, lost = (add_ranked(ledger, run, timed(us), {"n": us}, f"{run} {us}") for us in (10.2, 10.0))
            for place, (trial, us) in enumerate({won: 10.3, lost: 10.25}.items(), 1):
                terms = {"place": float(place), "final_of_run": float(run)}
                ledger.record_measurement(trial, replace(timed(us), terms=terms))
    (figures,) = compared(tmp_path / "evo.db", 1, 2)["figures"]
    assert [run["best"]["us"] for run in figures["runs"]] == [10.3, 10.3]


def test_a_person_sees_tables(db):
    done = CliRunner().invoke(evoengine, ["compare", "1", "2", "--db", str(db)], catch_exceptions=False)
    for text in (
        "space SHA-256",
        "pending",
        "#4",
        "#7",
        "4 configurations were tried in both runs; 2 have comparable figures",
        "0.800",
    ):
        assert text in done.output
    done = CliRunner().invoke(evoengine, ["compare", "1", "3", "--db", str(db)], catch_exceptions=False)
    assert "the runs differ in problem, GPU or kernel" in done.stderr
    done = CliRunner().invoke(evoengine, ["compare", "4", "2", "--db", str(db)], catch_exceptions=False)
    assert "no configuration was tried in both runs" in done.stderr


@pytest.mark.parametrize(
    ("runs", "said"),
    [((1, 9), "there is no run 9; the ledger holds runs 1 to 4"), ((2, 2), "run 2 cannot be compared with itself")],
)
def test_runs_that_cannot_be_compared_are_refused(db, runs, said):
    with pytest.raises(UsageError, match=said):
        compared(db, *runs)
