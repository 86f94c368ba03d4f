"""`best` and `show` say how their figures were measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.ledger.store import open_ledger
from evoengine.records import UNKNOWN_POLICY, Kind
from tests.support.ledger_examples import SUSTAINED, a_figure, add_ranked, start_run


@pytest.fixture
def db(tmp_path):
    """An old figure, a new one with a normalised time, and the new one's sustained figure."""
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run, measured = start_run(ledger), a_figure(50.0, Kind.MEASURED)
        add_ranked(ledger, run, replace(measured, tflops=900.0, median_us=1.0, policy=UNKNOWN_POLICY), name="old")
        trial = add_ranked(ledger, run, replace(measured, median_us=102.5, normalised_us=100.5), name="new")
        observed = {"sm_mhz": 1410.0, "watts": 690.0}
        ledger.record_measurement(trial, replace(measured, tflops=42.0, policy=SUSTAINED, terms=observed))
    return tmp_path / "evo.db"


def call(*arguments):
    done = CliRunner().invoke(evoengine, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done


def test_best_says_which_policy_it_ranks_by_and_shows_no_other(db):
    done = call("best", "--db", db)
    assert "measured figures, NVIDIA H200, graph, cold L2, boost clocks, batches of 16" in done.stderr
    assert "50" in done.stdout and "900" not in done.stdout
    [found] = json.loads(call("best", "--top", 5, "--json", "--db", db).stdout)["trials"]
    assert found["policy"] == {"launch": "graph", "l2": "cold", "clocks": "boost", "batch": 16}
    assert (found["median_us"], found["normalised_us"]) == (102.5, 100.5)


def test_show_prints_the_policy_the_normalised_time_and_the_sustained_figure(db):
    shown = call("show", 2, "--db", db).stdout
    assert "graph, cold L2, boost clocks" in shown
    assert "100.5 µs, its time relative to the baseline's of the same rounds" in shown
    assert "42 TFLOPS" in shown and "at 1,410 MHz, 690 W, run back to back" in shown


def test_a_figure_of_before_says_that_its_policy_is_unknown(db):
    assert "policy unknown" in call("show", 1, "--db", db).stdout
    assert json.loads(call("show", 1, "--json", "--db", db).stdout)["policy"]["clocks"] == "unknown"
