"""What history lists: filters by how trials ended, by family, and by an expression over their knobs."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import NothingFound, UsageError
from evoengine.ledger import read as history
from evoengine.ledger.read import Last, Wanted
from evoengine.ledger.store import open_ledger
from evoengine.ledger.tables import CandidateRow
from evoengine.records import Kind, Outcome
from evoengine.space.expression import Where
from evoengine.views.trials import NESTED
from tests.support.ledger_examples import GPU, PROBLEM, SUSTAINED, a_figure, add_ranked, start_run

CONFIGS = (
    {"family": "wmma", "tile_m": 64, "stages": 2},
    {"family": "wmma", "tile_m": 128, "stages": 2},
    {"family": "mma", "tile_m": 128, "warps": 4},
    {"family": "mma", "tile_m": 32, "mixed": 8},
    {"family": "mma", "tile_m": 32, "mixed": "eight"},
)


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    """Trials 1 to 5, of which 2 is incorrect and 5 is unfinished."""
    file = tmp_path_factory.mktemp("history") / "evo.db"
    with open_ledger(str(file), create=True) as ledger:
        run = start_run(ledger)
        for n, config in enumerate(CONFIGS[:4]):
            add_ranked(ledger, run, a_figure(40.0 + n), config, f"kernel_{n}")
        ledger.finish(2, Outcome.INCORRECT, "off by 1", None, "emulator")
        ledger.add_candidate(run, PROBLEM, GPU, CONFIGS[4], (), "start")
    return file


def listed(db: Path, *arguments: str) -> list[int]:
    done = CliRunner().invoke(evoengine, ["history", "--json", "--db", str(db), *arguments], catch_exceptions=False)
    return [trial["trial"] for trial in json.loads(done.stdout)["trials"]]


@pytest.mark.parametrize(
    ("arguments", "trials"),
    [
        ([], [1, 2, 3, 4, 5]),
        (["--outcome", "incorrect"], [2]),
        (["--outcome", "pending", "--outcome", "incorrect"], [2, 5]),
        (["--family", "mma"], [3, 4, 5]),
        (["--family", "mma", "--family", "wmma", "--outcome", "estimated"], [1, 3, 4]),
        (["--where", "tile_m >= 64 and family == 'wmma'"], [1, 2]),
        (["--where", "stages in [2, 3]"], [1, 2]),
        (["--where", "warps * 32 == tile_m"], [3]),
        (["--where", "mixed == 'eight'", "--outcome", "pending"], [5]),
        (["--limit", "2"], [4, 5]),
        (["--run", "1", "--limit", "99"], [1, 2, 3, 4, 5]),
    ],
)
def test_filters_pick_trials(db, arguments, trials):
    assert listed(db, *arguments) == trials


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("__import__('os').system('true')", "calls __import__"),
        ("tile_m.__class__ == 1", "reads the attribute"),
        ("[x for x in (1,)] == 1", "holds a comprehension"),
        ("family * 10**15 == 3", "calculates with family, which is text"),
        ("mixed * 10**15 == 3", "calculates with mixed, which is text"),
        ("mixed == 'eight'", "compares mixed"),
        ("family", "is text; compare it with something"),
        ("tile_m / 0 == 1", "divides by zero"),
        ("tile_m ** tile_m ** 9 > 1", "has no value"),
        ("tile_mm > 1", "did you mean tile_m?"),
        ("tile_m >", "is not an expression"),
        ("tile_m = 32", "is not an expression: two values are compared with =="),
        ("(" * 5000 + "1" + ")" * 5000, "at most 4000 characters"),
        ("-" * 3999 + "1", "nested too deeply"),
        ("1", "`1` is a number, neither true nor false; compare it with something"),
        ("0.0 if tile_m > 1 else True", "neither true nor false"),
        ("tile_m + 1", "neither true nor false"),
        ("max(tile_m, stages)", "neither true nor false"),
        ("-tile_m", "neither true nor false"),
        ("tile_m", "neither true nor false"),
        ("warps if family == 'mma' else True", "neither true nor false"),
    ],
)
def test_an_expression_that_is_wrong_or_hostile_is_refused_with_a_sentence(db, where, said):
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        listed(db, "--where", where)


def test_where_nothing_is_picked_it_says_what_there_is(db):
    with pytest.raises(NothingFound, match="none of 5 trials .* outcomes estimated, incorrect, pending; families mma"):
        listed(db, "--outcome", "hung")


def test_an_unknown_outcome_is_refused_naming_the_known_ones(db):
    done = CliRunner().invoke(evoengine, ["history", "--outcome", "good", "--db", str(db)])
    assert done.exit_code == 2 and "'incorrect'" in done.output and "'pending'" in done.output


def test_a_condition_may_be_a_knob_that_is_true_or_false_or_a_constant(db, tmp_path):
    assert listed(db, "--where", "True") == [1, 2, 3, 4, 5]
    assert listed(db, "--where", "not tile_m == 32 and True") == [1, 2, 3]
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = start_run(ledger)
        for unroll in (True, False, True):
            ledger.add_candidate(run, PROBLEM, GPU, {"unroll": unroll}, (), None)
    assert listed(tmp_path / "evo.db", "--where", "unroll") == [1, 3]


# ── many trials ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """120 trials without an outcome, of which every 40th is of the family mma."""
    file = tmp_path_factory.mktemp("many") / "evo.db"
    with open_ledger(str(file), create=True) as ledger:
        run = start_run(ledger)
        with ledger.database.writing() as session:
            for n in range(1, 121):
                config = {"family": "mma" if n % 40 == 0 else "wmma", "n": n, "late": n} if n > 1 else {"first": True}
                session.add(
                    CandidateRow(
                        run_id=run, problem=PROBLEM, gpu=GPU, config=config, config_key=str(n), parents=[],
                        created_at=datetime.now(UTC),
                    )
                )  # fmt: skip
    return file


def table(db: Path, *arguments: str) -> tuple[list[int], str]:
    """The trials of the table, and what was said beside it."""
    done = CliRunner().invoke(evoengine, ["history", "--db", str(db), *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return [int(line.split()[0]) for line in done.stdout.splitlines() if line.split()[0].isdigit()], done.stderr


def test_a_table_has_the_last_trials_and_says_how_many_it_leaves_out(many):
    shown, said = table(many)
    assert shown == list(range(71, 121))
    assert said == "the last 50 trials; 70 earlier ones are not shown: --all shows all, --limit N the last N\n"
    assert table(many, "--limit", "3") == ([118, 119, 120], "")
    assert table(many, "--limit", "200") == (list(range(1, 121)), "")


def test_all_are_shown_a_page_at_a_time(many, monkeypatch):
    monkeypatch.setattr("evoengine.cli.history.PAGE", 7)
    assert table(many, "--all") == (list(range(1, 121)), "")


def test_what_is_earlier_and_matches_is_not_counted_but_said(many):
    shown, said = table(many, "--where", "n >= 2")
    assert shown == list(range(71, 121)) and "the last 50 trials; earlier matches are not shown" in said
    assert table(many, "--where", "n >= 100") == (list(range(100, 121)), "")
    assert table(many, "--family", "mma") == ([40, 80, 120], "")


def test_the_last_that_match_are_found_without_reading_the_others(many, monkeypatch):
    monkeypatch.setattr("evoengine.ledger.read.BATCH", 10)
    read: list[int] = []
    configs = history._configs
    monkeypatch.setattr(history, "_configs", lambda rows: read.append(len(rows)) or configs(rows))
    with open_ledger(str(many), create=False) as ledger:
        last = ledger.lists.last_matching(Wanted(condition=Where("family == 'wmma'")), 12)
        assert last.trials == list(range(108, 120)) and last.earlier is None
        assert read == [10, 10]
        assert ledger.lists.last_matching(Wanted(condition=Where("n < 3")), 12) == Last([2], 0)
        assert sum(read) == 20 + 120


def test_a_knob_that_one_early_trial_has_is_known(many):
    assert listed(many, "--where", "first") == [1]
    with pytest.raises(UsageError, match="names lat, which no trial has as a knob; did you mean late?"):
        listed(many, "--where", "lat > 1 or n > 2")


def test_json_and_csv_have_all_trials_unless_a_limit_is_given(many):
    assert listed(many) == list(range(1, 121))
    rows = csv_rows(many)
    assert [int(row["trial"]) for row in rows] == list(range(1, 121))
    assert [row["trial"] for row in csv_rows(many, "--limit", "2")] == ["119", "120"]


def csv_rows(db: Path, *arguments: str) -> list[dict[str, str]]:
    done = CliRunner().invoke(evoengine, ["history", "--csv", "-", "--db", str(db), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return list(csv.DictReader(io.StringIO(done.stdout)))


# ── CSV ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_csv_has_the_fields_of_json_a_column_each(db):
    done = CliRunner().invoke(evoengine, ["history", "--json", "--db", str(db)])
    trials, rows = json.loads(done.stdout)["trials"], csv_rows(db)
    knobs = {"config.family", "config.tile_m", "config.stages", "config.warps", "config.mixed"}
    flat = {name for name in trials[0] if name not in ("config", *NESTED)} | knobs
    assert {name for name in rows[0] if "." not in name or name in knobs} == flat
    assert {name.partition(".")[0] for name in rows[0]} == set(trials[0])
    for trial, row in zip(trials, rows, strict=True):
        assert (row["trial"], row["outcome"]) == (str(trial["trial"]), trial["outcome"] or "")
        assert row["median_us"] == ("" if trial["median_us"] is None else repr(trial["median_us"]))
        assert row["config.tile_m"] == str(trial["config"]["tile_m"])
        assert row["correct"] == {None: "", True: "true", False: "false"}[trial["correct"]]
        assert row["range_us.low"] == ("" if trial["range_us"] is None else repr(trial["range_us"][0]))


def test_csv_shows_the_policy_of_a_measured_figure_and_of_the_one_of_back_to_back_runs(tmp_path):
    db = tmp_path / "evo.db"
    with open_ledger(str(db), create=True) as ledger:
        trial = add_ranked(ledger, start_run(ledger), a_figure(40.0, Kind.MEASURED))
        ledger.record_measurement(trial, replace(a_figure(30.0, Kind.MEASURED), policy=SUSTAINED))
        ledger.record_measurement(trial, a_figure(40.0, Kind.MEASURED))
    (row,) = csv_rows(db)
    assert (row["policy.launch"], row["policy.l2"], row["policy.batch"]) == ("graph", "cold", "16")
    assert (row["sustained.policy.clocks"], row["sustained.tflops"]) == ("sustained", "30.0")
    assert row["utilisation"] == "" and row["sustained.watts"] == ""


def test_text_that_a_spreadsheet_would_run_has_an_apostrophe_before_it(tmp_path):
    db, texts = tmp_path / "evo.db", ("=1+1", "+1", "-1", "@SUM(A1)", "＝1")
    with open_ledger(str(db), create=True) as ledger:
        run = start_run(ledger)
        for text in texts:
            trial = ledger.add_candidate(run, PROBLEM, GPU, {"layout": text, "shift": -3, text: 1}, (), f"{text},;=1")
            ledger.finish(trial, Outcome.CRASHED, text, None, 'plain "device"')
    for row, text in zip(csv_rows(db), texts, strict=True):
        assert (row["reason"], row["config.layout"], row["operator"]) == (f"'{text}", f"'{text}", f"'{text},;=1")
        assert (row["config.shift"], row["device"], row[f"config.{text}"]) == ("-3", 'plain "device"', "1")


def test_text_of_csv_is_in_one_line_and_does_nothing_to_a_terminal(tmp_path):
    db = tmp_path / "evo.db"
    with open_ledger(str(db), create=True) as ledger:
        trial = ledger.add_candidate(start_run(ledger), PROBLEM, GPU, {"n\n": "\t=1"}, (), None)
        ledger.finish(trial, Outcome.CRASHED, "\x1b[31mred\r\n=2", None, None)
    (row,) = csv_rows(db)
    assert (row["reason"], row[r"config.n\n"]) == (r"\x1b[31mred\r\n=2", r"\t=1")


def test_a_csv_file_is_written_whole_or_not_at_all(db, tmp_path, monkeypatch):
    file = tmp_path / "new" / "trials.csv"
    done = CliRunner().invoke(evoengine, ["history", "--csv", str(file), "--db", str(db)])
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"wrote 5 trials to {file}\n")
    written = file.read_bytes()
    assert len(written.splitlines()) == 6

    def break_off(*_):
        yield "half of it"
        raise UsageError("damaged")

    monkeypatch.setattr("evoengine.views.trials.csv_lines", break_off)
    done = CliRunner().invoke(evoengine, ["history", "--csv", str(file), "--db", str(db)])
    assert done.exit_code and file.read_bytes() == written and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--all", "--limit", "3"], "--all and --limit contradict each other"),
        (["--csv", "-", "--json"], "--csv and --json contradict each other"),
        (["--csv", "."], "cannot write .: it is a folder"),
        (["--csv", "/dev/null"], "it is not a regular file"),
        (["--csv", "/proc/none/trials.csv"], "cannot write /proc/none/trials.csv: No such file"),
    ],
)
def test_output_that_cannot_be_is_refused(db, arguments, said):
    with pytest.raises(UsageError, match=said):
        listed(db, *arguments) if "--json" in said else table(db, *arguments)


def test_the_ledger_is_not_overwritten(db):
    before = db.read_bytes()
    with pytest.raises(UsageError, match="is the ledger itself"):
        table(db, "--csv", str(db))
    assert db.read_bytes() == before
