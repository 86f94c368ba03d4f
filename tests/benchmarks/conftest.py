"""A recorded kernel that tests make: its text is real, its times are made up."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KERNEL = """
__constant__ float factors[4];
extern "C" __global__ void scale(float *out, const float *in, const int *turns, float by, int n) {
    int i = (blockIdx.y * gridDim.x + blockIdx.x) * block + threadIdx.x;
    if (i >= n) return;
    float x = in[i];
    for (int turn = 0; turn < repeat * turns[0]; turn++) x = x * by + factors[turn % 4];
    out[i] = x;
}
"""
ELEMENTS = 1 << 16
DESCRIPTION: dict[str, Any] = {
    "name": "scale",
    "entry": "scale",
    "knobs": ["block", "repeat"],
    "arguments": [
        {"name": "out", "kind": "buffer", "dtype": "float32", "elements": ELEMENTS, "fill": "zero", "output": True},
        {"name": "in", "kind": "buffer", "dtype": "float32", "elements": ELEMENTS, "fill": "normal", "output": False},
        {"name": "turns", "kind": "buffer", "dtype": "int32", "elements": 1, "fill": "one", "output": False},
        {"name": "by", "kind": "scalar", "dtype": "float32", "value": 0.5},
        {"name": "n", "kind": "scalar", "dtype": "int32", "value": ELEMENTS},
    ],
    "constants": [{"name": "factors", "kind": "buffer", "dtype": "float32", "elements": 4, "fill": "normal"}],
    "block": ["block"],
    "grid": ["256", f"ceil_div({ELEMENTS}, block * 256)"],
    "compiler": "NVRTC 11.8",
}
CONFIGS = [{"block": block, "repeat": repeat} for block in (64, 256) for repeat in (8, 64, 512)]


def made_up_us(config: dict[str, int]) -> float:
    """Not measured anywhere: more work takes longer, and that is all it says."""
    return 5.0 + config["repeat"] * (1.0 if config["block"] == 256 else 1.1)


def recording() -> dict[str, Any]:
    rows = [{"config": config, "time_us": made_up_us(config)} for config in CONFIGS]
    return {"gpu": "RTX_3090", "unit": "us", "valid": 6, "optimum_us": 5.5, "optimum": CONFIGS[3], "rows": rows}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder of recorded kernels, with entries of kernel.json and of the GPU's file replaced."""

    def written(
        text: str = KERNEL, gpu: str = "rtx3090", of_gpu: dict[str, Any] | None = None, **of_kernel: Any
    ) -> Path:
        folder = tmp_path / "kernels" / "scale"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.cu").write_text(text)
        (folder / "kernel.json").write_text(json.dumps(DESCRIPTION | of_kernel))
        data = json.dumps(recording() | (of_gpu or {})).encode()
        (folder / f"{gpu}.json.gz").write_bytes(gzip.compress(data))
        return folder.parent

    return written
