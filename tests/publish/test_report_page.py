"""The page of charts: what each section shows or why it shows nothing, kinds told apart, hostile text inert."""

from __future__ import annotations

import hashlib
import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.ranking import ComparisonKey, Timed
from evoengine.ledger.store import open_ledger
from evoengine.publish.report import overview as overview_module
from evoengine.publish.report import page as page_module
from evoengine.publish.report import trial_charts
from evoengine.publish.report.page import BEGINNING, is_unchanged, page, write_page
from evoengine.publish.report.style import Section, category_axis, label, styles
from evoengine.records import Kind, Measurement, Outcome
from evoengine.text import plain
from evoengine.tuning.report import write_report
from tests.publish.report_examples import HOSTILE, TITLE, make_ledger
from tests.support.browser import needs_browser, opened
from tests.support.ledger_examples import GPU, POLICY, PROBLEM, SUSTAINED, a_figure, add_ranked, start_run

SECTIONS = (
    "convergence", "prediction", "roofline", "effects", "pairs", "outcomes", "lineage", "sources", "errors", "finals",
)  # fmt: skip
CHARTS = tuple(name for name in SECTIONS if name != "sources")  # which is a table


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("report") / "evo.db"
    make_ledger(file)
    return file


@pytest.fixture(scope="module")
def report(db) -> Path:
    file = db.parent / "new" / "report.html"
    done = CliRunner().invoke(evoengine, ["report", "--html", str(file), "--db", str(db)], catch_exceptions=False)
    assert done.exit_code == 0 and f"wrote {PROBLEM} on h100, 25 trials, to {file}" in done.stderr
    return file


