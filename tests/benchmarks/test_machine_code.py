"""The table beside FlashAttention-3: what a start point's blocks do on one SM, and when a row counts as reached.

FlashAttention-3's cubins are no part of the package; EVOENGINE_FA3 names the folder that holds them.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import machine_code as benchmark
from evoengine.workloads.attention.full_size import _dealt
from evoengine.workloads.attention.problem import parse_problem
from tests.support.exhaustive import each_nth
from tests.support.kernel_gate import attention_space

FOLDER = Path(os.environ.get("EVOENGINE_FA3", "no folder"))
CAUSAL = "b2,h16,s8192,d128,fp16,causal"


def config(schedule="none", **knobs):
    return {"tile_m": 128, "tile_n": 128, "schedule": schedule, **knobs}


@pytest.mark.parametrize("schedule", ["none", "static", "longest_first"])
def test_under_a_mask_blocks_walk_over_half_of_the_tiles_whatever_their_order(schedule):
    steps = np.concatenate(benchmark.order_of_steps(config(schedule), parse_problem(CAUSAL)))
    assert len(steps) == 2 * 16 * 64
    assert steps.sum() == 2 * 16 * 64 * 65 // 2


def test_rows_are_grouped_by_heads_whose_keys_the_l2_holds_and_dealt_out_as_the_gate_expects():
    problem = parse_problem(CAUSAL)
    groups = benchmark.order_of_steps(config("static"), problem)
    assert [len(group) for group in groups] == [8 * 64] * 4
    assert sum(_dealt(problem, config("static"), 132)) == 4 * 8 * 64


def test_the_place_that_ends_last_is_near_the_mean_where_blocks_are_persistent():
    problem = parse_problem(CAUSAL)
    assert 1 <= benchmark.longest_share(config("static"), problem, 132) < 1.05
    assert benchmark.longest_share(config(), parse_problem(CAUSAL.removesuffix(",causal")), 132) == 1


def test_a_cluster_asks_the_l2_for_half_of_k_and_v():
    problem = parse_problem("b1,h16,s16384,d128,fp16")
    alone, paired = (benchmark.dram_share(config(cluster=n), problem) for n in (1, 2))
    assert alone < paired < 2 * alone


@pytest.mark.parametrize(
    ("a", "b", "marked", "reached"),
    [(1.0, 1.1, True, True), (1.0, 1.05, True, False), (1.0, 1.0, False, True), (0.95, 1.2, False, False)],
)
def test_a_row_is_reached_where_neither_hypothesis_is_worse_and_a_marked_one_is_better(a, b, marked, reached):
    step = benchmark.Step(1, 1.0, 1, 0, 1)
    theirs = benchmark.Kernel("theirs", step, {"A": 500.0, "B": 400.0})
    ours = benchmark.Kernel("ours", step, {"A": 500.0 * a, "B": 400.0 * b})
    name = benchmark.MARKED[0] if marked else "d256_128x80"
    assert benchmark.Row(name, theirs, ours).reached == reached


@pytest.mark.parametrize("name", each_nth(3, benchmark.STARTS))
def test_every_row_has_a_start_point(name):
    published = benchmark.fa3.KERNELS[name]
    starts = attention_space(benchmark.problem_text(published)).starts
    assert any(benchmark.STARTS[name].items() <= start.items() for start in starts)


def test_a_folder_without_the_cubins_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(["--cubins", str(tmp_path), "--rows", "d256_128x80"])
    assert stopped.value.code == 2
    assert "d256_128x80.cubin" in capsys.readouterr().err


@pytest.mark.skipif(not FOLDER.is_dir(), reason="EVOENGINE_FA3 names no folder with FlashAttention-3's cubins")
def test_the_row_of_head_dim_128_with_a_mask_has_both_kernels(tmp_path):
    out = tmp_path / "rows.json"
    assert benchmark.main(["--cubins", str(FOLDER), "--rows", "d128_causal_128x128", "--json", str(out)]) in (0, 1)
    assert '"d128_causal_128x128"' in out.read_text()
