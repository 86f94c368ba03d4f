"""Text is text: a ledger in which every text may do harm is shown by every command as it is, harmless."""

from __future__ import annotations

import ast
from html import escape
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from sqlalchemy import JSON, String, update

import evoengine.cli
from evoengine.cli.console import Output
from evoengine.cli.history import show
from evoengine.cli.main import COMMANDS
from evoengine.ledger import integrity
from evoengine.ledger.optuna.study import study_note
from evoengine.ledger.ranking import rebuild
from evoengine.ledger.store import open_ledger
from evoengine.ledger.tables import Base
from evoengine.lineage import effects
from evoengine.records import Profile
from evoengine.text import markdown, plain, plain_lines
from evoengine.views.candidate_page import candidate_page
from evoengine.views.candidate_tables import best_line, history_table, ranking
from evoengine.views.tables import Column, Table
from tests.support.ledger_examples import CONFIG, a_figure, add_ranked, start_run
from tests.support.vouch import vouch

HOSTILE = (
    "[/x] [tid] :boom: \x1b[31mred\x1b]0;title\x07 \x9b1m \r\b over \u202egnp.exe\u2066 \u200b <b>![i](http://e.vil/i)"
)
SHOWN = plain(HOSTILE)
FORGED = HOSTILE + "\n99  measured  1 TFLOPS"
KEPT = {
    # what the code decides by, and refuses where it is none of its own words
    "candidates.outcome", "verdicts.outcome", "measurements.kind", "runs.objectives",
    # what joins rows, or is checked against what it names
    "candidates.config_key", "candidates.source_sha256", "binaries.source_sha256", "sources.sha256",
    "verdicts.device",
    # what has it is not ranked
    "measurements.suspect",
    # what other columns are checked against, and what is checked so: add_ranked makes a hostile one
    "binaries.cubin_sha256", "machine_code.sha256",
    # what follows from other columns, and is made again here
    "rankings.problem", "rankings.gpu", "rankings.kind", "rankings.device", "rankings.policy",
}  # fmt: skip
OF_SERVICE = ("tokens", "jobs", "job_events", "executors", "tuner_cache")
"""tables that no command shows the text of; tests/service has what its page does with them"""
COLUMN = {
    "candidates.config": {"family": HOSTILE, "tile_m": FORGED, HOSTILE: 1},
    "runs.conditions": {"libraries": {HOSTILE: FORGED}, "templates": FORGED},
    "runs.gpu_definition": None,  # read back by names and numbers of known fields
    "candidates.parents": [1],
    "candidates.evidence": {"deaths": [{"how": HOSTILE, "alone": True}, {"how": FORGED, "alone": False}]},
    "binaries.warnings": [FORGED],
    "binaries.mix": {HOSTILE: 4},
    "binaries.other_kernels": [
        {"entry": HOSTILE, "registers": 1, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0}
    ],
    "candidates.next_kernels": [
        {"entry": HOSTILE, "grid": [1, 1, 1], "threads": 32, "shared_bytes": 0, "block_yz": [1, 1]}
    ],
    "measurements.terms": {HOSTILE: 1.0},
    "measurements.samples_us": [1.0],
    "measurements.policy": {"launch": "graph", "l2": "cold", "clocks": "boost", "batch": 16},
    "baselines.samples_us": [1.0],
    "baselines.policy": {"launch": "graph", "l2": "cold", "clocks": "boost", "batch": 16},
    "devices.versions": {HOSTILE: HOSTILE},
    "profiles.figures": {HOSTILE: 1.0},
    "profiles.remarks": [FORGED],
    "verdicts.coverage": {"cells": {HOSTILE: 2}, "visited": {HOSTILE: 1}, "missing": [HOSTILE]},
    "verdicts.cases": [
        {"name": HOSTILE, "problem": f"x:{HOSTILE}", "seed": 1, "correct": False, "max_error": 1.0, "mean_error": 1.0,
         "allowed": 1.0, "reason": FORGED}
    ],
}  # fmt: skip
"""of each column of JSON what it may hold, hostile where it is text"""
CALLS = {
    "history": [[], ["--json"], ["--csv", "-"], ["--where", HOSTILE]],
    "best": [[], ["--json"], ["--export", "out"]],
    "show": [["2"], ["2", "--json"], ["2", "--lineage"], ["2", "--source"], ["77"]],
    "report": [[], ["--json"], ["--html", "report.html"]],
    "compare": [["1", "2"], ["1", "2", "--json"], ["1", "77"]],
    "runs": [[], ["--json"]],
    "profile": [["2"]],
    "accuracy": [[], ["--repredict"]],
    "measure": [[]],
    "export": [["run.json"]],
    "search": [["--problem", HOSTILE], ["--gpu", HOSTILE], ["--device", HOSTILE]],
    "verify": [["--config", HOSTILE]],
    "propose": [["--with", "true", "--kernel", HOSTILE], ["--with", "true", "--problem", HOSTILE]],
    "mcp": [["--kernel", HOSTILE]],
    "import": [[HOSTILE]],
    "new": [["--from", HOSTILE, "kernel"]],
    "problems": [[HOSTILE]],
    "gpus": [[HOSTILE]],
    "doctor": [[HOSTILE]],
    "dashboard": [["--port", HOSTILE]],
    "cluster": [["status", "--cluster", HOSTILE]],
    "db": [["backup", f"{HOSTILE}/x"], ["rebuild-study", HOSTILE]],
    "serve": [["--host", HOSTILE]],
    "token": [["revoke", HOSTILE]],
    "claims": [["revoke", HOSTILE]],
    "retune": [["--gpu", HOSTILE]],
    "run": [[HOSTILE], ["--gpu", HOSTILE, HOSTILE]],
    "cubins": [[HOSTILE], [HOSTILE, "--entry", HOSTILE]],
}
"""of each command the arguments to call it with; where it reads a ledger, the hostile one"""
READING = ("history", "best", "show", "report", "compare", "runs", "profile", "measure", "export", "accuracy")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """A ledger of three trials, in two runs, in which every column of text holds HOSTILE."""
    file = tmp_path_factory.mktemp("hostile") / "evo.db"
    with open_ledger(str(file), create=True) as ledger:
        run = start_run(ledger)
        add_ranked(ledger, run, a_figure(40.0))
        add_ranked(ledger, run, a_figure(50.0), CONFIG | {"tile_m": 128}, FORGED, parents=(1,))
        add_ranked(ledger, start_run(ledger), a_figure(30.0), name="other")
        ledger.record_profile(2, Profile("tool", "device", {}, ()))
        with ledger.database.engine.begin() as connection:
            for table in Base.metadata.sorted_tables:
                own = {c.name: _hostile_value(c) for c in table.columns if _is_text(c) and table.name not in OF_SERVICE}
                if own:
                    connection.execute(update(table).values(own))
            vouch(connection)
            integrity.begin_all(connection, integrity.WRITTEN)
        with ledger.database.writing() as session:
            rebuild(session)
    return file


