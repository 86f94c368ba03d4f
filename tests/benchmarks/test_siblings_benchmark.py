from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import siblings as benchmark


def write(folder: Path, name: str, device: str | None, factor: float = 1.0, knob: str = "tile", turn: int = 1) -> Path:
    """Write a space of 96 configurations whose best is at block 32, tile 5."""
    cache = {}
    for block in (8, 16, 32, 64, 128, 256, 512, 1024):
        for tile in range(1, 13):
            time = factor * np.exp(turn * (0.3 * abs(np.log2(block / 32)) + 0.2 * abs(tile - 5)))
            cache[f"{block},{tile}"] = {"block": block, knob: tile, "time": time}
    domains = {"block": [8, 16, 32, 64, 128, 256, 512, 1024], knob: [*range(1, 13)]}
    content = {"tune_params_keys": list(domains), "tune_params": domains, "objective": "time", "cache": cache}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content | ({"device_name": device} if device else {})))
    return path


def run(tmp_path: Path, *arguments: str) -> list[dict]:
    out = tmp_path / "out" / "pairs.json"
    out.parent.mkdir(exist_ok=True)
    assert benchmark.main(["--spaces", str(tmp_path), "--seeds", "3", "--json", str(out), *arguments]) == 0
    return json.loads(out.read_text())


def test_every_ordered_pair_is_searched_with_and_without_the_others_figures(tmp_path, capsys):
    write(tmp_path, "blur_A100", "NVIDIA A100")
    write(tmp_path, "blur_W6600", "AMD Radeon PRO W6600", factor=3)
    write(tmp_path, "other_A100", "NVIDIA A100")
    pairs = run(tmp_path)
    assert [(p["source"], p["target"]) for p in pairs] == [("A100", "W6600"), ("W6600", "A100")]
    for pair in pairs:
        assert pair["led"] == [1, 1, 1] and min(pair["without"]) >= 1 and sum(pair["without"]) > 3
        assert (
            pair["rho"] == pytest.approx(1, abs=1e-3)
            and pair["first_good"] == 1
            and not pair["nvidia"]
            and not pair["said"]
        )
    assert "all pairs: 2" in capsys.readouterr().out


def test_boards_that_a_file_does_not_name_and_knobs_that_differ_are_said(tmp_path, capsys):
    write(tmp_path, "blur_A100", None)
    path = write(tmp_path, "blur_A4000", "NVIDIA RTX A4000")
    content = json.loads(path.read_text())
    content["tune_params_keys"].append("pad")
    content["tune_params"]["pad"] = [0]
    for entry in content["cache"].values():
        entry["pad"] = 0
    path.write_text(json.dumps(content))
    there, back = run(tmp_path)
    assert there["said"] == ["blur_A100.json names no board; its name stands for it"]
    assert back["said"] == ["this space has no knob pad"] and there["nvidia"]
    assert "names no board" in capsys.readouterr().err


def test_files_without_a_knob_in_common_are_left_out(tmp_path, capsys):
    write(tmp_path, "blur_A100", "NVIDIA A100")
    write(tmp_path, "blur_A4000", "NVIDIA RTX A4000", knob="rows")
    assert run(tmp_path) == []
    assert "have no knobs in common" in capsys.readouterr().err


def test_a_misleading_source_ranks_the_best_last_of_its_best_and_most_of_the_rest_right(tmp_path):
    write(tmp_path, "blur_A100", "NVIDIA A100")
    (pair,) = run(tmp_path, "--trap")
    assert pair["source"] == benchmark.TRAP and pair["first_good"] > 24 and pair["rho"] > 0.5


def test_a_source_misleads_from_three_trials_and_a_tenth_on():
    def pair(without: int, led: int) -> benchmark.Pair:
        return benchmark.Pair("k", "a", "b", True, 1.0, 1, [without] * 3, [led] * 3, [])

    assert not pair(10, 13).misleads and pair(10, 14).misleads
    assert not pair(80, 88).misleads and pair(80, 89).misleads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "must be at least 1"),
        ([], "no kernel has two boards"),
        (["--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["--kernels", "/nowhere"], "there is no folder /nowhere"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(tmp_path, capsys, arguments, message):
    write(tmp_path, "blur_A100", "NVIDIA A100")
    assert benchmark.main(["--spaces", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
