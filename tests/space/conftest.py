from __future__ import annotations

import pytest

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
def small() -> str:
    """A space file of two families, a conditional knob and one constraint; others are made from it by replacement."""
    return SMALL
