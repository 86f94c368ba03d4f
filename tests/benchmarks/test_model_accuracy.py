"""The benchmark of the model's accuracy: its statistics on known numbers, and a run on a kernel with made-up times."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks import model_accuracy as benchmark
from evoengine.accuracy.predictions import kernel_of
from tests.benchmarks.conftest import CONFIGS, KERNEL


@pytest.fixture(autouse=True)
def no_kernel_of_another_test():
    kernel_of.cache_clear()


# ── statistics ──────────────────────────────────────────────────────────────────────────────────────────────────────

MEASURED = np.arange(10.0, 31.0)  # 21 rows, the fastest takes 10 µs


def test_a_prediction_in_the_measured_order_has_rho_1_and_no_regret():
    found = benchmark.accuracy(MEASURED * 1.1, MEASURED)
    assert (found.rho, found.top1, found.top10, found.within125, found.within2) == (pytest.approx(1), 1, 1, 1, 1)
    assert found.interval == (pytest.approx(1), pytest.approx(1))


def test_a_prediction_in_the_opposite_order_picks_the_slowest_and_misses_eleven():
    found = benchmark.accuracy(-MEASURED, MEASURED, absolute=False)
    assert found.rho == pytest.approx(-1)
    assert found.top1 == 30 / 10
    assert found.top10 == 21 / 10  # the ten slowest are 21…30
    assert found.within125 is None and found.within2 is None


def test_the_shares_count_predictions_off_by_a_factor_on_either_side():
    measured = np.array([10.0, 10.0, 10.0, 10.0, 11.0])
    found = benchmark.accuracy(np.array([12.0, 8.1, 19.0, 4.9, math.inf]), measured)
    assert found.within125 == 2 / 5  # 12 and 8.1
    assert found.within2 == 3 / 5  # and 19


def test_the_interval_of_a_weak_correlation_is_wide_and_holds_it():
    random = np.random.default_rng(1)
    measured = random.random(40)
    found = benchmark.accuracy(measured + random.random(40), measured)
    low, high = found.interval
    assert low < found.rho < high
    assert high - low > 0.2


def test_what_could_not_be_predicted_is_ranked_last():
    predicted, measured = np.array([1.0, 2.0, 3.0, math.inf]), np.array([20.0, 30.0, 40.0, 10.0])
    found = benchmark.accuracy(predicted, measured)
    assert found.rho == pytest.approx(-0.2)  # ranks 1 2 3 4 against 2 3 4 1
    assert found.top1 == 2


def test_a_predictor_that_says_the_same_of_all_has_no_rho():
    assert benchmark.accuracy(np.ones(20), np.arange(1.0, 21.0)).rho is None


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(folder, tmp_path, *more: str) -> tuple[int, dict]:
    out = tmp_path / "out.json"
    code = benchmark.main(["--kernels", str(folder), "--json", str(out), "--jobs", "1", *more])
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_a_kernel_is_predicted_and_the_json_has_the_models_figures(make, tmp_path, capsys):
    code, found = run(make(), tmp_path)
    assert code == 0
    figures = found["scale"]["rtx3090"]
    assert set(figures) == {"rho", "top1", "top10", "within2", "n"}
    assert figures["n"] == len(CONFIGS)
    # 8, 64 and 512 turns differ whatever the launch; the made-up times say little more
    assert figures["rho"] > 0.8
    assert figures["top10"] == 1
    told = capsys.readouterr()
    for predictor in ("occupancy", "static count", "roofline", "model"):
        assert predictor in told.out
    assert "scale: compiled by nvrtc" in told.err and "not by NVRTC 11.8 as its file says" in told.err
    assert "states no clock, taken as not locked" in told.err and told.err.count("\n") == 2


def test_fewer_samples_are_among_more(make):
    folder = make()
    found = [{json.dumps(r.config) for r in benchmark.read_all(folder, n)[0][0][1].rows} for n in (2, 4, 99)]
    assert [len(rows) for rows in found] == [2, 4, len(CONFIGS)]
    assert found[0] < found[1] < found[2]


@pytest.mark.exhaustive
def test_what_does_not_compile_is_left_out_counted_and_told(make, tmp_path, capsys):
    text = KERNEL + "#if block == 64 && repeat > 100\n#error too many turns\n#endif\n"
    code, found = run(make(text), tmp_path)
    assert code == 0 and found["scale"]["rtx3090"]["n"] == len(CONFIGS) - 1
    assert "scale on rtx3090: 1 left out, does not compile: " in capsys.readouterr().err


def test_a_launch_that_cannot_run_is_ranked_last_and_told(make, tmp_path, capsys):
    # an array is read far beyond its end
    code, found = run(make(KERNEL.replace("in[i]", "in[i + (repeat == 8) * (1 << 28)]")), tmp_path)
    assert code == 0 and found["scale"]["rtx3090"]["n"] == len(CONFIGS)
    assert "scale on rtx3090: 2 ranked last, not predicted: " in capsys.readouterr().err


@pytest.mark.exhaustive
def test_rows_and_files_that_cannot_be_read_are_told_and_the_rest_is_used(make, tmp_path, capsys):
    folder = make(of_gpu={"rows": [{"config": c, "time_us": 1.0 + c["repeat"]} for c in CONFIGS] + [{"config": {}}, 7]})
    (folder / "scale" / "rx9000.json.gz").write_bytes((folder / "scale" / "rtx3090.json.gz").read_bytes())
    (folder / "scale" / "a4000.json.gz").write_bytes(b"no gzip")
    (folder / "broken").mkdir()
    (folder / "broken" / "kernel.json").write_text("{")
    code, found = run(folder, tmp_path)
    assert code == 0 and list(found) == ["scale"]
    said = capsys.readouterr().err
    assert "scale on rtx3090: 1 left out, unreadable: row 7: it has no value of block, repeat" in said
    assert "1 left out, unreadable: row 8: it is no" in said
    assert "a4000.json.gz" in said and "broken/kernel.json is not valid JSON" in said


def test_no_row_that_compiles_is_no_success(make, tmp_path, capsys):
    code, found = run(make("#error never\n"), tmp_path)
    assert (code, found) == (1, {})
    assert "6 left out, does not compile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernels", "/nowhere"], "there is no folder /nowhere"),
        (["--kernels", "/tmp", "--nvrtc", "11.8"], "--nvrtc takes VERSION=LIBRARY"),
        (["--kernels", "/tmp", "--nvrtc", "11.8=/nowhere"], "there is no /nowhere"),
        (["--kernels", "/tmp", "--nvrtc", f"11.8={__file__}"], "not an NVRTC that can be loaded"),
        (["--kernels", "/tmp", "--samples", "0"], "--samples and --jobs must be at least 1"),
        (["--kernels", "/tmp", "--json", "/nowhere/out.json"], "there is no folder /nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, said, capsys):
    assert benchmark.main(arguments) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
