"""The model held against measured times: what is counted, what is said of data at fault, what chose the constants."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import accuracy_page, fast_cu, hopper_accuracy
from evoengine.accuracy.page import Row, Summary, as_toml, class_errors, page
from evoengine.accuracy.predictions import kernel_of
from evoengine.cli.main import evoengine
from evoengine.errors import UsageError
from evoengine.ledger.store import open_ledger
from evoengine.records import Kind, Outcome
from evoengine.sass import chip, predict
from evoengine.sass.chip import Clock
from evoengine.sass.predict import MODEL_VERSION
from tests.benchmarks.conftest import CONFIGS, DESCRIPTION, made_up_us
from tests.stages.predictions import PROBLEM, made
from tests.support.ledger_examples import a_figure, a_verdict, start_run

ROW = Row("gemms", "k", "512^3", "h100", "boost", 100.0, 110.0, "wgmma", "tensor")


@pytest.fixture(autouse=True)
def no_kernel_of_another_test():
    kernel_of.cache_clear()


def call(*arguments, code: int = 0):
    done = CliRunner().invoke(evoengine, ["accuracy", *map(str, arguments)])
    assert (done.exit_code or done.return_value or 0) == code, done.output
    return done


def refused(*arguments) -> str:
    error = CliRunner().invoke(evoengine, ["accuracy", *map(str, arguments)]).exception
    assert isinstance(error, UsageError) and error.exit_code == 2
    return str(error)


# ── what is counted ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_that_chose_a_constant_count_in_no_error():
    rows = [ROW, replace(ROW, predicted_us=90.0), replace(ROW, predicted_us=500.0, fitted=True)]
    found = class_errors(rows)["wgmma"]
    assert (found.n, found.mean_error, found.data) == (2, pytest.approx(0.1), "gemms on h100")
    assert "wgmma" not in class_errors([replace(ROW, fitted=True)])


def test_nine_of_ten_times_drawn_with_the_spread_of_some_lie_within_the_factor():
    random = np.random.default_rng(0)
    drawn = [replace(ROW, predicted_us=100 * float(np.exp(0.1 * random.standard_normal()))) for _ in range(2000)]
    factor = class_errors(drawn)["wgmma"].factor
    assert np.mean([1 / factor <= row.predicted_us / 100 <= factor for row in drawn]) == pytest.approx(0.9, abs=0.02)


def test_one_row_far_off_does_not_widen_the_factor_of_many():
    rows = [replace(ROW, predicted_us=100 + n % 10) for n in range(60)]
    assert class_errors([*rows, replace(ROW, predicted_us=5.0)])["wgmma"].factor == class_errors(rows)["wgmma"].factor


def test_few_rows_give_a_wider_factor_than_many_of_the_same_error():
    few, many = (class_errors([ROW, replace(ROW, predicted_us=90.0)] * n)["wgmma"].factor for n in (1, 50))
    assert few > 1.05 * many


def test_a_summary_has_the_worst_error_with_its_sign_and_the_order():
    rows = [replace(ROW, measured_us=us, predicted_us=us * by) for us, by in ((10, 1.1), (20, 0.7), (40, 1.0))]
    found = Summary.of(rows)
    assert (found.worst, found.rho) == (pytest.approx(-0.3), pytest.approx(1.0))
    assert found.interval[0] <= found.mean_error <= found.interval[1]
    assert Summary.of(rows[:2]).rho is None


def test_the_table_of_errors_can_be_read_back(tmp_path):
    file = tmp_path / "validation.toml"
    file.write_text(as_toml(class_errors([ROW, replace(ROW, kernel_class="scalar")])))
    found = predict.read_errors(file)
    assert found["scalar"].n == 1 and found["wgmma"].mean_error == pytest.approx(0.1, abs=1e-3)


def test_the_page_marks_what_a_constant_was_fitted_on():
    assert "gemms (a constant was fitted on these)" in page([replace(ROW, fitted=True), ROW])


def test_the_largest_errors_are_those_of_rows_that_no_constant_was_fitted_on():
    fitted = replace(ROW, kernel="chose a rate", predicted_us=500.0, fitted=True)
    worst = page([ROW, fitted]).partition("## Largest errors")[2].partition("\n## ")[0]
    assert "| gemms, h100 | k |" in worst and "chose a rate" not in worst
    assert "chose a rate" in page([fitted]).partition("## Largest errors")[2].partition("\n## ")[0]


def test_the_page_of_accuracy_is_of_this_version_and_of_the_errors_that_stand_beside_predictions():
    text = accuracy_page.PAGE.read_text()
    assert f"Version {MODEL_VERSION} of the model" in text
    table = text.partition("## By class")[2].partition("\n## ")[0]
    rows = [[cell.strip(" %×") for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]
    drawn = {name: (n, float(mean), float(factor)) for name, n, mean, _, _, factor in rows[2:]}
    assert drawn == {
        e.name: (f"{e.n:,}", pytest.approx(100 * e.mean_error, abs=0.06), pytest.approx(e.factor, abs=0.006))
        for e in predict.read_errors().values()
    }


# ── what chose the constants ────────────────────────────────────────────────────────────────────────────────────────


def test_no_class_is_judged_by_times_that_chose_a_rate():
    table = tomllib.loads(chip.FILE.read_text())
    places = [table["all"], *table["arch"].values(), *table["gpu"].values()]
    chosen = {source for rates in places for _, _, status, source in rates.values() if status in ("fitted", "inferred")}
    assert chosen <= accuracy_page.CHOSE.keys()
    judged = {name for error in predict.read_errors().values() for name in error.data.split("; ")}
    sets = {name.rpartition(" on ")[0] for name in judged}
    assert sets and not sets & {name for chose in accuracy_page.CHOSE.values() for name in chose}


def test_no_rate_of_hopper_s_parts_is_fitted_to_times_of_kernels():
    statuses = {name: rate[2] for name, rate in tomllib.loads(chip.FILE.read_text())["arch"]["sm_90"].items()}
    assert statuses["hgmma_turns"] == statuses["hgmma_mufu_loss"] == "measured" and "fitted" not in statuses.values()


# ── Hopper's sets ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("note", "clock"),
    [
        ("not locked, power limited", "boost"),
        ("", "boost"),
        ("locked -lgc 1110, mem 1512", "locked:1110"),
        ("locked at 1500 MHz", "locked:1500"),
    ],
)
def test_a_note_on_the_clock_is_read_and_none_means_not_locked(note, clock):
    assert hopper_accuracy.clock_of(note) == Clock.parse(clock)


def test_a_row_with_machine_code_that_is_left_out_is_named_with_exit_code_1(tmp_path, capsys):
    (tmp_path / "fast_cu").mkdir()
    (tmp_path / "fast_cu" / "measured.csv").write_text(
        "kernel,source_file,problem,us,clock_note\nK1,matmul_1.cuh,4096^3,4000.0,not locked\n"
    )
    (tmp_path / hopper_accuracy.FA3_ROWS).write_text(
        "profile,B,S,H,D,causal,clock_mhz,ncu_us\nlarge,64,512,16,128,0,1500,268.3\n"
    )
    assert hopper_accuracy.main(["--data", str(tmp_path), "--cubins", str(tmp_path)]) == 1
    assert "missed: fa3 d128_128x176, b64,h16,s512,d128,fp16" in capsys.readouterr().err


def test_data_that_are_not_there_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        hopper_accuracy.main(["--data", str(tmp_path), "--cubins", str(tmp_path)])
    assert stopped.value.code == 2 and hopper_accuracy.FA3_ROWS in capsys.readouterr().err


def test_a_hilbert_curve_deals_every_tile_out_once_and_goes_from_neighbour_to_neighbour():
    space = fast_cu.hilbert_space(16, 16, 64)
    tiles = [int(tile) for step in range(fast_cu.SPACE_LENGTH) for tile in space[:, step] if tile >= 0]
    assert sorted(tiles) == sorted(x << 16 | y for x in range(16) for y in range(16))
    steps = [abs((a >> 16) - (b >> 16)) + abs((a & 0xFFFF) - (b & 0xFFFF)) for a, b in pairwise(tiles)]
    assert set(steps) == {1}


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_of_kernels_gives_the_page_and_a_row_for_each_configuration(make, tmp_path):
    folder = make()
    done = call("--kernels", folder, "--jobs", 1, "--out", tmp_path / "page.md")
    assert "no clock is stated, so it is assumed not to be locked" in done.stderr
    text = (tmp_path / "page.md").read_text()
    assert "| scale | rtx3090 | sustained | 6 |" in text
    found = json.loads(call("--kernels", folder, "--jobs", 1, "--json").stdout)
    assert [row["measured_us"] for row in found["rows"]] == [made_up_us(config) for config in CONFIGS]
    assert all(row["predicted_us"] > 0 and row["bound"] for row in found["rows"])


def test_rows_that_contradict_each_other_are_shown_and_the_first_counts(make):
    rows = [{"config": CONFIGS[0], "time_us": us} for us in (10.0, 10.1, 14.0)]
    done = call("--kernels", make(of_gpu={"rows": rows, "clock": "locked:1500"}), "--jobs", 1, "--json")
    assert "row 2: 10.1 µs, as 10 µs of an earlier row" in done.stderr.replace("\n", " ")
    assert "row 3: 14 µs, which contradicts 10 µs" in done.stderr.replace("\n", " ")
    [row] = json.loads(done.stdout)["rows"]
    assert (row["measured_us"], row["clock"]) == (10.0, "locked:1500")


def test_a_text_that_the_compiler_rejects_is_named_with_its_line_and_exit_code_1(make):
    folder = make()
    (folder / "scale" / "kernel.cu").write_text('extern "C" __global__ void scale(float *out) { nonsense; }')
    done = call("--kernels", folder, "--jobs", 1, code=1)
    assert 'kernel.cu(3): error: identifier "nonsense" is undefined' in done.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grid": []}, "grid has 0 dimensions"),
        ({"arguments": [{"name": "s", "kind": "struct", "bytes": 0, "parts": []}]}, "a struct has 1 to 32764"),
        ({"arguments": [{"name": "p", "kind": "pointer", "dtype": "int8"}]}, "known are buffer, scalar, struct"),
        ({"arguments": [{"name": "b", "dtype": "float5", "elements": 1}]}, "and vectors as char2"),
    ],
)
def test_a_launch_at_fault_is_named_with_exit_code_1(make, changes, said):
    done = call("--kernels", make(**changes), code=1)
    assert said in (done.stderr + done.output).replace("\n", " ")


def test_a_clock_that_is_none_is_named(make):
    done = call("--kernels", make(of_gpu={"clock": "fast"}), code=1)
    assert "unknown clock 'fast'" in done.output.replace("\n", " ")


def test_vectors_and_structs_are_read(make):
    """The same launch with its scalars in a struct, and its input as float2."""
    text = """
