"""`best`, `show` and `profile` say what was predicted, how good predictions are, and what could not be read."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from evoengine.cli.main import evoengine
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from evoengine.sass import predict
from evoengine.sass.predict import MODEL_VERSION
from evoengine.stages.predict import figure_of, predict_binary
from evoengine.stages.profile import profile_without_gpu
from evoengine.views.candidate_tables import sent_ranking
from evoengine.workloads.base import Target
from tests.stages.predictions import ATTENTION, H100, PROBLEM, figure, made
from tests.support.ledger_examples import a_binary, a_figure, a_verdict, add_ranked, start_run

DEVICE = "model 2 for h100, sustained clock"
UNREAD = "the model cannot read the binary: unknown opcodes: XYZZY"


def call(*arguments, code: int = 0):
    done = CliRunner().invoke(evoengine, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def db(tmp_path):
    """Trial 1 was predicted, trial 2 could not be read, though its formula's figure is far faster; 3 is in between."""
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = start_run(ledger)
        add_ranked(ledger, run, replace(a_figure(100.0), device=DEVICE), name="predicted")
        formula = replace(a_figure(900.0), device="estimate for h100", terms={"predicted": 0.0, "mufu_us": 9.0})
        unread = add_ranked(ledger, run, formula, name="unread")
        ledger.finish(unread, Outcome.ESTIMATED, UNREAD, 0.25, "emulator")
        add_ranked(ledger, run, replace(a_figure(50.0), device=DEVICE), name="slower")
    return tmp_path / "evo.db"


def test_best_ranks_what_could_not_be_read_last_and_marks_it(db):
    done = call("best", "--db", db)
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit()]
    assert [[rank.rstrip("="), trial] for rank, trial in rows] == [["1", "1"], ["2", "3"], ["3", "2"]]
    assert "900.0 est.*" in done.stdout and "100 est." in done.stdout and "100 est.*" not in done.stdout
    assert "the model could not read the binary" in done.stdout
    found = json.loads(call("best", "--top", 3, "--json", "--db", db).stdout)
    assert [(c["trial"], c["model"]) for c in found["trials"]] == [
        (1, "machine code"),
        (3, "machine code"),
        (2, "formula"),
    ]


def test_predictions_that_differ_by_less_than_their_error_are_tied(db):
    with open_ledger(str(db), create=False) as ledger:
        for trial, us in ((1, 25_000.0), (3, 26_000.0)):
            terms = {**a_figure(100.0).terms, "low_us": 0.9 * us, "high_us": 1.1 * us}
            ledger.record_measurement(trial, replace(a_figure(100.0), device=DEVICE, median_us=us, terms=terms))
    found = json.loads(call("best", "--top", 3, "--json", "--db", db).stdout)["trials"]
    assert {c["trial"]: c["tied_with"] for c in found} == {1: [3], 3: [1], 2: []}
    shown = call("best", "--db", db).stdout
    rows = [line.split()[:2] for line in shown.splitlines() if line.lstrip()[:1].isdigit()]
    assert rows == [["1=", "1"], ["2=", "3"], ["3", "2"]]
    assert "= tied with the first" in shown


def test_the_table_says_why_a_prediction_that_is_not_the_fastest_is_first(db):
    with open_ledger(str(db), create=False) as ledger:
        figure = replace(a_figure(101.0), device=DEVICE)
        add_ranked(ledger, start_run(ledger), figure, name="of_more_registers", binary=a_binary(registers=90))
    assert (
        "#1 is not the fastest predicted: of those within 2% of the fastest it uses the fewest registers"
        in " ".join(call("best", "--db", db).stdout.split())
    )


@pytest.mark.parametrize(
    ("error", "shown"), [(0.38, "25,000 → 25,000"), (0.08, "25,432 → 25,400"), (0.002, "25,432 → 25,432")]
)
def test_a_prediction_has_as_many_digits_as_its_error_allows(db, error, shown):
    us, printed = (text.replace(",", "") for text in shown.split(" → "))
    terms = {**a_figure(100.0).terms, "low_us": float(us) / (1 + error), "high_us": float(us) * (1 + error)}
    with open_ledger(str(db), create=False) as ledger:
        figure = replace(a_figure(100.0), device=DEVICE, median_us=float(us), terms=terms)
        ledger.record_measurement(1, figure)
    assert f" {int(printed):,} est." in call("best", "--db", db).stdout


