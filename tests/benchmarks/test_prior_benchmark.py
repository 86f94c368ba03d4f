"""What `benchmarks/prior.py` counts, from predictions kept in a file: nothing is compiled here."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from benchmarks import prior as benchmark

KERNEL = {"entry": "add", "knobs": ["block", "tile"], "arguments": [], "constants": [], "block": ["block"], "grid": [8]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """49 rows, of which one is within 5 % of the fastest: itself."""
    kernel = tmp_path / "kernels" / "add"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps(KERNEL))
    (kernel / "kernel.cu").write_text("__global__ void add() {}")
    configs = [{"block": 32 * b, "tile": t} for b, t in knobs()]
    rows = [{"config": config, "time_us": time} for config, time in zip(configs, times(), strict=True)]
    (kernel / "rtx3090.json").write_text(json.dumps({"gpu": "RTX_3090", "unit": "us", "rows": rows}))
    return tmp_path / "kernels"


def knobs() -> list[tuple[int, int]]:
    return list(product(range(1, 8), range(1, 8)))


def times() -> list[float]:
    return [100.0 * (1 + abs(b - 3) + abs(t - 5)) for b, t in knobs()]


def run(folder: Path, predictions: list[float | None] | None, *further: str) -> tuple[int, dict]:
    kept, out = folder.parent / "predictions.json", folder.parent / "out.json"
    if predictions is not None:
        kept.write_text(json.dumps({"add": {"rtx3090": predictions}}))
    common = ["--kernels", str(folder), "--predictions", str(kept), "--json", str(out), "--seeds", "3", "--jobs", "1"]
    code = benchmark.main([*common, *further])
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_perfect_predictions_take_one_trial(folder, capsys):
    code, found = run(folder, times())
    assert code == 0
    of = found["add"]["rtx3090"]
    assert (of["model"]["mean"], of["model"]["seeds"]) == (1.0, 3)
    assert of["none"]["mean"] > 1 and of["none"]["ratio"] == 1
    assert of["model"]["ratio"] == pytest.approx(1 / of["none"]["mean"])
    assert of["none"]["lower"] <= of["none"]["median"] <= of["none"]["upper"]
    assert "1.00" in capsys.readouterr().out


def test_a_row_without_a_prediction_is_found_too(folder):
    code, found = run(folder, [None if time == 100 else time for time in times()])
    assert code == 0 and found["add"]["rtx3090"]["model"]["mean"] > 1


def test_without_any_prediction_trials_are_those_without_a_prior(folder):
    _, found = run(folder, [None] * 49)
    of = found["add"]["rtx3090"]
    assert {**of["model"]} == {**of["none"]}


@pytest.mark.parametrize("rho", [0.9, 0.5, -0.2])
def test_a_stand_in_has_the_rank_correlation_asked_for(rho):
    of = np.random.default_rng(99).lognormal(size=400)
    made = [benchmark.stand_in(of, rho, seed) for seed in range(3)]
    assert [spearmanr(m, of).statistic for m in made] == pytest.approx([rho] * 3, abs=0.03)
    assert not np.array_equal(made[0], made[1])


def test_stand_ins_take_the_models_place(folder):
    code, found = run(folder, None, "--stand-in", "0.9", "-0.5")
    assert code == 0 and set(found["add"]["rtx3090"]) == {"none", "ρ 0.9", "ρ -0.5"}


@pytest.mark.parametrize(
    "predictions, further, said",
    [
        ([1.0], (), "has not one prediction per row of add on rtx3090; remove it"),
        (None, ("--stand-in", "2"), "--stand-in takes rank correlations, from -1 to 1"),
        (None, ("--seeds", "0"), "--seeds must be at least 1"),
    ],
)
def test_bad_input_gets_one_sentence(folder, capsys, predictions, further, said):
    code, _ = run(folder, predictions, *further)
    assert code == 2 and said in capsys.readouterr().err
