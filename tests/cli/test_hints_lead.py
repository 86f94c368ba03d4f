"""Each hint that a command prints is a command that does what was said, in a folder whose name has a space."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.recorded import cache

HINT = re.compile(r"evoengine [a-z].*?(?= makes| lists| fills| shows| writes|   ·|$)", re.MULTILINE)


def hints(text: str) -> list[list[str]]:
    """The arguments of every command named, as a shell reads them."""
    return [shlex.split(found)[1:] for found in HINT.findall(" ".join(text.split("\n")) + "\n")]


@pytest.fixture(scope="module")
def replayed(evoengine, tmp_path_factory):
    """A folder with a space in its name, a ledger of one replay in it, and what the replay said."""
    folder = tmp_path_factory.mktemp("my runs")
    file, db = cache(folder / "test.json"), folder / "my evo.db"
    nothing = evoengine("best", "--db", db)
    (search,) = hints(nothing.stderr)
    assert (nothing.returncode, search) == (1, ["search", "--db", str(db)])
    done = evoengine(*search, "--device", f"recorded:{file}", "--trials", 24, "--seed", 1)
    assert done.returncode == 0, done.stderr
    return folder, db, done


def test_a_search_says_where_to_go_on_in_the_same_ledger(replayed, evoengine):
    _, db, done = replayed
    report, dashboard = hints(done.stderr[done.stderr.index("next: ") :])
    assert report == ["report", "--db", str(db)] and dashboard == ["dashboard", "--db", str(db)]
    assert evoengine(*report).returncode == 0
    assert evoengine(*dashboard, "--help").returncode == 0  # it would serve until Ctrl-C


@pytest.mark.parametrize(
    "arguments",
    [
        ("best", "--problem", "recorded:other"),
        ("report", "--problem", "recorded:other"),
        ("history", "--problem", "recorded:other"),
        ("history", "--run", 99),
    ],
)
def test_what_is_not_there_leads_to_what_is(replayed, evoengine, arguments):
    _, db, _ = replayed
    done = evoengine(*arguments, "--db", db)
    (then,) = hints(done.stderr)
    assert (done.returncode, then) == (1, ["history", "--db", str(db)])
    assert evoengine(*then).returncode == 0


def test_a_recorded_trial_has_no_source_and_says_why(replayed, evoengine):
    done = evoengine("show", 1, "--source", "--db", replayed[1])
    assert (done.returncode, done.stdout) == (1, "")
    assert "trial 1 has no source: it was recorded by another tuner, without its kernel" in done.stderr


def test_a_kernels_folder_that_is_missing_is_made_by_the_hint_and_leads_to_its_search(evoengine, tmp_path):
    missing = tmp_path / "my kernels" / "mine"
    missing.parent.mkdir()
    done = evoengine("verify", "--kernel", missing, "--config", "{}")
    (new,) = hints(done.stderr)
    made = evoengine(*new)
    assert (done.returncode, made.returncode) == (2, 0), made.stderr
    (search,) = hints(made.stderr)
    assert search == ["search", "--kernel", str(missing)] and Path(search[2], "problem.json").is_file()


def test_a_trial_without_an_export_leads_to_both_in_the_same_ledger(replayed, evoengine):
    _, db, _ = replayed
    done = evoengine("best", "--trial", 1, "--db", db)
    export, show = hints(done.stderr.replace("; evoengine", "   ·   evoengine"))
    assert export == ["best", "--trial", "1", "--export", "out/", "--db", str(db)]
    assert show == ["show", "1", "--db", str(db)] and evoengine(*show).returncode == 0