def test_what_a_server_sends_is_shown_with_the_same_digits_and_marks(db):
    with open_ledger(str(db), create=False) as ledger:
        for trial, us in ((1, 25_432.0), (3, 26_432.0)):
            terms = {**a_figure(100.0).terms, "low_us": 0.9 * us, "high_us": 1.1 * us}
            ledger.record_measurement(trial, replace(a_figure(100.0), device=DEVICE, median_us=us, terms=terms))
    sent = json.loads(call("best", "--top", 3, "--json", "--db", db).stdout)["trials"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(sent_ranking(sent))
    rows = [line.split() for line in console.export_text().splitlines()[1:]]
    assert [row[0] for row in rows] == ["1=", "2=", "3"]
    assert [row[4] for row in rows][:2] == ["25,000", "26,000"]


def test_where_all_were_predicted_nothing_is_marked(db):
    with open_ledger(str(db), create=False) as ledger:
        ledger.record_measurement(2, replace(a_figure(75.0), device=DEVICE))
    shown = call("best", "--db", db).stdout
    assert "est.*" not in shown and "could not read" not in shown
    assert json.loads(call("best", "--json", "--db", db).stdout)["trial"] == 1


def test_the_error_of_the_kernels_own_class_stands_beside_predicted_figures(db, monkeypatch, tmp_path):
    table = tmp_path / "validation.toml"
    table.write_text(
        '["wgmma with softmax"]\nn = 24\nmean_error = 0.04\nfactor = 1.1\ndata = "FlashAttention-3, H100"\n'
        '[scalar]\nn = 400\nmean_error = 0.2\nfactor = 1.6\ndata = "convolution, RTX 3090"\n'
    )
    errors = predict.read_errors(table)
    monkeypatch.setattr(predict, "read_errors", lambda: errors)
    line = (
        "wgmma with softmax kernels: mean error 4%, nine of ten within 1.10×, by 24 measured times "
        "(FlashAttention-3, H100)"
    )
    said = call("best", "--db", db).stderr.replace("\n", " ")
    assert line in said and "scalar" not in said
    assert line in call("show", 1, "--db", db).stdout
    assert line not in call("show", 2, "--db", db).stdout


def test_an_error_that_nobody_checked_is_said_to_be_unknown(db, monkeypatch):
    monkeypatch.setattr(predict, "read_errors", dict)
    assert "the error is not known" in call("best", "--db", db).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gemm]\nn = 3\n", "[gemm] is no class of kernels; known are wgmma with softmax, wgmma"),
        ("[scalar]\nn = 3\n", "[scalar] must have n, mean_error, factor, data"),
        ('[scalar]\nn = 0\nmean_error = 0.1\nfactor = 1.2\ndata = "x"\n', "n and factor of at least 1"),
        ('[scalar]\nn = 4\nmean_error = 0.1\nfactor = 0.9\ndata = "x"\n', "n and factor of at least 1"),
        ("scalar = 3\n", "must have n, mean_error, factor, data"),
    ],
)
def test_a_malformed_table_of_errors_says_what_is_wrong(tmp_path, text, said):
    from evoengine.errors import UsageError

    table = tmp_path / "validation.toml"
    table.write_text(text)
    with pytest.raises(UsageError) as error:
        predict.read_errors(table)
    assert said in str(error.value)


def test_the_table_that_ships_can_be_read():
    assert predict.read_errors().keys() <= set(predict.CLASSES)


def test_show_prints_range_clock_bound_and_utilisation(db):
    shown = call("show", 1, "--db", db).stdout
    assert "20,000 to 30,000 µs" in shown and "100 TFLOPS, 11,000 µs" in shown
    assert "sustained, 1.600 GHz: 40,000,000 clocks" in shown
    assert "tensor; 15.5 waves of 2 blocks per SM" in shown
    assert "tensor 72% · MUFU 40%" in shown
    public = json.loads(call("show", 1, "--json", "--db", db).stdout)
    assert (public["range_us"], public["bound"]) == ([20000.0, 30000.0], "tensor")
    assert public["utilisation"] == {"tensor": 0.72, "mufu": 0.4}
    assert (public["model_version"], public["clock"]) == (2, "sustained")


OF_VERSION_1 = {"predicted": 1.0, "low_us": 20e3, "high_us": 30e3, "A_us": 20e3, "B_us": 30e3, "bound_tensor": 1.0}


@pytest.fixture
def old_db(db):
    """Trial 4 was predicted by the model of two hypotheses, before the others were by the present one."""
    with open_ledger(str(db), create=False) as ledger:
        old = replace(a_figure(700.0), device="model for h100", terms=OF_VERSION_1)
        add_ranked(ledger, start_run(ledger), old, name="old")
        ledger.record_measurement(1, replace(a_figure(100.0), device=DEVICE))
    return db


def test_a_figure_of_an_older_model_keeps_its_version_and_both_hypotheses(old_db):
    shown = call("show", 4, "--db", old_db).stdout
    assert "version 1" in shown and "A_us 2e+04" in shown and "B_us 3e+04" in shown
    assert json.loads(call("show", 4, "--json", "--db", old_db).stdout)["model_version"] == 1


