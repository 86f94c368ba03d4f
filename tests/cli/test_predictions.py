"""`best`, `show` and `profile` say what was predicted, how good predictions are, and what could not be read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from evoengine.sass import validation
from evoengine.stages.predict import figure_of, predict_binary
from evoengine.stages.profile import profile_without_gpu
from evoengine.workloads.base import Target
from tests.support.ledger_examples import a_figure, a_verdict, add_ranked, start_run
from tests.support.predictions import ATTENTION, H100, PROBLEM, figure, made

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
        add_ranked(ledger, run, replace(a_figure(100.0), device="model for h100"), name="predicted")
        formula = replace(a_figure(900.0), device="estimate for h100", terms={"predicted": 0.0, "mufu_us": 9.0})
        unread = add_ranked(ledger, run, formula, name="unread")
        ledger.finish(unread, Outcome.ESTIMATED, UNREAD, 0.25, "emulator")
        add_ranked(ledger, run, replace(a_figure(50.0), device="model for h100"), name="slower")
    return tmp_path / "evo.db"


def test_best_ranks_what_could_not_be_read_last_and_marks_it(db):
    done = call("best", "--db", db)
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit()]
    assert rows == [["1", "1"], ["2", "3"], ["3", "2"]]
    assert "900.0 est.*" in done.stdout and "100.0 est." in done.stdout and "100.0 est.*" not in done.stdout
    assert "the model could not read the binary" in done.stdout
    found = json.loads(call("best", "--top", 3, "--json", "--db", db).stdout)
    assert [(c["trial"], c["model"]) for c in found["trials"]] == [
        (1, "machine code"),
        (3, "machine code"),
        (2, "formula"),
    ]


def test_where_all_were_predicted_nothing_is_marked(db):
    with open_ledger(str(db), create=False) as ledger:
        ledger.record_measurement(2, replace(a_figure(75.0), device="model for h100"))
    shown = call("best", "--db", db).stdout
    assert "est.*" not in shown and "could not read" not in shown
    assert json.loads(call("best", "--json", "--db", db).stdout)["trial"] == 1


def test_the_models_validated_error_stands_beside_predicted_figures(db, monkeypatch, tmp_path):
    table = tmp_path / "validation.toml"
    table.write_text(
        'date = "2026-01-31"\nnote = "no kernel of Hopper among them"\n'
        "[gemm.RTX3090]\nrho = 0.8\nwithin_1_25 = 0.5\nn = 100\n[conv.A100]\nrho = 0.9\nwithin_1_25 = 0.7\nn = 300\n"
    )
    known = validation.read_validation(table)
    monkeypatch.setattr(validation, "read_validation", lambda: known)
    line = (
        "model checked against 400 recorded times (gemm, conv on RTX3090, A100; 2026-01-31): mean Spearman's ρ 0.85, "
        "65% within 1.25×; no kernel of Hopper among them"
    )
    assert line in call("best", "--db", db).stderr.replace("\n", " ")
    assert line in call("show", 1, "--db", db).stdout
    assert line not in call("show", 2, "--db", db).stdout


def test_an_error_that_nobody_checked_is_said_to_be_unknown(db, monkeypatch):
    monkeypatch.setattr(validation, "read_validation", lambda: None)
    assert "its error is not known" in call("best", "--db", db).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gemm.A100]\nrho = 0.8\n", "[gemm.A100] must have rho, within_1_25, n"),
        ("[gemm.A100]\nrho = 0.8\nwithin_1_25 = 0.5\nn = 0\n", "n of at least 1"),
        ("[gemm.A100]\nrho = 0.8\nwithin_1_25 = 0.5\nn = 3\n", "has no date"),
    ],
)
def test_a_malformed_table_of_errors_says_what_is_wrong(tmp_path, text, said):
    from evoengine.errors import UsageError

    table = tmp_path / "validation.toml"
    table.write_text(text)
    with pytest.raises(UsageError) as error:
        validation.read_validation(table)
    assert said in str(error.value)


def test_the_table_that_ships_can_be_read():
    assert validation.error_line().startswith("model ")


def test_show_prints_range_bound_utilisation_and_both_hypotheses(db):
    shown = call("show", 1, "--db", db).stdout
    assert "20,000.0 to 30,000.0 µs (hypothesis A 20,000.0 µs, hypothesis B 30,000.0 µs)" in shown
    assert "tensor; 15.5 waves of 2 blocks per SM" in shown
    assert "tensor 72% · MUFU 40%" in shown
    public = json.loads(call("show", 1, "--json", "--db", db).stdout)
    assert (public["range_us"], public["bound"]) == ([20000.0, 30000.0], "tensor")
    assert public["utilisation"] == {"tensor": 0.72, "mufu": 0.4}


def test_show_says_why_a_binary_could_not_be_read(db):
    shown = call("show", 2, "--db", db).stdout
    assert UNREAD in shown and "by formula" in shown and "hypothesis" not in shown
    assert json.loads(call("show", 2, "--json", "--db", db).stdout)["reason"] == UNREAD


# ── the page of `profile` ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def binary_db(tmp_path):
    """Trial 1: a wgmma kernel's real binary."""
    contender = made("wgmma")
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = start_run(ledger, problem=str(PROBLEM))
        trial = ledger.add_candidate(run, str(PROBLEM), "h100", contender.config, (), "start")
        ledger.record_source(trial, contender.source)
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
    assert "model for h100" in done.stdout and "not observed on a GPU" in done.stdout
    assert "hypothesis A" in done.stdout
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
    assert page.figures["hypothesis B, µs"] == of_model.terms["B_us"]


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
    said: list[str] = []
    assert "nvdisasm" in setup.prepare_model(H100, said.append)
    assert all("building" in line for line in said)
