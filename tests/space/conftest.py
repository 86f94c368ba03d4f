from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from evoengine.gpu import Gpu, find_gpu
from evoengine.problem import Problem, parse_problem
from evoengine.space.space import SearchSpace, load_space

SMALL = """\
kernel = "attention"
[knobs]
family = ["scalar", "wmma"]
tile_m = [32, 64, 128]
warps  = [1, 2, 4, 8]
pad    = { values = [0, 8, 16], when = "family == 'wmma'" }
[[constraint]]
expr = "tile_m % (16 * warps) == 0"
when = "family == 'wmma'"
why  = "each warp owns whole 16-row stripes"
[launch.scalar]
threads = "32 * warps"
grid    = ["ceil_div(seq_q, tile_m)", "heads", "batch"]
shared  = 0
[launch.wmma]
threads = "32 * warps"
grid    = ["ceil_div(seq_q, tile_m)", "heads", "batch"]
shared  = "tile_m * (head_dim + pad) * element_bytes"
[cost.wmma]
tensor_flops = "4 * tile_m * seq_k * head_dim"
[[start]]
family = "wmma"
tile_m = 64
warps  = 4
pad    = 16
"""


@pytest.fixture
def problem() -> Problem:
    return parse_problem("b16,h16,s2048,d64,fp16")


@pytest.fixture
def gpu() -> Gpu:
    return find_gpu("h100")


@pytest.fixture
def small() -> str:
    """A space file of two families, a conditional knob and one constraint; others are made from it by replacement."""
    return SMALL


@pytest.fixture
def load(tmp_path: Path, problem: Problem, gpu: Gpu) -> Callable[[str], SearchSpace]:
    def loaded(text: str) -> SearchSpace:
        path = tmp_path / "space.toml"
        path.write_text(text)
        return load_space(path, problem, gpu)

    return loaded
