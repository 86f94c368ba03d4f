"""The benchmark on a part of the attention space counts trials to the best estimate, of all that was computed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import attention_subspace as benchmark
from evoengine.records import config_key


@pytest.fixture(scope="module")
def made_up():
    """µs by configuration: rejected for scalar, else the better the larger the tile and the fewer the stages."""
    return {
        config_key(c): None if c["family"] == "scalar" else 1e6 / (c["tile_m"] * c["tile_n"]) + c["stages"]
        for c in benchmark.space().enumerate()
    }


def test_the_part_has_all_families_and_no_start_point():
    configs = list(benchmark.space().enumerate())
    assert {c["family"] for c in configs} == {"scalar", "wmma", "mma", "wgmma"}
    assert 2500 < len(configs) < 3500
    assert benchmark.space().starts == ()


@pytest.mark.exhaustive  # tests/stages/test_predict.py shows it of other kernels
def test_what_a_configuration_is_worth_comes_from_its_real_binary():
    configs = list(benchmark.space().enumerate())
    first, last = ({c["family"]: c for c in order} for order in (reversed(configs), configs))
    assert 0 < benchmark.estimated_us(first["wgmma"]) < benchmark.estimated_us(first["scalar"])
    assert benchmark.estimated_us(last["wgmma"]) is None  # scores of 176 keys beside the outputs spill


def test_a_search_counts_the_trials_until_it_is_near_the_best(made_up):
    best = min(us for us in made_up.values() if us is not None)
    near = np.mean([us is not None and us <= benchmark.NEAR * best for us in made_up.values()])
    needed = [benchmark.trials_needed("evolution", seed, made_up, 300) for seed in range(3)]
    assert all(1 <= n <= 300 for n in needed)
    assert np.median(needed) < 0.5 / near  # fewer than draws at random need


def test_a_search_that_does_not_get_there_is_not_counted_as_one_that_did(made_up):
    out_of_reach = {**made_up, "nowhere": 1e-3}
    assert benchmark.trials_needed("random", 0, out_of_reach, 20) == np.inf


def test_the_table_has_quartiles_that_are_runs():
    rows = [list(column.cells) for column in benchmark.table({"random": [5, 7, np.inf, np.inf]}, 20).columns]
    assert [cells[0] for cells in rows] == ["random", "4", "7", "> 20", "> 20", "2"]


@pytest.mark.parametrize(
    "content, complaint",
    [
        (None, "cannot read"),
        ("{}", "is not a record of estimates"),
        (json.dumps({"estimated_us": {}}), "lacks 2989 configurations"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_remedy(tmp_path, capsys, content, complaint):
    file = tmp_path / "estimates.json"
    if content is not None:
        file.write_text(content)
    assert benchmark.main([str(file)]) == 2
    assert complaint in (said := capsys.readouterr().err)
    assert "--record" in said
