"""The benchmark of FlashAttention-3's kernels with a page table: their parameters, and input that is no such library.

The library is not part of the package; EVOENGINE_FA3_LIBRARY names it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import flash_attention_3_paged as benchmark
from evoengine.devices.base import ScalarArgument
from evoengine.sass.core import Races, run
from evoengine.sass.cubin import Kernel
from evoengine.workloads.decode.problem import parse_problem

LIBRARY = Path(os.environ.get("EVOENGINE_FA3_LIBRARY", "no library"))


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def float64(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.skipif(not LIBRARY.is_file(), reason="EVOENGINE_FA3_LIBRARY names no library with FlashAttention-3")
@pytest.mark.parametrize("splits", [1, 3])
def test_the_binaries_compute_attention_over_pages(splits):
    problem = parse_problem("b2,h8,kv2,s520,d128,bf16,page8")
    random = np.random.default_rng(splits)
    shapes = {"q": (2, 8, 128), "k": (problem.pages, 8, 2, 128), "v": (problem.pages, 8, 2, 128)}
    given = {name: bf16(random.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    given["table"] = random.permutation(problem.pages).astype(np.int32).reshape(2, -1)
    for program, launch in benchmark.launches(benchmark.read(LIBRARY), problem, splits, given):
        assert not program.unknown
        run(program, launch, races=Races.NONE)  # the executor misses a proxy fence behind their cp.async
        results = launch.results()
    q = float64(given["q"]).reshape(2, 2, 4, 128)
    k, v = (float64(given[name])[given["table"]].reshape(2, -1, 2, 128) for name in "kv")
    scores = np.einsum("bngd,bknd->bngk", q, k) / np.sqrt(128)
    weights = np.exp(scores)
    o = np.einsum("bngk,bknd->bngd", weights / weights.sum(-1, keepdims=True), v)
    # O and the weights are rounded to 8 bits
    np.testing.assert_allclose(float64(results["o"]), o.reshape(-1), rtol=0, atol=3e-3)
    np.testing.assert_allclose(results["lse"], np.log(weights.sum(-1)).reshape(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_parts_of_a_parameter_lie_beside_each_other(splits):
    class Given:
        parameters = ((528, 2176),)

    kernel: Kernel = Given()  # type: ignore[assignment]
    problem = parse_problem("b2,h8,kv2,s520,d128,bf16,page8")
    for parameter in (
        benchmark.parameter(kernel, problem, splits),
        benchmark.combine_parameter(kernel, problem, splits),
    ):
        ends = 0
        for at, part in sorted(parameter.parts, key=lambda part: part[0]):
            assert at >= ends
            ends = at + (part.value.nbytes if isinstance(part, ScalarArgument) else 8)
        assert ends <= parameter.bytes


def test_splits_are_those_of_their_heuristic():
    splits = [benchmark.splits_of(parse_problem(f"b{batch},h32,kv8,s8192,d128,bf16,page16")) for batch in (32, 4, 2, 1)]
    assert splits == [1, 4, 8, 15]  # of 256, 32, 16 and 8 tiles for 132 SMs


def test_a_missing_file_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--library", str(tmp_path / "none.so")])
    assert ended.value.code == 2 and "none.so" in capsys.readouterr().err
