"""docs/seeds.md: its configurations are in the space, and its figures are those that benchmarks/seeds.py recorded."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import seeds
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.space.space import load_space
from evoengine.workloads import parse_problem
from tests.support.documents import ROOT

RESULTS = json.loads(seeds.RESULTS.read_text("utf-8"))
PAGE = seeds.PAGE.read_text("utf-8")
FIGURE = re.compile(r"\d[\d.,]*\s*(?:µs|ms|TFLOPS|GB/s|%)")


def why_not(gpu: str, config: dict) -> str | None:
    """Return why a configuration is not in the space of its GPU's problem; None if it is."""
    problem = parse_problem(seeds.PROBLEMS[gpu])[1]
    return load_space(asset("search_spaces") / "attention.toml", problem, find_gpu(gpu)).why_invalid(config)


def strays(page: str) -> list[str]:
    """Return the figures of the page that stand before what the script makes."""
    return FIGURE.findall(page.partition(seeds.BEGINS)[0])


@pytest.mark.parametrize("step", [step for step in seeds.STEPS if step.config], ids=lambda step: step.name)
def test_every_step_is_a_configuration_of_the_space(step):
    assert why_not(step.gpu, step.config) is None


def test_a_step_that_the_space_does_not_have_is_seen():
    wrong = {**next(s.config for s in seeds.STEPS if s.config), "tile_m": 48}
    assert "tile_m" in why_not("l4", wrong)


def test_the_page_is_what_the_recorded_results_give():
    assert seeds.page(PAGE, RESULTS) == PAGE
    for step, row in zip(seeds.STEPS, RESULTS["steps"], strict=True):
        assert (row is None) == (step.config is None)
        assert row is None or row["config"] == dict(step.config)


def test_the_text_around_the_tables_names_no_figure():
    assert strays(PAGE) == []
    assert strays(f"It took 447 µs.\n{seeds.BEGINS}") == ["447 µs"]


def test_reported_and_predicted_figures_have_columns_of_their_own():
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == sum(step.config is not None for step in seeds.STEPS) + len(seeds.PROBLEMS)
    reported = {f"| {step.name}": step.reported for step in seeds.STEPS}
    assert all(row[1] == reported.get(row[0], "–") and " GHz" in row[5] for row in rows)


def test_every_judged_row_was_correct_and_predicted_from_machine_code():
    rows = [row for row in (*RESULTS["steps"], *RESULTS["searches"].values()) if row is not None]
    assert all(row["correct"] and row["low_us"] <= row["us"] <= row["high_us"] for row in rows)


def test_the_search_goes_beyond_every_step():
    for gpu, found in RESULTS["searches"].items():
        steps = zip(seeds.STEPS, RESULTS["steps"], strict=True)
        assert found["us"] <= min(row["us"] for step, row in steps if step.gpu == gpu and row)


def test_the_page_is_made_by_a_script_that_it_does_not_hide():
    assert "benchmarks/seeds.py" in PAGE and (ROOT / "benchmarks" / "seeds.py").is_file()
