"""JSON of all commands: one object with the version of its shape, lists under their plural, times in UTC."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from evoengine.cli.main import COMMANDS
from evoengine.cli.main import evoengine as commands
from evoengine.cli.output import print_json
from evoengine.ledger.store import open_ledger
from evoengine.records import Profile
from evoengine.views import SCHEMA
from tests.support.ledger_examples import a_verdict, add_step, start_run

PROFILE = Profile("model", "h100", {"tensor %": 12.5}, ("a remark",))
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00")
LISTS = {
    "history": ([], {"trials"}),
    "best": (["--top", "3"], {"trials", "ranked_apart"}),
    "report": ([], {"lineage", "effects", "ranked_apart"}),
    "show": (["2", "--lineage"], {"lineage"}),
    "problems": ([], {"workloads"}),
    "runs": ([], {"runs"}),
    "gpus": ([], {"gpus"}),
    "doctor": ([], {"findings"}),
}
"""of each command that lists: arguments, and its lists"""
OTHERS = {"search", "measure", "profile", "verify", "compare", "retune", "accuracy", "cubins", "propose"}
"""print one object, about what they did; tests of their own run them"""


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    """Two trials, the second made from the first, and a profile."""
    file = tmp_path_factory.mktemp("json") / "evo.db"
    with open_ledger(str(file), create=True) as ledger:
        run = start_run(ledger)
        _, second = add_step(ledger, run, 40.0, 50.0)
        ledger.record_profile(second, PROFILE)
    return file


def printed(name: str, *arguments: str, db: Path | None = None):
    given = ["--db", str(db)] if db and any("--db" in p.opts for p in command_of(name).params) else []
    done = CliRunner().invoke(commands, [name, *arguments, "--json", *given])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return json.loads(done.stdout)


def command_of(name: str) -> click.Command:
    found = commands.get_command(click.Context(commands), name)
    assert found is not None
    return found


def test_every_command_with_json_is_in_this_file():
    with_json = {name for name in COMMANDS if any("--json" in p.opts for p in command_of(name).params)}
    assert with_json == LISTS.keys() | OTHERS


@pytest.mark.parametrize("name", LISTS)
def test_a_list_stands_under_its_plural_in_an_object_with_the_schema_first(db, name):
    arguments, lists = LISTS[name]
    found = printed(name, *arguments, db=db)
    assert next(iter(found.items())) == ("schema", SCHEMA)
    assert {field for field, value in found.items() if isinstance(value, list)} == lists
    assert all(found[field] for field in lists - {"ranked_apart"})  # which is empty where there is one kernel


def test_the_best_one_alone_is_one_object(db):
    found = printed("best", db=db)
    assert (found["schema"], found["trial"]) == (SCHEMA, 2)


def test_times_are_iso_8601_in_utc(db):
    for trial in printed("history", db=db)["trials"]:
        times = [trial[name] for name in ("created_at", "taken_at", "finished_at")]
        assert all(ISO.fullmatch(time) for time in times) and times == sorted(times)


def test_a_time_of_another_zone_is_given_in_utc_and_numbers_that_json_does_not_know_as_text(capsys):
    there = datetime(2026, 1, 1, 1, 30, tzinfo=UTC).astimezone()
    print_json({"at": there, "errors": [float("nan"), float("inf"), 1.0], "span": {"low": float("-inf")}})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["at"] == "2026-01-01T01:30:00.000+00:00"
    assert (found["errors"], found["span"]) == (["nan", "inf", 1.0], {"low": "-inf"})


def test_the_page_as_json_has_all_that_the_page_has(db):
    found = printed("show", "2", db=db)
    cases = [(c["name"], c["seed"], c["correct"]) for c in found["cases"]]
    assert cases == [(c.name, c.seed, c.correct) for c in a_verdict().cases]
    assert found["profile"] == {
        "tool": "model",
        "device": "h100",
        "figures": {"tensor %": 12.5},
        "remarks": ["a remark"],
    }
    assert found["figure"]["terms"]["roofline_us"] == 100.0 and found["figure"]["device"] == "NVIDIA H200"
    us = found["figure"]["normalised_us"] or found["figure"]["median_us"]
    assert found["memory_gbs"] == pytest.approx(4 * 2 * 2 * 64 * 32 / us / 1e3), "q, k, v and o of 2 heads in fp16"
    assert found["binary"]["instructions"] == {"HMMA": 64, "LDSM": 32} and found["binary"]["warnings"]
    assert (found["launch"]["grid"], found["launch"]["threads"]) == ([2, 3, 4], 128)
    assert (found["operator"], found["parents"]) == ("sampler", [1]) and len(found["source_sha256"]) == 64
    assert ISO.fullmatch(found["verdict"]["taken_at"]) and found["binary_verdict"] is None
    named = set(re.findall(r"^(\w+)  ", CliRunner().invoke(commands, ["show", "2", "--db", str(db)]).stdout, re.M))
    elsewhere = {"origin": "operator", "warning": "binary", "resources": "registers", "range": "range_us",
                 "busy": "utilisation", "instructions": "binary", "source": "source_sha256", "terms": "figure",
                 "memory": "memory_gbs", "case": "cases", "ragged": "cases", "tensor": "profile"}  # fmt: skip
    assert {elsewhere.get(name, name) for name in named} <= found.keys()


def test_history_keeps_the_order_in_which_trials_began(db):
    created = [trial["created_at"] for trial in printed("history", db=db)["trials"]]
    assert created == sorted(created) and datetime.fromisoformat(created[0]) > datetime.now(UTC) - timedelta(hours=1)