def charts(file: Path) -> dict[str, dict]:
    """The charts as the page's script reads them."""
    (text,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', file.read_text())
    return json.loads(text)


def sections(file: Path) -> dict[str, str]:
    return dict(re.findall(r'<section id="(\w+)">(.*?)</section>', file.read_text(), re.DOTALL))


def names(chart: dict) -> list[str]:
    return [trace["name"] for trace in chart["data"] if "name" in trace]


# ── what is drawn ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_which_source_was_believed_when_is_listed(report):
    text = sections(report)["sources"]
    assert text.count("4 of 25") == 2 and text.count("<td>5–7, 10</td>") == 2
    assert "<td>the model</td>" in text and f"<td>{escape(plain(HOSTILE))}</td>" in text


def test_every_section_is_there_and_has_its_chart(report):
    assert tuple(sections(report)) == SECTIONS
    assert tuple(charts(report)) == CHARTS


def test_convergence_has_every_kind_of_figure_with_its_best_the_baselines_and_the_roofline(report):
    chart = charts(report)["convergence"]
    assert names(chart) == [
        "measured", "best measured", "recorded", "best recorded", "predicted", "best predicted", "by formula",
        "best by formula", label(f"baseline {HOSTILE}, measured"), "baseline cuDNN, measured", "roofline",
    ]  # fmt: skip
    measured, best = chart["data"][:2]
    assert len(measured["x"]) == 20 and min(measured["x"]) == 1
    assert best["y"] == sorted(best["y"]) and best["x"][-1] == 25


def test_kinds_differ_in_name_colour_and_shape(report):
    traces = [t for t in charts(report)["convergence"]["data"] if t["mode"] == "markers"]
    for looked in ("name", "color", "symbol"):
        assert len({t[looked] if looked == "name" else t["marker"][looked] for t in traces}) == len(traces) == 4


def test_texts_that_are_cut_to_the_same_stay_two():
    axis = category_axis(["x" * 50 + "a", "x" * 50 + "b"])
    assert axis["tickvals"] == [0, 1] and len(set(axis["ticktext"])) == 1 and len(axis["ticktext"][0]) == 36


def test_sorts_of_one_kind_have_looks_of_their_own():
    sorts = [ComparisonKey(Kind.MEASURED, None, device, policy) for device in "ab" for policy in (POLICY, SUSTAINED)][
        :3
    ]
    sorts += [ComparisonKey(Kind.ESTIMATED, model, "m", None) for model in ("machine code", "formula")]
    found = styles(sorts).values()
    for looked in ("name", "colour", "symbol"):
        assert len({getattr(look, looked) for look in found}) == len(sorts)
    assert [look.name for look in found][3:] == ["predicted", "by formula"]


def test_predictions_stand_against_what_was_measured_and_recorded_apart(report):
    data, text = charts(report)["prediction"]["data"], sections(report)["prediction"]
    assert [t["name"] for t in data[:4]] == [
        "predicted and measured", "predicted and recorded", "by formula and measured", "by formula and recorded",
    ]  # fmt: skip
    assert "predicted and measured" in text and "20 of 20 within 1.25×" in text and "0 of 4 within 1.25×" in text


def test_effects_lineage_outcomes_errors_and_finals_say_what_the_ledger_holds(report):
    drawn = charts(report)
    assert {"tile_m 32→64", "stages 1→2"} <= set(drawn["effects"]["layout"]["yaxis"]["ticktext"])
    assert drawn["lineage"]["data"][0]["x"][-1] == "#23" and "<td>23</td>" in sections(report)["lineage"]
    stacks = {t["name"]: t["y"] for t in drawn["outcomes"]["data"]}
    assert {name: sum(y) for name, y in stacks.items()} == {"measured": 20, "incorrect": 4, "pending": 1}
    boxes, failed = drawn["errors"]["data"]
    assert drawn["errors"]["layout"]["yaxis"]["ticktext"] == ["ragged", label(HOSTILE)]
    assert (boxes["y"], failed["x"], failed["y"]) == ([0, 1], [5.0] * 4, [0] * 4)
    assert "4 times a case failed without a finite error" in sections(report)["errors"]
    assert [t["name"] for t in drawn["finals"]["data"]] == ["1. #23", "2. #22", "3. #21"]
    assert [len(t["y"]) for t in drawn["finals"]["data"]] == [20, 20, 20]
    assert len(drawn["pairs"]["data"]) == len(drawn["pairs"]["layout"]["updatemenus"][0]["buttons"]) > 2


def test_a_number_of_a_pair_is_that_of_its_best_trial(report, db):
    chart = charts(report)["pairs"]
    buttons = chart["layout"]["updatemenus"][0]["buttons"]
    n = next(n for n, button in enumerate(buttons) if button["label"] == "stages and tile_m")
    trace, axes = chart["data"][n], buttons[n]["args"][1]
    assert (axes["xaxis.title.text"], axes["yaxis.title.text"]) == ("stages", "tile_m")
    with open_ledger(str(db), create=False) as ledger:
        times = {t.trial: t.measurement.compared_us for t in ledger.trials(ranked=True)}
        configs = {t.trial: t.config for t in ledger.trials(ranked=True)}
    least = min(times.values())
    for y, row in zip(axes["yaxis.ticktext"], trace["z"], strict=True):
        for x, value in zip(axes["xaxis.ticktext"], row, strict=True):
            cell = [times[t] for t, c in configs.items() if (str(c["stages"]), str(c["tile_m"])) == (x, y)]
            assert value == pytest.approx(100 * (min(cell) / least - 1), abs=1e-3) if cell else value is None


def test_of_many_points_a_part_is_drawn_with_all_improvements(monkeypatch):
    monkeypatch.setattr(trial_charts, "MAX_POINTS", 10)
    sort = ComparisonKey(Kind.MEASURED, None, "H200", POLICY)
    times = [Timed(n, sort, 100.0 if n % 7 else 90.0 - n, None) for n in range(1, 41)]
    best = trial_charts._improvements(times)
    assert [t.trial for t in best] == [1, 7, 14, 21, 28, 35]
    drawn = {t.trial for t in trial_charts._thinned(times, best)}
    assert drawn == {1, 5, 9, 13, 17, 21, 25, 29, 33, 37} | {7, 14, 28, 35}
    assert trial_charts._thinned(times[:10], best[:2]) == times[:10]


def test_of_many_trials_the_last_are_drawn_and_the_page_says_so(db, tmp_path, monkeypatch):
    monkeypatch.setattr(overview_module, "MOST_TRIALS", 10)
    monkeypatch.setattr("evoengine.tuning.report.MOST_TRIALS", 10)
    write_report(tmp_path / "last.html", db=str(db))
    assert min(charts(tmp_path / "last.html")["convergence"]["data"][0]["x"]) >= 16
    assert "25 in 1 run; charts of trials show the last 10" in (tmp_path / "last.html").read_text()


# ── nothing to show ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_sections_with_nothing_to_show_say_why(tmp_path):
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = start_run(ledger)
        trial = ledger.add_candidate(run, "unknown:m4", GPU, {"tile": 1}, (), None)
        ledger.finish(trial, Outcome.UNCOMPILABLE, "no", None, None)
        ledger.add_candidate(start_run(ledger, problem="unknown:m4"), "unknown:m4", GPU, {"tile": 1}, (), None)
    write_report(tmp_path / "empty.html", db=str(tmp_path / "evo.db"))
    assert tuple(charts(tmp_path / "empty.html")) == ("outcomes",)
    said = {name: text for name, text in sections(tmp_path / "empty.html").items() if name != "outcomes"}
    assert all(re.search("<p>(Nothing to|There were no finals)", text) for text in said.values()), said
    assert "the workload unknown of unknown:m4 is not known here" in said["roofline"]


def test_a_prediction_alone_is_drawn_without_what_was_measured(tmp_path):
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        add_ranked(ledger, start_run(ledger), a_figure(40.0))
    write_report(tmp_path / "one.html", db=str(tmp_path / "evo.db"))
    assert set(charts(tmp_path / "one.html")) == {"convergence", "roofline", "outcomes", "errors"}
    assert names(charts(tmp_path / "one.html")["convergence"]) == ["predicted", "best predicted", "roofline"]
    assert "was proposed without a parent" in sections(tmp_path / "one.html")["lineage"]


def test_times_without_operations_are_drawn_as_runs_per_second(tmp_path):
    problem = "recorded:convolution"
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = start_run(ledger, problem=problem)
        for us in (20.0, 10.0):
            trial = ledger.add_candidate(run, problem, GPU, {"block": us}, (), None)
            ledger.record_measurement(trial, Measurement(Kind.RECORDED, "A100", None, us))
            ledger.finish(trial, Outcome.RECORDED, None, None, "A100")
    write_report(tmp_path / "recorded.html", db=str(tmp_path / "evo.db"))
    chart = charts(tmp_path / "recorded.html")["convergence"]
    assert chart["layout"]["yaxis"]["title"]["text"] == "runs per second" and names(chart)[0] == "recorded"
    assert chart["data"][0]["y"] == [50000.0, 100000.0]
    assert "not known" in sections(tmp_path / "recorded.html")["roofline"]


def test_a_ledger_without_such_a_trial_leaves_no_file(db, tmp_path):
    with pytest.raises(NothingFound):
        write_report(tmp_path / "none.html", gpu="a100", db=str(db))
    assert list(tmp_path.iterdir()) == []


# ── hostile text ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_text_of_the_ledger_is_escaped_in_the_page_and_in_the_charts(report):
    text = report.read_text()
    body, _, _ = text.partition('<script type="application/json"')
    assert "<img" not in text and text.count("<script") == text.count("</script>") == 3
    assert escape(plain(HOSTILE)) in body and "javascript:" not in re.sub(re.escape(escape(plain(HOSTILE))), "", body)
    (embedded,) = re.findall(r'id="charts">(.*?)</script>', text)
    assert not set(embedded) & set("<>&\u2028")
    assert all("<img" not in part for part in _texts(charts(report)))


def _texts(value) -> list[str]:
    if isinstance(value, dict):
        return [t for item in value.values() for t in _texts(item)]
    if isinstance(value, list):
        return [t for item in value for t in _texts(item)]
    return [value] if isinstance(value, str) else []


def test_nothing_but_the_pages_own_scripts_may_run():
    text = page("title", [], [Section("a", "A", "text", {"data": [{"name": "</script>"}]})], "plotly();")
    (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-eval" not in policy
    assert policy.count("sha256-") == 2 and "unsafe-inline" not in policy.split(";")[1]


@pytest.mark.parametrize("script", ["x </SCRIPT>", "<!-- x"])
def test_a_script_that_would_end_early_is_refused(script):
    with pytest.raises(ValueError, match="cannot stand in a page"):
        page("title", [], [], script)


def test_numbers_that_json_does_not_know_are_null():
    assert page_module._json({"a": [float("nan"), float("inf"), 1.23456789]}) == '{"a":[null,null,1.23457]}'


# ── the file ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_report_takes_the_place_of_an_earlier_one(report, db):
    before = report.read_bytes()
    assert before.startswith(BEGINNING.encode()) and is_unchanged(before)
    write_report(report, db=str(db))
    assert is_unchanged(report.read_bytes()) and list(report.parent.iterdir()) == [report]


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"my notes", "it exists and is not a report"),
        (b"", "it exists and is not a report"),
        (BEGINNING.encode(), "has been changed"),
        (None, "has been changed"),
    ],
)
def test_another_file_is_never_written_over(db, tmp_path, contents, said):
    file = tmp_path / "report.html"
    if contents is None:
        write_page(file, page("title", [], [], "plotly();"))
        contents = file.read_bytes().replace(b"title", b"other")
    file.write_bytes(contents)
    digest = hashlib.sha256(contents).hexdigest()
    done = CliRunner().invoke(evoengine, ["report", "--html", str(file), "--db", str(db)])
    assert done.exit_code and said in str(done.exception)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == digest and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--html", "."], "it is a folder; name a file in it"),
        (["--html", "/dev/null"], "not a regular file"),
        (["--html", "/proc/none/report.html"], "cannot write /proc/none/report.html"),
        (["--html", "report.html", "--json"], "--html and --json contradict each other"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(db, arguments, said):
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(evoengine, ["report", *arguments, "--db", str(db)], catch_exceptions=False)


# ── a real browser ──────────────────────────────────────────────────────────────────────────────────────────────────


class _Doing(HTMLParser):
    """Collects what text of the ledger would have become, had it not stayed text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        links = [value or "" for name, value in attributes if name in ("href", "xlink:href", "src")]
        if tag == "img" or any(name.startswith("on") for name, _ in attributes):
            self.found.append(self.get_starttag_text() or tag)
        self.found += [link for link in links if not link.startswith(("#", "data:image/png;base64,"))]


def doing(dom: str) -> list[str]:
    parser = _Doing()
    parser.feed(dom)
    return parser.found


def test_text_that_became_more_is_seen():
    assert len(doing(HOSTILE[HOSTILE.index("<img") :])) == 3
    assert doing(escape(HOSTILE)) == []


@needs_browser
def test_a_browser_draws_every_chart_without_an_error_and_shows_hostile_text_as_text(report, tmp_path):
    seen, console = opened(report.as_uri(), tmp_path / "profile")
    assert console == []
    assert f'data-drawn="{len(CHARTS)}"' in seen
    assert seen.count('class="main-svg"') >= 2 * len(CHARTS)
    assert f"<title>{TITLE}</title>" in seen and doing(seen) == []
    for text in ("by formula", "baseline cuDNN, measured", "tile_m 32→64", "#23"):
        assert text in seen


@needs_browser
def test_a_script_from_elsewhere_does_not_run_and_is_seen_on_the_console(tmp_path):
    text = page("title", [], [Section("a", "A", "text", {"data": [], "layout": {}, "height": 1})], "var Plotly = {};")
    (tmp_path / "page.html").write_text(text.replace("<h1>", "<script>document.title = 'owned'</script><h1>"))
    seen, console = opened((tmp_path / "page.html").as_uri(), tmp_path / "profile")
    assert "<title>title</title>" in seen and "data-drawn" not in seen.partition("<main>")[0]
    assert any("Content Security Policy" in line for line in console)
    assert any("newPlot is not a function" in line for line in console)
