"""The sweep of exponentials on FMA: which kernels it has, and what their times say of the model."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import exp2_sweep as sweep
from evoengine.gpu import find_gpu
from evoengine.ledger.store import open_ledger
from evoengine.records import Kind
from evoengine.sass.predict import Unpredictable
from evoengine.space.space import load_space
from evoengine.workloads import parse_problem
from tests.support.ledger_examples import PROBLEM, a_figure, add_ranked, start_run

SHARES = (0.0, 0.25, 0.5)
PREDICTED = dict(zip(SHARES, (100.0, 94.0, 92.0), strict=True))


@pytest.mark.parametrize("problem", ["b2,h32,s8192,d64,fp16", "b2,h16,s8192,d128,fp16,causal"])
def test_the_space_of_the_sweep_holds_one_kernel_with_each_share_and_no_other(tmp_path, problem):
    h100 = find_gpu("h100")
    start = sweep.start_of(problem, h100)
    (tmp_path / "sweep.toml").write_text(sweep.narrowed_space(start))
    space = load_space(tmp_path / "sweep.toml", parse_problem(problem)[1], h100)
    found = space.sample(np.random.default_rng(1), 60)
    assert {config["exp2_on_fma"] for config in found} == set(SHARES)
    assert all(config == {**start, "exp2_on_fma": config["exp2_on_fma"]} for config in found)
    assert not set(space.families) - space.empty_families.keys() - {"wgmma"}


def test_predicted_gains_miss_nothing_where_they_are_right_whatever_the_clock():
    assert sweep.missed({share: 3 * us for share, us in PREDICTED.items()}, PREDICTED) == pytest.approx(0)
    slower = dict(zip(SHARES, (700.0, 740.0, 800.0), strict=True))
    assert sweep.missed(slower, PREDICTED) > 0.1


def test_the_table_has_a_row_for_each_share_and_the_miss():
    measured = dict(zip(SHARES, (700.0, 660.0, 640.0), strict=True))
    off = sweep.missed(measured, PREDICTED)
    text = sweep.table({"measured_us": measured, "predicted_us": PREDICTED, "off": off})
    assert "| 0.25 | 1.061 | 1.064 |" in text and f"by {off:.1%}" in text


def test_kernels_that_differ_in_more_or_were_not_measured_say_nothing(tmp_path):
    """A verdict takes two that differ in the knob alone."""
    db = str(tmp_path / "a.db")
    start = sweep.start_of(PROBLEM, find_gpu("h100"))
    with open_ledger(db, create=True) as ledger:
        run = start_run(ledger)
        add_ranked(ledger, run, a_figure(400.0, Kind.MEASURED), start, "kernel0")
        add_ranked(ledger, run, a_figure(420.0, Kind.ESTIMATED), {**start, "exp2_on_fma": 0.5}, "kernel1")
        add_ranked(ledger, run, a_figure(410.0, Kind.MEASURED), {**start, "exp2_on_fma": 0.25, "stages": 3}, "kernel2")
    assert sweep.verdict(tmp_path / "a.db", PROBLEM, "h100") is None
    with open_ledger(db, create=False) as ledger:
        add_ranked(ledger, run, a_figure(410.0, Kind.MEASURED), {**start, "exp2_on_fma": 0.25}, "kernel3")
    with pytest.raises(Unpredictable):  # these kernels are not machine code
        sweep.verdict(tmp_path / "a.db", PROBLEM, "h100")
