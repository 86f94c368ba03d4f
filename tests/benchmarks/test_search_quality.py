from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import search_quality as benchmark


def cache() -> dict:
    """36 of 42 combinations are valid, 6 of them fail; the least time, 1 ms, is at block 64, tile 3."""
    blocks, tiles = [8, 16, 32, 64, 128, 256], [1, 2, 3, 4, 5, 6, 7]
    entries = {}
    for block in blocks:
        for tile in tiles:
            if block * tile <= 1024:
                time = 1 + abs(blocks.index(block) - 3) + abs(tile - 3)
                failed = "RuntimeFailedConfig" if tile == 7 else time
                entries[f"{block},{tile}"] = {"block": block, "tile": tile, "time": failed}
    domains = {"block": blocks, "tile": tiles}
    return {"tune_params_keys": list(domains), "tune_params": domains, "objective": "time", "cache": entries}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "spaces"
    folder.mkdir()
    (folder / "toy.json").write_text(json.dumps(cache()))
    return folder


def test_the_json_has_every_figure_of_every_space_and_sampler(folder, tmp_path, capsys):
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--spaces", folder, "--samplers", "evolution", "random", "--seeds", "2", "--budget", "30"]
    assert benchmark.main([*map(str, arguments), "--json", str(out), "--plot", str(png)]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["toy"] and list(found["toy"]) == ["evolution", "random"]
    for figures in found["toy"].values():
        assert set(figures) == {"25", "50", "100", "200", "geo", "within", "within5", "proposals", "ms", "seeds"}
        mean, low, high = figures["geo"]["25"]
        assert 0.999 < low < mean + 1e-6 < high + 2e-6 and figures["geo"]["50"] is None
        assert 0 <= figures["within"]["25"] <= 1
        assert figures["25"] >= 1
        assert [figures[mark] for mark in ("50", "100", "200")] == [None] * 3  # the budget did not reach them
    assert png.read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "evolution" in told and told.count(" – ") >= 2 * 2 * 3  # two samplers, on the space and on average
    assert "signed rank against evolution" in " ".join(told.split())


def test_a_batch_is_proposed_before_any_of_it_is_told(folder, monkeypatch):
    calls = []
    for name in ("propose", "tell"):
        of = getattr(benchmark.Proposer, name)
        monkeypatch.setattr(benchmark.Proposer, name, lambda *a, of=of, name=name: (calls.append(name[0]), of(*a))[1])
    run = benchmark.search(benchmark.recorded(folder / "toy.json"), "evolution", 0, budget=5, batch=3)
    assert "".join(calls) == "ppptttpptt" and len(run.curve) == 5
    assert run.sampler == "evolution by 3"


def test_a_run_counts_every_unique_configuration_once_and_failures_too(folder):
    space = benchmark.recorded(folder / "toy.json")
    run = benchmark.search(space, "random", 0, budget=1000)
    assert len(run.curve) == len(space) == len(cache()["cache"])
    assert run.curve[-1] == 1
    assert run.proposals > len(run.curve)


def test_evolution_proposes_nothing_twice_and_nothing_invalid(folder):
    run = benchmark.search(benchmark.recorded(folder / "toy.json"), "evolution", 0, budget=30)
    assert run.proposals == len(run.curve) == 30


def test_the_curve_is_the_best_so_far_over_the_optimum(folder):
    curve = benchmark.search(benchmark.recorded(folder / "toy.json"), "evolution", 1, budget=30).curve
    assert curve == sorted(curve, reverse=True)
    assert curve[-1] == 1


def test_the_median_is_over_seeds_and_an_exhausted_search_keeps_its_last():
    curves = [3, 2, 1.5], [4, 4, 1], [9, 9, 9]
    runs = [benchmark.Run("s", "random", seed, curve, 3, 1.0) for seed, curve in enumerate(curves)]
    assert np.median(benchmark.at(runs, 1)) == 4
    assert np.median(benchmark.at(runs, 3)) == 1.5
    assert np.median(benchmark.at(runs, 200)) == benchmark.summary(runs, 200)["200"] == 1.5
    assert benchmark.summary(runs, 200)["within5"] == pytest.approx(1 / 3)


def test_kept_runs_are_not_run_again_and_those_of_peers_are_compared(folder, tmp_path, capsys, monkeypatch):
    kept = tmp_path / "runs.jsonl"
    arguments = ["--spaces", str(folder), "--samplers", "random", "--seeds", "2", "--budget", "30", "--runs", str(kept)]
    assert benchmark.main(arguments) == 0
    peer = {"space": "toy", "sampler": "peer", "seed": 0, "curve": [2.0, 1.0], "proposals": 2, "ms": 1.0}
    with kept.open("a") as file:
        file.write(json.dumps(peer) + "\n" + '{"space": "toy", "sam')  # the last was cut short
    monkeypatch.setattr(benchmark, "search", lambda *_: pytest.fail("run again"))
    assert benchmark.main(arguments) == 0
    assert "peer" in capsys.readouterr().out


def test_the_signed_rank_test_pairs_runs_of_one_space_and_seed():
    runs = [
        benchmark.Run(space, sampler, seed, [1.0 + 0.01 * (sampler == "b") * (1 + seed)], 1, 1.0)
        for space in "xy"
        for sampler in "ab"
        for seed in range(6)
    ]
    assert benchmark.p_value(runs, "a", "b", 25) < 0.01
    assert benchmark.p_value(runs, "a", "a", 25) == 1.0
    assert benchmark.p_value(runs, "a", "absent", 25) is None


def test_an_interval_holds_the_mean_and_narrows_with_the_runs():
    few, many = (benchmark.bootstrap(np.random.default_rng(0).normal(size=n)) for n in (10, 1000))
    assert few[0] < 0 < few[1] and many[1] - many[0] < 0.3 * (few[1] - few[0])


def test_descriptions_and_doubles_in_other_formats_are_no_further_spaces(tmp_path):
    for name in ("a.json.gz", "a_T4.json.gz", "a_T1.json", "b_T4.json", "README.md"):
        (tmp_path / name).touch()
    assert [p.name for p in benchmark.find_spaces(tmp_path)] == ["a.json.gz", "b_T4.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "must be at least 1"),
        (["--batch", "0"], "must be at least 1"),
        (["--seeds", "0"], "must be at least 1"),
    ],
)
def test_numbers_below_one_are_refused(folder, capsys, arguments, message):
    assert benchmark.main(["--spaces", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_an_output_without_a_folder_is_refused_before_anything_is_searched(
    folder, tmp_path, capsys, monkeypatch, option
):
    monkeypatch.setattr(benchmark, "run_all", lambda *_: pytest.fail("searched"))
    assert benchmark.main(["--spaces", str(folder), option, str(tmp_path / "absent" / "out")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_file_at_fault_is_refused_before_anything_is_searched(folder, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "run_all", lambda *_: pytest.fail("searched"))
    (folder / "zebra.json").write_text("{}")
    assert benchmark.main(["--spaces", str(folder)]) == 2
    assert "zebra.json is not a recorded space" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert benchmark.main(["--spaces", str(tmp_path / "absent")]) == 2
    assert f"there is no folder {tmp_path / 'absent'}" in capsys.readouterr().err


def test_a_folder_without_recorded_spaces_is_refused(tmp_path, capsys):
    assert benchmark.main(["--spaces", str(tmp_path)]) == 2
    assert "holds no recorded space" in capsys.readouterr().err
