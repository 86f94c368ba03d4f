"""Triton's own tutorials, as they are, on a virtual GPU: `evoengine run --map-cuda`.

They are not part of this repository: TRITON_TUTORIALS names their folder, python/tutorials in a checkout of Triton.
Each compares its kernels' results with PyTorch's before its benchmark, which needs pandas and Matplotlib; 04 needs
tabulate.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.exhaustive import more
from tests.support.machine_code import require_tools

FOLDER = os.environ.get("TRITON_TUTORIALS")
RUN = (
    "01-vector-add",
    "04-low-memory-dropout",
    *more(["02-fused-softmax", "03-matrix-multiplication"]),
    *more(["06-fused-attention", "08-grouped-gemm", "09-persistent-matmul"]),
)


def ran(name: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    require_tools()
    if FOLDER is None:
        pytest.skip("TRITON_TUTORIALS names no folder")
    if not all(map(find_spec, ("triton", "pandas", "matplotlib", "tabulate"))):
        pytest.skip("needs Triton, pandas, Matplotlib and tabulate")
    command = [sys.executable, "-m", "evoengine", "run", "--sample", "--map-cuda", str(Path(FOLDER, f"{name}.py"))]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "MPLBACKEND": "Agg"}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", RUN)
def test_a_tutorial_runs_as_it_is(tmp_path, name):
    done = ran(name, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ": failed: " not in done.stderr and ": race: " not in done.stderr


def test_the_race_of_layer_norm_is_found(tmp_path):
    """All of a program's warps read `Count`, and one sets it. The comparison fails by PyTorch's own sums in FP16."""
    done = ran("05-layer-norm", tmp_path)
    assert done.returncode == 1
    assert "_layer_norm_bwd_dx_fused (num_warps=8 num_stages=3): race: " in done.stderr
    assert ": failed: " not in done.stderr
