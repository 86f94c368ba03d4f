"""What a search shows from its first second on, in a terminal, elsewhere, and as JSON."""

from __future__ import annotations

import json
import logging
import re
import time
import warnings
from collections import Counter
from datetime import datetime

import click
import pytest
from click.testing import CliRunner

from evoengine.cli import progress as module
from evoengine.cli.main import evoengine as evoengine_command
from evoengine.cli.progress import EventLog, LiveProgress
from evoengine.errors import MachineError
from evoengine.records import Outcome
from evoengine.search.progress import Progress
from evoengine.views import OF_A_TRIAL
from tests.support.recorded import cache
from tests.support.waiting import wait_for


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(module, "LINE_SECONDS", 0.01)


def seen(capsys, wanted: str) -> str:
    """What was said on stderr by the time that `wanted` is there."""
    said: list[str] = []

    def is_there() -> bool:
        said.append(capsys.readouterr().err)
        return wanted in "".join(said)

    wait_for(is_there)
    return "".join(said)


def test_before_the_first_trial_the_stage_is_said_and_then_the_trials(capsys, often):
    with LiveProgress() as live:
        assert re.search(r"\d:\d\d · starting\n", seen(capsys, "starting\n"))
        live.stage("reading the space")
        assert re.search(r"\d:\d\d · reading the space\n", seen(capsys, "space\n"))
        live.update(Progress(60, stage="compiling the first candidates"))
        assert re.search(r"\d:\d\d · compiling the first candidates\n", seen(capsys, "candidates\n"))
        live.update(Progress(60, outcomes=Counter({Outcome.ESTIMATED: 2, Outcome.CRASHED: 1})))
        wanted = r"\d:\d\d · 3/60 · 2 correct · 1 crashed · \d+:\d\d left\n"
        assert re.search(wanted, seen(capsys, "left\n"))
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""  # and nothing more once it is over


def test_a_terminal_is_shown_how_long_the_stage_lasts(monkeypatch):
    live = LiveProgress()
    live.stage("reading the space")
    monkeypatch.setattr(live, "_since", time.monotonic() - 63)
    assert str(live._picture()) == "reading the space 1:03"


def test_off_a_terminal_a_line_comes_every_ten_seconds():
    assert module.LINE_SECONDS == 10


def events(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_of_the_log_is_an_object_warnings_and_errors_too(capsys, often):
    with pytest.raises(click.exceptions.Exit) as ended, EventLog() as log:
        log.stage("reading the space")
        log.stage("reading the space")
        logging.getLogger("somebody").warning("beware of %s", "it")
        warnings.warn("and of that", stacklevel=1)
        log.update(Progress(60, outcomes=Counter({Outcome.ESTIMATED: 2})))
        said = seen(capsys, '"done": 2')
        raise MachineError("the disk is full")
    found = events(said + capsys.readouterr().err)
    assert ended.value.exit_code == 3
    assert {e["schema"] for e in found} == {1}
    assert all(datetime.fromisoformat(e["time"]).utcoffset().total_seconds() == 0 for e in found)
    assert [e["stage"] for e in found if e["event"] == "stage"] == ["reading the space"]
    texts = [(e["text"], e["level"]) for e in found if e["event"] == "message"]
    assert texts[0] == ("beware of it", "warning") and "and of that" in texts[1][0]
    assert [e["done"] for e in found if e["event"] == "progress"][-1] == 2
    assert (found[-1]["event"], found[-1]["text"], found[-1]["exit_code"]) == ("error", "the disk is full", 3)


def test_a_search_logs_each_trial_and_its_end(evoengine, tmp_path):
    file = cache(tmp_path / "test.json")
    arguments = ("search", "--device", f"recorded:{file}", "--trials", 5, "--seed", 1, "--db", tmp_path / "evo.db")
    done = evoengine(*arguments, "--log-json", "--json")
    found = events(done.stderr)
    assert done.returncode == 0
    trials = [e for e in found if e["event"] == "trial"]
    assert [e["trial"] for e in trials] == [1, 2, 3, 4, 5] and all(set(OF_A_TRIAL) <= e.keys() for e in trials)
    assert (found[-1]["event"], found[-1]["exit_code"], found[-1]["run"]) == ("end", 0, 1)
    assert Counter(e["outcome"] for e in trials) == json.loads(done.stdout)["outcomes"]
    refused = evoengine(*arguments[:-1], tmp_path / "gone" / "evo.db", "--log-json")
    (*_, last) = events(refused.stderr)
    assert (refused.returncode, last["event"], last["exit_code"]) == (2, "error", 2)
    assert "there is no folder" in last["text"]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """A recorded space and the ledger that it was imported into, and the stages that were said meanwhile."""
    folder = tmp_path_factory.mktemp("replayed")
    file, db = cache(folder / "test.json"), folder / "evo.db"
    return file, db, stages_of("import", str(file), "--db", str(db))


def stages_of(*arguments: str) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LiveProgress, "stage", lambda self, text: said.append(text))
        CliRunner().invoke(evoengine_command, list(arguments))
    return said


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        (("best", "--export", "out"), ["reading the ledger"]),
        (("best", "--export", "out", "--trial", "1"), ["reading the ledger"]),
        (("profile", "1"), ["reading the ledger"]),
    ],
)
def test_a_command_that_may_take_long_says_what_it_does(replayed, arguments, stages):
    assert stages_of(*arguments, "--db", str(replayed[1])) == stages


def test_a_place_that_no_export_can_take_is_refused_before_anything_is_executed(replayed):
    file, db, _ = replayed
    assert stages_of("best", "--export", str(file), "--db", str(db)) == []
    assert stages_of("best", "--export", str(file.parent), "--trial", "1", "--db", str(db)) == []


def test_an_import_says_what_it_does(replayed):
    assert replayed[2] == ["reading the file", "writing the ledger", "writing the study"]


def test_verify_says_what_it_does_before_a_space_of_any_size_is_read():
    assert stages_of("verify", "--config", "{}", "--device", "emulator") == ["reading the space"]
