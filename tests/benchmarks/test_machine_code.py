"""The table beside FlashAttention-3: which start points stand in it, and when a row counts as reached.

FlashAttention-3's cubins are not part of the package; EVOENGINE_FA3 names the folder that holds them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import machine_code as benchmark
from tests.support.exhaustive import each_nth
from tests.support.kernel_gate import attention_space

FOLDER = Path(os.environ.get("EVOENGINE_FA3", "no folder"))


@pytest.mark.parametrize(("ratio", "reached"), [(1.1, True), (0.996, True), (0.99, False)])
def test_a_row_is_reached_where_the_start_point_is_no_slower(ratio, reached):
    step = benchmark.Step(1, 1.0, 1, 0, 1)
    theirs, ours = benchmark.Kernel("theirs", step, 500.0), benchmark.Kernel("ours", step, 500.0 * ratio)
    assert benchmark.Row("d256_128x80", theirs, ours).reached == reached


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
