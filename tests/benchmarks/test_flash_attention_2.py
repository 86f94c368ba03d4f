"""FlashAttention-2's own binaries, executed: they are right on a GPU, so what the executor makes of them must be too.

The cubins are not part of the package; EVOENGINE_FA2 names the folder that holds them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import flash_attention_2 as benchmark
from evoengine.errors import UsageError
from evoengine.sass.chip import find_chip
from evoengine.sass.core import run
from evoengine.sass.predict import predict
from evoengine.workloads import parse_problem
from tests.benchmarks.test_flash_attention_3 import attention

FOLDER = Path(os.environ.get("EVOENGINE_FA2", "no folder"))
needs_cubins = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="EVOENGINE_FA2 names no folder with FlashAttention-2's cubins"
)


@needs_cubins
@pytest.mark.parametrize(("dim", "causal"), [(64, False), (96, True), (128, True), (256, False)])
@pytest.mark.parametrize("gpu", ["a100", "l40s"])
def test_the_binaries_compute_attention(gpu, dim, causal):
    _, problem = parse_problem(f"b2,h2,s256,d{dim},fp16" + ",causal" * causal)
    random = np.random.default_rng(dim)
    tensors = {name: random.standard_normal((2, 256, 2, dim)).astype(np.float16) for name in "qkv"}
    tile = benchmark.tile_of(gpu, dim, causal)
    program, kernel = benchmark.find_kernel(FOLDER, dim, tile, causal)
    assert not program.unknown
    prepared = benchmark.launch(kernel, tile, problem, tensors)
    run(program, prepared)
    results = prepared.results()
    o, lse = attention(**tensors, causal=causal)
    # O is rounded to halfs, and before it the weights: 2^-11 of values up to 4
    np.testing.assert_allclose(results["o"].astype(np.float64), o, rtol=0, atol=2e-3)
    np.testing.assert_allclose(results["lse"], lse, rtol=0, atol=1e-5)


@needs_cubins
def test_operands_that_products_hold_longer_make_a_lone_warp_slower():
    _, problem = parse_problem("b8,h8,s2048,d256,fp16")
    chip, tile = find_chip("rtx4090"), benchmark.tile_of("rtx4090", 256, False)
    program, kernel = benchmark.find_kernel(FOLDER, 256, tile, False)
    prepared = benchmark.launch(kernel, tile, problem)
    held_longer = replace(chip, rates={**chip.rates, "hmma_latency": 80.0})
    assert predict(program, prepared, held_longer).time_us > 1.3 * predict(program, prepared, chip).time_us


def test_a_folder_without_the_kernel_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"no kernel of FlashAttention-2 for head_dim 64"):
        benchmark.find_kernel(tmp_path, 64, benchmark.tile_of("a100", 64, False), False)


@pytest.mark.parametrize("gpu", ["a100", "a10", "l40s"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_chosen_tiles_fit_the_shared_memory(gpu, causal):
    for dim in benchmark.HEAD_DIMS:
        tile = benchmark.tile_of(gpu, dim, causal)
        assert tile.shared_bytes(dim) <= benchmark.find_gpu(gpu).shared_per_block
