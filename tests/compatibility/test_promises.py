"""What docs/compatibility.md promises is as it was recorded: a field that is missing breaks somebody's script.

The frozen ledgers are opened in tests/ledger/test_frozen.py; verdicts and predictions are held by
tests/stages/test_gate_version.py and tests/sass/test_model_version.py.
"""

from __future__ import annotations

import json

import pytest
from click import Context, Group

from evoengine.cli.main import evoengine as commands
from evoengine.views.accuracy import PredictedAgainView
from evoengine.views.boards import WorkloadsView
from tests.support import promises
from tests.support.exhaustive import more
from tests.support.promises import FOLDER, PROMISES, SEARCHES, lost, recorded, shape

REMEDY = "where it is meant: python -m tests.support.promises, and a line in CHANGELOG.md"
BROKEN = f"a promise is broken: SCHEMA in evoengine/views/__init__.py must go up, {REMEDY}"
NEW = f"something new is promised; record it, {REMEDY}"


@pytest.mark.parametrize("name", ["names", "bundle", "json"])
def test_what_people_script_against_is_as_recorded(name):
    found = PROMISES[name]()
    assert lost(recorded(name), found) == [], BROKEN
    assert json.loads(json.dumps(found)) == recorded(name), NEW


@pytest.mark.parametrize(
    "text",
    ['{"schema": 1, "missed": []}', '{"schema": 1, "predicted_again": ["1"], "missed": []}',
     '{"schema": 1, "predicted_again": [], "missed": [], "more": 1}'],
)  # fmt: skip # a line per case
def test_json_without_a_field_of_its_shape_or_with_another_is_refused(text):
    promises.require_shape(PredictedAgainView, '{"schema": 1, "predicted_again": [1], "missed": []}')
    with pytest.raises(ValueError, match="PredictedAgainView"):
        promises.require_shape(PredictedAgainView, text)


def test_a_field_that_the_shape_of_a_nested_answer_does_not_have_is_refused():
    listed = {"schema": 1, "workloads": [{"workload": "gemm", "grammar": "m…", "example": "m1", "more": 1}]}
    with pytest.raises(ValueError, match=r"WorkloadsView has no workloads\.more"):
        promises.require_shape(WorkloadsView, json.dumps(listed))


def test_every_command_with_json_is_recorded():
    names = {name.partition(" --")[0] for name in recorded("json")}
    assert names == set(with_json(commands, ()))


def with_json(command, path):
    if isinstance(command, Group):
        for name in command.list_commands(Context(command)):
            found = command.get_command(Context(command), name)
            assert found is not None
            yield from with_json(found, (*path, name))
    if any("--json" in p.opts for p in command.params):
        yield " ".join(path)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_seed_asks_for_the_same_configurations(name):
    assert promises.search(name) == recorded("searches")[name], REMEDY


FEW = recorded("spaces").keys() - {f"{problem} on {gpu}" for problem, gpu in promises.PROBLEMS[2:5]}


@pytest.mark.parametrize("name", [n if n in FEW else more([n])[0] for n in recorded("spaces")])
def test_a_space_has_the_same_start_points_and_configurations(name):
    problem, _, gpu = name.rpartition(" on ")
    assert json.loads(json.dumps(promises.space(problem, gpu))) == recorded("spaces")[name], REMEDY


def test_every_space_file_has_its_start_points():
    assert promises.starts() == recorded("starts")


def test_every_problem_of_the_table_is_recorded():
    assert list(recorded("spaces")) == [f"{problem} on {gpu}" for problem, gpu in promises.PROBLEMS]
    assert sorted(p.stem for p in FOLDER.glob("*.json")) == sorted(PROMISES)


# ── what breaks a promise is seen ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"trial": 1, "best": [{"us": 1.0}], "extra": 1}, []),
        ({"best": [{"us": 1.0}]}, ["trial"]),
        ({"trial": "1", "best": [{"us": 1.0}]}, ["trial"]),
        ({"trial": None, "best": [{"us": 1.0}]}, ["trial"]),
        ({"trial": 1, "best": [{"ms": 1.0}]}, ["best.us"]),
        ({"trial": 1, "best": {"us": 1.0}}, ["best"]),
    ],
)
def test_a_field_that_is_gone_or_of_another_type_is_named(now, named):
    assert lost(shape({"trial": 1, "best": [{"us": 1.0}]}), shape(now)) == named


def test_fields_by_name_are_data():
    assert lost(shape({"config": {"tile_m": 64}}), shape({"config": {"stages": 2}})) == []
    assert lost(shape({"config": {"tile_m": 64}}), shape({"config": [64]})) == ["config"]


def test_items_that_differ_are_recorded_together():
    merged = shape([{"a": 1, "b": None}, {"b": {"c": 1}}])
    assert merged == ["list", {"a": "number", "b": ["one of", "null", {"c": "number"}]}]


def test_another_order_of_a_knobs_values_moves_a_search(monkeypatch):
    monkeypatch.setattr(promises, "NUMBERS", promises.NUMBERS.replace("[1, 2, 4, 8, 16]", "[16, 8, 4, 2, 1]"))
    promises.searched_space.cache_clear()
    assert promises.search("evolution numbers 0") != recorded("searches")["evolution numbers 0"]
    promises.searched_space.cache_clear()