def test_figures_of_an_older_model_and_of_another_clock_are_ranked_apart(old_db):
    with open_ledger(str(old_db), create=False) as ledger:
        boosted = replace(a_figure(800.0), device=DEVICE.replace("sustained", "boost"))
        trial = add_ranked(ledger, start_run(ledger), boosted, name="boosted")
    done = call("best", "--db", old_db)
    assert [line.split()[1] for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit()] == [str(trial), "2"]
    assert "by model for h100" in done.stderr + done.stdout
    with open_ledger(str(old_db), create=False) as ledger:
        ledger.record_measurement(1, replace(a_figure(100.0), device=DEVICE))
    done = call("best", "--db", old_db)
    assert [line.split()[1] for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit()] == ["1", "3", "2"]
    assert "by model 2 for h100, boost clock" in (done.stderr + done.stdout).replace("\n", " ")


def test_show_says_why_a_binary_could_not_be_read(db):
    shown = call("show", 2, "--db", db).stdout
    assert UNREAD in shown and "by formula" in shown
    assert json.loads(call("show", 2, "--json", "--db", db).stdout)["reason"] == UNREAD


# ── the page of `profile` ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def binary_db(tmp_path):
    """Trial 1: a wgmma kernel's real binary."""
    contender = made("wgmma")
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = start_run(ledger, problem=str(PROBLEM))
        trial = ledger.add_candidate(run, str(PROBLEM), "h100", contender.config, (), "start", contender.source)
        ledger.record_binary(trial, contender.source, contender.binary)
        ledger.record_verdict(trial, a_verdict())
        ledger.record_measurement(trial, figure(contender).figure)
        ledger.finish(trial, Outcome.ESTIMATED, None, 0.25, "emulator")
    return tmp_path / "evo.db"


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr("evoengine.devices.driver.find_driver", lambda: "no GPU in this test")


def test_profile_shows_where_warps_wait_and_for_what(binary_db, without_gpu):
    done = call("profile", 1, "--db", binary_db)
    assert "by the model of the chip" in done.stderr
    assert f"model {MODEL_VERSION} for h100" in done.stdout and "not observed on a GPU" in done.stdout
    assert "clock, GHz" in done.stdout
    assert "tensor, % busy" in done.stdout and "registers per thread" in done.stdout
    assert "waiting: wgmma, % of warps' clocks" in done.stdout
    kept = call("show", 1, "--db", binary_db).stdout
    assert "waiting: wgmma" in kept and kept.count(" · issued ") >= 5


def test_profile_as_json_names_the_instructions_with_their_reasons(binary_db, without_gpu):
    page = json.loads(call("profile", 1, "--json", "--db", binary_db).stdout)
    figures = page["figures"]
    hot = {name: share for name, share in figures.items() if name.startswith("0x")}
    assert 5 <= len(hot) <= 15
    assert list(hot.values()) == sorted(hot.values(), reverse=True) and 0 < sum(hot.values()) <= 100
    assert all(" · issued " in name and name.endswith("% of waits") for name in hot)
    listed = {line.split("*/")[0].split("/*")[-1] for line in made("wgmma").binary.listing.splitlines() if "/*" in line}
    assert all(name.split()[0].removeprefix("0x").lstrip("0") in {a.lstrip("0") for a in listed} for name in hot)
    waits = [share for name, share in figures.items() if name.startswith("waiting: ")]
    assert sum(waits) == pytest.approx(100)
    assert page["tool"] == "model"


def test_the_page_says_the_same_time_as_the_figure():
    target = Target(ATTENTION, PROBLEM, H100)
    page = profile_without_gpu(target, made("wgmma"))
    of_model = figure_of(predict_binary(target, made("wgmma")), H100, 1.0)
    assert page.figures["predicted time, µs"] == of_model.median_us
    assert page.figures["clocks"] == of_model.terms["clocks"]


def test_of_a_binary_that_cannot_be_read_the_page_is_the_instruction_mix_with_the_reason():
    contender = made("mma")
    strange = contender.binary.listing.replace("FMNMX ", "XYZZY ")
    unreadable = replace(contender, binary=replace(contender.binary, listing=strange))
    page = profile_without_gpu(Target(ATTENTION, PROBLEM, H100), unreadable)
    assert page.tool == "static" and "tensor, % of instructions" in page.figures
    assert any("XYZZY" in remark for remark in page.remarks)


def test_a_search_without_a_gpu_ranks_by_predictions(searched, evoengine):
    folder, done = searched
    assert "ranked by times predicted from the machine code" in done.stderr
    found = json.loads(evoengine("best", "--top", 8, "--json", "--db", folder / "evo.db").stdout)["trials"]
    assert found and {c["model"] for c in found} == {"machine code"}
    assert all(c["range_us"][0] <= c["median_us"] <= c["range_us"][1] for c in found)
    assert all(c["utilisation"]["issue"] > 0 for c in found)


def test_what_is_missing_for_predictions_is_known_before_a_search(monkeypatch):
    from evoengine.stages import predict
    from evoengine.tuning import setup

    monkeypatch.setattr(predict, "disassembler", lambda: None)
    assert "nvdisasm" in setup.why_no_predictions(H100, None)