def _is_text(column) -> bool:
    return isinstance(column.type, String | JSON) and str(column) not in KEPT and column.name != "checksum"


def _hostile_value(column):
    if isinstance(column.type, JSON):
        return COLUMN[str(column)]  # a new column of JSON needs an entry
    return (
        FORGED if str(column) not in ("candidates.problem", "candidates.gpu", "runs.problem", "runs.gpu") else HOSTILE
    )


def does_something(text: str) -> list[str]:
    """The characters that a terminal would obey, or that show nothing."""
    return sorted({c for c in text if not c.isprintable() and c != "\n"})


def test_every_command_is_called():
    assert CALLS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_no_command_obeys_what_it_shows(evoengine, hostile, tmp_path, name):
    for arguments in CALLS[name]:
        done = evoengine(name, *arguments, *(["--db", hostile] if name in READING else []), cwd=tmp_path)
        said = done.stdout + done.stderr
        assert done.returncode in (0, 1, 2, 3) and "Traceback" not in said, said
        assert (said and "--source" in arguments) or not does_something(said), (arguments, does_something(said))


@pytest.mark.parametrize("arguments", [["history"], ["best"], ["show", "2"], ["show", "2", "--lineage"], ["report"],
                                       ["compare", "1", "2"], ["history", "--csv", "-"]])  # fmt: skip
def test_hostile_text_is_there_in_full_and_makes_no_row_of_its_own(evoengine, hostile, arguments):
    done = evoengine(*arguments, "--db", hostile)
    assert done.returncode == 0 and SHOWN in done.stdout, done.stderr
    assert not any(line.startswith("99") for line in done.stdout.splitlines())


