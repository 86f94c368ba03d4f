"""What `benchmarks/prior.py` counts, from predictions kept in a file: nothing is compiled here."""

from __future__ import annotations

import gzip
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


def measured(folder: Path, kernels: int = 12) -> Path:
    """A file of one problem, whose other family has a knob of its own; no prediction is right but the fastest one's."""
    rows, table = [], []
    for n in range(kernels):
        config = {"family": "a", "tile": n} if n % 2 else {"family": "b", "tile": n, "stages": 2}
        rows.append({"id": str(n), "cold_us": [90.0 + n, 100.0 + n, 900.0]})
        predicted = {"cold": {"us": 10.0 if n == 0 else 200.0 - n}}
        table.append({"id": str(n), "problem": "add:n8", "config": config, "predicted": predicted})
    path = folder / "measured.json.gz"
    gpu = [{"ready": {"gpu": "H100"}}]
    path.write_bytes(gzip.compress(json.dumps({"gpu": gpu, "rows": rows, "kernels": table}).encode()))
    return path


def test_problems_that_were_measured_are_spaces_too(tmp_path):
    out = tmp_path / "out.json"
    command = ["--measured", str(measured(tmp_path)), "--json", str(out), "--seeds", "2", "--jobs", "1"]
    assert benchmark.main(command) == 0
    of = json.loads(out.read_text())["add:n8"]["H100"]
    assert of["model"]["mean"] == 1 and of["model"]["interval"][0] <= of["model"]["ratio"] <= of["model"]["interval"][1]
    (pool,) = benchmark.measured_pools(measured(tmp_path))
    assert pool.space.optimum == 0.1 and [knob.name for knob in pool.space.knobs] == ["family", "tile", "stages"]
    assert benchmark.measured_pools(measured(tmp_path, benchmark.MIN_KERNELS - 1)) == []


def test_a_file_that_was_not_measured_is_refused(tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"rows": []}')
    for further in ([], ["--measured", str(tmp_path / "other.json")]):
        assert benchmark.main(further) == 2
    said = capsys.readouterr().err
    assert "give --kernels DIR or --measured FILE" in said and "is not a file of measured_h100.py" in said


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