struct Scale { float by; int n; };
extern "C" __global__ void scale(float *out, const float2 *in, Scale s) {
    int i = blockIdx.x * block + threadIdx.x;
    if (i < s.n) out[i] = in[i / 2].x * s.by + repeat;
}
"""
    out, given, *_ = DESCRIPTION["arguments"]
    parts = [
        {"name": "by", "kind": "scalar", "dtype": "float32", "value": 0.5, "offset": 0},
        {"name": "n", "kind": "scalar", "dtype": "int32", "value": 4096, "offset": 4},
    ]
    arguments = [
        out, given | {"dtype": "float2", "elements": 2048}, {"name": "s", "kind": "struct", "bytes": 8, "parts": parts},
    ]  # fmt: skip
    folder = make(text=text, arguments=arguments, constants=[], grid=["4096 // block"])
    done = call("--kernels", folder, "--jobs", 1, "--json")
    assert len(json.loads(done.stdout)["rows"]) == len(CONFIGS)


def test_options_that_do_not_go_together_and_a_folder_that_is_not_there_are_refused(tmp_path):
    assert "require --kernels" in refused("--samples", 3)
    assert "--repredict takes only" in refused("--repredict", "--kernels", tmp_path)
    assert "there is no folder" in refused("--kernels", tmp_path / "none")
    assert "there is no folder" in refused("--out", tmp_path / "none" / "page.md")


# ── a ledger's own figures ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def db(tmp_path):
    """Trial 1 was measured; trial 2, the same kernel, was predicted by the model of two hypotheses."""
    contender, path = made("wgmma"), tmp_path / "evo.db"
    old = {"predicted": 1.0, "low_us": 90.0, "high_us": 99.0, "A_us": 90.0, "B_us": 99.0}
    predicted = replace(a_figure(50.0), device="model for h100", terms=old)
    with open_ledger(str(path), create=True) as ledger:
        run = start_run(ledger, problem=str(PROBLEM))
        for figure, outcome in ((a_figure(60.0, Kind.MEASURED), Outcome.MEASURED), (predicted, Outcome.ESTIMATED)):
            trial = ledger.add_candidate(run, str(PROBLEM), "h100", contender.config, (), "start", contender.source)
            ledger.record_binary(trial, contender.source, contender.binary)
            ledger.record_verdict(trial, a_verdict())
            ledger.record_measurement(trial, figure)
            ledger.finish(trial, outcome, None, 0.25, "emulator")
    return path


def test_own_measurements_stand_beside_predictions_at_the_clock_they_were_measured_with(db):
    [row] = json.loads(call("--db", db, "--json").stdout)["rows"]
    assert (row["kernel"], row["clock"], row["kernel_class"]) == ("trial 1", "boost", "wgmma with softmax")
    assert row["measured_us"] == a_figure(60.0, Kind.MEASURED).median_us


def test_repredict_records_a_figure_of_this_version_beside_the_old_one(db):
    done = json.loads(call("--db", db, "--repredict", "--json").stdout)
    assert (done["predicted_again"], done["missed"]) == ([2], [])
    with open_ledger(str(db), create=False) as ledger:
        figure = ledger.candidate(2).measurement
        assert ledger.candidate(1).measurement.kind is Kind.MEASURED
    assert figure.terms["model_version"] == MODEL_VERSION and figure.device.startswith(f"model {MODEL_VERSION} for")
    assert "0 candidates predicted again" in call("--db", db, "--repredict").stderr