def test_a_source_is_whole_in_a_pipe_and_escaped_on_a_terminal(evoengine, hostile, monkeypatch, capsys):
    piped = evoengine("show", "2", "--source", "--db", hostile).stdout
    assert f"{FORGED}()".replace("\r", "\n") in piped  # as text files are read
    monkeypatch.setattr("evoengine.cli.console.stdout._force_terminal", True)
    show.callback(2, True, False, str(hostile), False)
    assert f"{plain_lines(FORGED)}()" in capsys.readouterr().out


# ── the parts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def printed(shown, width: int = 2000) -> str:
    console = Output()
    console.file, console.width = StringIO(), width
    console.print(shown)
    return console.file.getvalue()


def test_a_table_and_a_line_and_the_best_so_far_show_text_as_it_is(hostile):
    with open_ledger(str(hostile), create=False) as ledger:
        found = ledger.candidates()
    pages = [ranking({1: found[1]}), history_table(found), candidate_page(found[1]), best_line(found[1]), HOSTILE]
    for page in (*pages, Table([Column(HOSTILE)], [[HOSTILE]], title=HOSTILE)):
        shown = printed(page)
        assert SHOWN in shown and not does_something(shown)


def test_what_does_something_is_seen():
    console = Console(file=StringIO())
    console.print(HOSTILE, markup=False)
    assert does_something(console.file.getvalue())


def test_a_cell_is_one_line_and_a_text_of_several_keeps_them():
    assert plain("a\nb\tc") == r"a\nb\tc"
    assert plain_lines("a\nb\tc\r") == "a\nb       c\\r"


@pytest.mark.parametrize("line", [f"x {SHOWN}", "tile_m 64→128 µs ✓ × – …", "日本語", "\\d+ [a-z] 100%"])
def test_text_that_prints_stays_as_it_is(line):
    assert plain(line) == line


def test_no_module_of_the_commands_makes_tables_or_texts_of_richs_own():
    """Theirs read markup and drop control characters; `Table` and `Output` do neither."""
    folders = [Path(package.__file__).parent for package in (evoengine.cli, evoengine.views)]
    modules = [path for folder in folders for path in folder.glob("*.py")]
    users = {p.stem for p in modules if {"rich.table", "rich.text", "rich.markup"} & imported(p)}
    assert users == {"console", "tables", "progress"}  # which call plain themselves


def imported(path: Path) -> set[str | None]:
    return {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}


# ── the dashboard's notes ───────────────────────────────────────────────────────────────────────────────────────────


def rendered(text: str) -> str:
    """Inline Markdown with tables and bare links, as optuna-dashboard has it, as HTML."""
    markdown_it = pytest.importorskip("markdown_it")
    return markdown_it.MarkdownIt("gfm-like", {"linkify": False}).render(text)


def test_a_note_shows_knobs_as_text(hostile):
    with open_ledger(str(hostile), create=False) as ledger:
        body = study_note(effects(ledger.trials(ranked=True)))
    assert not does_something(body)
    assert not {"<b>", "![i]", "http://", "[tid]"} & set(_unescaped(body)), body


def _unescaped(body: str) -> list[str]:
    """What of the dangerous parts stands in a note without a backslash before it."""
    return [part for part in ("<b>", "![i]", "http://", "[tid]") if part in body]


def test_a_dangerous_part_of_a_note_is_seen():
    assert _unescaped(f"| reason | {HOSTILE} |") == ["<b>", "![i]", "http://", "[tid]"]
    assert not _unescaped(markdown(HOSTILE))


@pytest.mark.parametrize("text", ["![i](http://e.vil/i)", "<img src=x>", "a|b", "`code`", "**bold**", "&lt;", "~~s~~"])
def test_markdown_is_shown_as_it_is(text):
    html = rendered(f"| a | b |\n|---|---|\n| x | {markdown(text)} |")
    assert f"<td>{escape(text)}</td>" in html
    assert f"<td>{escape(text)}</td>" not in rendered(f"| a | b |\n|---|---|\n| x | {text} |")


@pytest.mark.parametrize("longest", range(8))
def test_a_cut_leaves_no_half_of_an_escape(longest):
    cut = markdown("[[[[", longest)
    assert len(cut) <= longest and cut == "\\[" * (len(cut) // 2)
