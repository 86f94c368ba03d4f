"""Timing a data set of kernels on a GPU: the host's half on the stand-in driver, and the tables of made-up results."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import measured_bench, measured_h100, measured_report
from benchmarks.classic_kernels import HEAD, Classic, all_of_them
from benchmarks.measured_kernels import classic, write_tools
from evoengine.devices.driver import find_driver
from evoengine.sass.launch import drawn_bytes
from tests.fake_cuda.library import environment
from tests.support.machine_code import require_compiler, require_tools

COPY = (
    HEAD
    + """kernel(const float* a, float* o) {
  int i = blockIdx.x * 256 + threadIdx.x;
  o[i] = 2 * a[i];
}
"""
)
FLOATS = 1024
ON_STAND_IN = """
import ctypes, sys
from benchmarks import measured_h100
from tests.fake_cuda import device

def probe(given):
    clocks, at, ns = (int.from_bytes(value, "little") for value in given.parameters)
    ctypes.memmove(clocks + 16 * at, (ctypes.c_uint64 * 2)(2 * ns, ns), 16)
    return 0

device.programs.update(probe=probe, flush=lambda given: 0)  # which watch a GPU's timer, and read 256 MB
device.install()
measured_h100.ROW_LIMIT_SECONDS = 60  # the emulator compiles meanwhile
measured_h100.__file__ = __file__  # which its processes run
sys.exit(measured_h100.main())
"""


def small(name: str, text: str) -> Classic:
    tensors = {"a": (FLOATS, "fp32"), "o": (FLOATS, "fp32")}
    return Classic("small", name, f"{FLOATS} floats", text, (FLOATS // 256, 1, 1), (256, 1, 1), tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A data set of three rows, of which the second has no binary."""
    require_tools()
    found = tmp_path_factory.mktemp("measured")
    for kind in ("cubins", "sources"):
        (found / kind).mkdir()
    write_tools(found, measured_bench.TOOLS)
    texts = {"twice": COPY, "gone": COPY.replace("2 *", "3 *"), "four times": COPY.replace("2 *", "4 *")}
    rows = [classic(small(name, text), found) for name, text in texts.items()]
    (found / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found / "cubins" / f"{rows[1]['cubin']}.gz").write_bytes(gzip.compress(b"no cubin"))
    (found / "sources" / f"{rows[1]['cubin']}.gz").unlink()
    return found


def note_sources(folder: Path, into: Path) -> None:
    for source in (folder / "sources").iterdir():
        cubin = gzip.decompress((folder / "cubins" / source.name).read_bytes())
        text = gzip.decompress(source.read_bytes()).decode()
        name = hashlib.sha256(cubin).hexdigest()
        (into / f"{name}.json").write_text(json.dumps({"text": text, "entry": "kernel"}))


