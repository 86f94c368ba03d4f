"""benchmarks/sampler_changes.py searches as search_quality.py does, and sees what a change gains."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sampler_changes as benchmark
from benchmarks import search_quality
from evoengine.search.samplers.evolution import Evolution


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """640 configurations, 64 of which fail; the least time is at tile 5 with both switches on."""
    domains = {"tile": list(range(1, 11)), "unroll": list(range(16)), "read": [0, 1], "pad": [0, 1]}
    entries = {}
    for tile in domains["tile"]:
        for unroll in domains["unroll"]:
            for read in (0, 1):
                for pad in (0, 1):
                    time = 1 + abs(tile - 5) + abs(unroll - 11) / 16 + 2 * (read != pad) + (1 - read)
                    named = {"tile": tile, "unroll": unroll, "read": read, "pad": pad}
                    entries[f"{tile},{unroll},{read},{pad}"] = {
                        **named,
                        "time": "RuntimeFailedConfig" if tile == 9 else time,
                    }
    of = {"tune_params_keys": list(domains), "tune_params": domains, "objective": "time", "cache": entries}
    (tmp_path / "toy.json").write_text(json.dumps(of))
    return tmp_path / "toy.json"


def test_a_search_finds_what_a_search_of_the_engine_finds(path):
    for seed in range(2):
        curve = benchmark.search(benchmark.read(path), Evolution, seed, 30)
        assert curve.tolist() == search_quality.search(search_quality.recorded(path), "evolution", seed, 30).curve


def test_a_derived_space_has_all_but_the_configurations_with_one_value_of_the_optimum(path):
    space = benchmark.read(path)
    parts = list(benchmark.derived(space))
    # a switch left out leaves 320 of the 640 configurations
    assert [len(part) for part in parts] == [576, 600, 320, 320]
    assert [len(part.knobs[k].values) for k, part in enumerate(parts)] == [9, 15, 1, 1]
    assert 5 not in parts[0].knobs[0].values and parts[0].optimum == 2


@pytest.mark.parametrize("name", benchmark.CHANGES)
def test_every_change_searches_a_space_to_its_best(path, name):
    assert benchmark.search(benchmark.read(path), benchmark.CHANGES[name], 0, 120)[-1] == 1


def test_a_change_that_proposes_at_random_is_seen_to_lose(path, monkeypatch, capsys):
    class Random(Evolution):
        def _ready(self) -> bool:
            return False

    monkeypatch.setitem(benchmark.CHANGES, "spread", Random)
    assert benchmark.main(["--spaces", str(path), "--change", "spread", "--seeds", "3", "--budget", "30"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("spread") and line.count(" ± ") == 2
    mean, error = (float(of) for of in line.split("   ")[-1].split(" ± "))
    assert mean > 2 * error > 0


def test_equal_runs_add_nothing():
    curves = np.array([[[2.0] * 20 + [1.0] * 30] * 2])
    mean, error = benchmark.gain(curves, curves)
    assert mean.tolist() == error.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--seeds", "1"], "--seeds must be at least 2"), ([], "give files by --spaces or --derived")],
)
def test_bad_input_is_one_sentence(arguments, said, capsys):
    assert benchmark.main(arguments) == 2
    assert said in capsys.readouterr().err
