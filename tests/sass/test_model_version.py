"""Predictions move only together with MODEL_VERSION: figures of one version are compared with one another.

data/ holds machine code of this project's attention kernels and what each version predicted of it, so that neither a
compiler nor a template moves them. `python -m tests.sass.test_model_version` records those of a new version.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from evoengine.sass.chip import Clock, find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, prepare
from evoengine.sass.listing import disassemble
from evoengine.sass.predict import MODEL_VERSION, predict
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import parse_problem

DATA = Path(__file__).with_name("data")
RECORDED = DATA / "predictions.json"
CASES = {
    "wgmma": ("h100", (3, 4, 48), 512, 45136, {"family": "wgmma", "load": "tma", "o_store": "shared", "tile_m": 192}),
    "mma": ("l4", (4, 4, 48), 128, 22528, {"family": "mma"}),
    "scalar": ("rtx3090", (8, 4, 48), 256, 19456, {"family": "scalar"}),
}
"""machine code → GPU, grid, threads, dynamic shared memory, and what of the configuration its arguments depend on"""
PROBLEM = parse_problem("b48,h4,s512,d32,fp16")
CLOCKS = ("boost", "locked:1200")


def predicted(name: str) -> dict[str, float]:
    """Return µs by clock."""
    key, grid, threads, shared_bytes, config = CASES[name]
    whole = {"tile_n": 128, "schedule": "none", "cluster": 1, "p_in": "registers", **config}
    cubin = gzip.decompress((DATA / f"{name}.cubin.gz").read_bytes())
    parameters = find_workload("attention").parameters(PROBLEM, whole)
    arguments = [DrawnArgument(p.name, p.bytes, p.dtype, p.output) if hasattr(p, "bytes") else p for p in parameters]
    geometry = Geometry(grid, (threads, 1, 1), shared_bytes)
    launch = prepare(read_kernel(cubin, "attention"), geometry, arguments, 0)
    program = Program(disassemble(cubin), "attention")
    return {clock: predict(program, launch, find_chip(key), clock=Clock.parse(clock)).time_us for clock in CLOCKS}


@pytest.mark.parametrize("name", CASES)
def test_a_version_of_the_model_predicts_what_it_predicted_before(name):
    recorded = json.loads(RECORDED.read_text())
    how = "raise MODEL_VERSION and run python -m tests.sass.test_model_version"
    assert recorded["version"] == MODEL_VERSION, f"no predictions are recorded of version {MODEL_VERSION}: {how}"
    assert predicted(name) == pytest.approx(recorded["us"][name], rel=1e-6), f"predictions moved: {how}"


@pytest.mark.parametrize("rate", ["hmma_interval"])
def test_a_rate_that_moves_by_a_tenth_moves_what_is_recorded(rate, monkeypatch):
    def moved(key, known=find_chip):
        chip = known(key)
        return replace(chip, rates={**chip.rates, rate: 1.1 * chip.rates[rate]})

    before = predicted("mma")
    monkeypatch.setitem(globals(), "find_chip", moved)
    assert predicted("mma") != pytest.approx(before, rel=1e-6)


if __name__ == "__main__":
    us = {name: predicted(name) for name in CASES}
    RECORDED.write_text(json.dumps({"version": MODEL_VERSION, "us": us}, indent=1) + "\n")
