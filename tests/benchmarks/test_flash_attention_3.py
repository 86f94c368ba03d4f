"""FlashAttention-3's own binaries, executed: they are right on a GPU, so what the executor makes of them must be too.

The cubins are not part of the package; EVOENGINE_FA3 names the folder that holds them.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import flash_attention_3 as benchmark
from evoengine.devices.base import KernelHung
from evoengine.sass.chip import find_chip
from evoengine.sass.core import run

FOLDER = Path(os.environ.get("EVOENGINE_FA3", "no folder"))
needs_cubins = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="EVOENGINE_FA3 names no folder with FlashAttention-3's cubins"
)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """O [batch, seqlen, heads, dim] and the logarithms of the row sums [batch, heads, seqlen], both float64."""
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    row_max = scores.max(-1, keepdims=True)
    weights = np.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdims=True)
    return (weights / row_sum @ v).transpose(0, 2, 1, 3), (row_max + np.log(row_sum))[..., 0]


@needs_cubins
@pytest.mark.parametrize("seed", [0, 1, 3], ids=["lands late", "lands at any time", "lands early"])
@pytest.mark.parametrize("name", benchmark.KERNELS)
def test_the_binaries_compute_attention_whenever_their_copies_and_products_land(name, seed):
    published = benchmark.KERNELS[name]
    # a last row tile and a last column tile that are not full, and more tiles than blocks
    problem = benchmark.Problem(2, 2, 500, published.dim, published.causal)
    random = np.random.default_rng(seed)
    tensors = {name: random.standard_normal(problem.shape).astype(np.float16) for name in "qkv"}
    program, kernel = benchmark.read(FOLDER, name)
    assert not program.unknown
    prepared = benchmark.launch(kernel, published.tile, problem, blocks=3, tensors=tensors, seed=seed)
    run(program, prepared)
    results = prepared.results()
    o, lse = attention(**tensors, causal=published.causal)
    # O is rounded to halfs, and before it the weights: 2^-11 of values up to 4
    np.testing.assert_allclose(results["o"].astype(np.float64), o, rtol=0, atol=2e-3)
    np.testing.assert_allclose(results["lse"], lse, rtol=0, atol=1e-5)


@needs_cubins
def test_a_box_with_fewer_rows_than_the_binary_waits_for_is_found():
    program, kernel = benchmark.read(FOLDER, "d64_192x128")
    problem = benchmark.Problem(1, 1, 384, 64)
    tensors = {name: np.zeros(problem.shape, np.float16) for name in "qkv"}
    prepared = benchmark.launch(kernel, benchmark.Tile(192, 127), problem, blocks=1, tensors=tensors)
    with pytest.raises(KernelHung):
        run(program, prepared)


@needs_cubins
def test_a_prediction_is_near_the_published_speed():
    row = benchmark.row(FOLDER, "d128_causal_128x128", find_chip(benchmark.CHIP))
    assert abs(row.deviation) < 0.12 and row.prediction.kernel_class == "wgmma with softmax"


def test_a_division_by_a_high_product_is_a_division():
    for by in (1, 2, 3, 16, 43, 86, 128, 2752):
        divisor, multiplier, shift = np.frombuffer(benchmark.divisor(by), np.uint32)
        for number in (0, 1, by - 1, by, 2 * by - 1, 2751, 2**31 - 1):
            quotient = number if by == 1 else (number * int(multiplier) >> 32) >> int(shift)
            assert (divisor, quotient) == (by, number // by)


def test_causal_tiles_are_handed_out_longest_first_and_hold_all_of_the_work():
    tile, problem = benchmark.Tile(128, 128), benchmark.Problem(1, 2, 512, 128, causal=True)
    assert benchmark.steps_of_tiles(tile, problem).tolist() == [4, 4, 3, 3, 2, 2, 1, 1]
    whole = benchmark.Problem(1, 2, 512, 128)
    assert benchmark.steps_of_tiles(tile, whole).tolist() == [4] * 8


def test_a_folder_without_cubins_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        benchmark.main(["--cubins", str(tmp_path)])
    assert refused.value.code == 2
    assert f"{tmp_path} has none of the cubins d64_192x128" in capsys.readouterr().err


def test_a_file_that_is_no_cubin_is_refused(tmp_path, capsys):
    (tmp_path / "d64_192x128.cubin").write_bytes(b"nothing of the kind")
    with pytest.raises(SystemExit) as refused:
        benchmark.main(["--cubins", str(tmp_path)])
    assert refused.value.code == 2
    assert "cubin" in capsys.readouterr().err