@pytest.mark.skipif(not isinstance(find_driver(), str), reason="this machine has a driver of its own")
def test_every_row_is_timed_or_named_with_the_reason(folder, tmp_path):
    require_compiler()
    note_sources(folder, tmp_path)
    out = tmp_path / "results.json"
    script = tmp_path / "on_stand_in.py"
    script.write_text(ON_STAND_IN)
    command = [sys.executable, script, "--from", folder, "--out", out]
    done = subprocess.run(
        [*map(str, command), "--parts", "rows,sustained,again", "--seconds", "60"],
        env=environment(tmp_path, times=times(tmp_path)), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    by_name = {row["id"]: row["kernel"] for row in measured_bench.read_rows(folder)}
    rows = {by_name[m["id"]]: m for m in results["rows"]}
    assert "image" in rows["gone"]["error"]
    drawn = drawn_bytes("fp32", 4 * FLOATS).view(np.float32)
    for name, factor in (("twice", 2), ("four times", 4)):
        assert np.median(rows[name]["warm_us"]) == pytest.approx(500, rel=0.05)
        assert rows[name]["cold_ghz"][0] == 2.0
        places = np.random.default_rng(4 * FLOATS).integers(0, FLOATS // 4, measured_bench.SAMPLES)
        assert rows[name]["samples"]["o"] == pytest.approx(factor * drawn[4 * places], rel=1e-4)
    assert {by_name[m["id"]] for m in results["again"]} == set(by_name.values())


def test_rows_predicted_again_by_the_same_model_are_as_before_and_what_has_no_binary_is_named(folder, tmp_path, capfd):
    out = tmp_path / "again.jsonl"
    assert measured_h100.main(["--again", str(folder), str(out), "--processes", "1"]) == 0
    before = {row["id"]: row for row in measured_bench.read_rows(folder)}
    again = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert {row["kernel"] for row in again.values()} == {"twice", "four times"}
    assert all(row["predicted"] == before[name]["predicted"] for name, row in again.items())
    assert "small, 1024 floats, gone: " in capfd.readouterr().err


def times(folder: Path) -> Path:
    file = folder / "times.json"
    file.write_text(json.dumps({"kernel": 500, "probe": 60, "flush": 100}))
    return file


def test_classics_have_names_of_their_own():
    names = [(one.set, one.problem, one.name) for one in all_of_them()]
    assert len(set(names)) == len(names) > 80


# ── the tables ──────────────────────────────────────────────────────────────────────────────────────────────────────


def made_up(count: int = 12):
    """Rows whose predicted times are 10 % long, and their results: the predicted first is the measured second."""
    rows, measured = [], []
    for n in range(count):
        us = 100.0 + n
        rank = {0: 1, 1: 0}.get(n, n)
        predicted = {
            "us": 1.1 * (100 + rank), "clocks": 1.1 * (95 + rank) * 2000, "ghz": 2.0, "class": "wgmma",
            "bound": "tensor", "shares": {"tensor": 0.7},
        }  # fmt: skip
        rows.append({
            "id": f"r{n}", "set": "gemm wgmma", "problem": "p", "kernel": f"k{n}", "config": {"n": n}, "flops": 1e12,
            "cubin": "c", "model": 5, "predicted": {"cold": predicted, "warm": predicted},
        })  # fmt: skip
        measured.append({
            "id": f"r{n}", "warm_us": [us], "cold_us": [us], "warm_ghz": [2.0], "cold_ghz": [2.0],
            "samples": {"c": [1.0, 2.0]},
        })  # fmt: skip
    return rows, {"rows": measured, "sustained": [], "torch": [], "again": [], "gpu": []}


def test_two_versions_are_compared_on_the_same_rows_and_odd_ids_are_shown_apart():
    before, results = made_up()
    now = []
    for row in before[2:10]:
        by = 0.9 if int(row["id"][-1], 16) % 2 else 1.0
        predicted = {**row["predicted"]["warm"], "us": row["predicted"]["warm"]["us"] / 1.1 * by}
        now.append({**row, "model": 6, "predicted": {"cold": predicted, "warm": predicted}})
    table = measured_report.comparison(results, before, now)
    assert "| version 5 | signed | version 6 | signed | odd ids | signed |" in table
    assert "| wgmma | warm | 8 | 10.0% | +10.0% | 5.0% | -5.0% | 10.0% | -10.0% |" in table


def test_the_first_pick_is_the_measured_time_of_the_predicted_best():
    rows, results = made_up()
    text = measured_report.report(results, rows)
    assert "| gemm wgmma | p | warm | 12 | 0.99 | 1.01× | 1.00× |" in text
    assert "12 of 12 rows measured, 0 failed" in text


def test_torch_stands_beside_the_fastest_row_of_its_problem():
    rows, results = made_up()
    results["torch"] = [{"problem": "p", "name": "matmul", "warm_us": [50.0], "cold_us": [90.0]}]
    assert "| p | matmul | 50.0 | 90.0 | 100.0 | gemm wgmma |" in measured_report.report(results, rows)


def test_the_cost_of_simpler_kernels_is_told_by_how_near_the_fastest_prediction_they_may_be():
    rows, results = made_up()
    holds = {row["id"]: (64, 1024 - n) for n, row in enumerate(rows)}
    pairs = measured_report.pairs_of(results, rows)
    lines = [line for line in measured_report.simplest(pairs, holds) if line.startswith("| ")]
    assert lines[1] == "| 0.0% | 1.0 | 1.010 | 1.01 |"
    least = min(p.predicted["us"] for p in pairs if p.policy == "cold")
    near = [p for p in pairs if p.policy == "cold" and p.predicted["us"] <= 1.25 * least]
    taken = min(near, key=lambda p: holds[p.row["id"]]).measured_us
    ratio = taken / min(p.measured_us for p in pairs if p.policy == "cold")
    assert lines[-1] == f"| 25.0% | {len(near):.1f} | {ratio:.3f} | {ratio:.2f} |"


@pytest.mark.parametrize("name", ["found.json", "found.json.gz"])
def test_results_are_read_as_they_were_written_or_gzipped(tmp_path, name):
    _, results = made_up()
    data = json.dumps(results).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert measured_bench.read_results(tmp_path / name) == results


def test_clocks_are_compared_without_what_an_empty_kernel_takes():
    rows, results = made_up()
    row = {**rows[0], "id": "e", "set": "latency", "problem": "1 block", "kernel": "empty", "config": None}
    results["rows"].append({**results["rows"][0], "id": "e", "warm_us": [5.0], "cold_us": [5.0]})
    pair = measured_report.pairs_of(results, [*rows, row])[4]
    assert (pair.row["id"], pair.measured_us) == ("r2", 102)
    assert pair.error == pytest.approx(0.1)
    assert pair.cycles_error == pytest.approx(0.1)


def test_a_kernel_whose_output_differs_is_named():
    rows, results = made_up()
    assert measured_report.report(results, rows).endswith("None.")
    results["rows"][3]["samples"]["c"][1] = 2.5
    assert "gemm wgmma k3: 50% of samples" in measured_report.report(results, rows)


def test_frozen_predictions_state_the_model_and_a_line_a_row():
    rows, _ = made_up()
    found = json.loads(measured_report.frozen(rows))
    assert found["model"] == 5 and len(found["rows"]) == 12
    assert dict(zip(found["columns"], found["rows"][2], strict=True))["warm_us"] == pytest.approx(112.2)
