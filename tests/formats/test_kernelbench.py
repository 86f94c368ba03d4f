"""KernelBench files: the model becomes the reference, its weights are inputs, and the kernel is to be written."""

from __future__ import annotations

import pytest

from evoengine.errors import UsageError
from evoengine.formats.folder import write_folder
from evoengine.formats.importers import make_folder
from evoengine.workloads.folder import load_folder
from tests.support.exhaustive import more
from tests.support.folders import gate

MODEL = """import torch
import torch.nn as nn

rows, columns = 16, 40

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(rows, columns)]

def get_init_inputs():
    return [columns]
"""
KERNEL = """extern "C" __global__ void own(
    const float* x, const float* linear_weight, const float* linear_bias, float* out) {
    int i = blockIdx.x * block_size_x + threadIdx.x;
    if (i >= 16 * 8) return;
    float sum = linear_bias[i % 8];
    for (int k = 0; k < 40; k++) sum += x[i / 8 * 40 + k] * linear_weight[i % 8 * 40 + k];
    out[i] = max(sum, 0.0f);
}
"""


def test_a_model_becomes_a_reference_with_its_weights_as_inputs(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    made = make_folder("own", f"kernelbench:{tmp_path / 'model.py'}")
    assert made.problem["inputs"] == {
        "x": {"shape": ["16", "40"], "dtype": "float32"},
        "linear_weight": {"shape": ["8", "40"], "dtype": "float32"},
        "linear_bias": {"shape": ["8"], "dtype": "float32"},
    }
    assert made.problem["outputs"] == {"out": {"shape": ["16", "8"], "dtype": "float32"}}
    write_folder(made, tmp_path / "own")
    config = {"family": "own", "block_size_x": 64}
    assert "never written" in gate(tmp_path / "own", config).reason
    (tmp_path / "own" / "own.cu").write_text(KERNEL)
    verdict = gate(tmp_path / "own", config)
    assert verdict.correct, verdict.reason
    (tmp_path / "own" / "own.cu").write_text(KERNEL.replace("max(sum, 0.0f)", "sum"))
    assert not gate(tmp_path / "own", config).correct
    assert load_folder(tmp_path / "own").tolerance.rtol == 1e-2


UNREADABLE = [
    ("x = 1", "described no kernel to import: KeyError: 'Model'"),
    (MODEL.replace("torch.randn(rows, columns)", "3"), "described no kernel to import"),
]
NO_TENSOR = (
    MODEL.replace("return [torch.randn(rows, columns)]", "return [torch.randn(rows, columns), 3]").replace(
        "self, x", "self, x, n"
    ),
    "something that is no tensor",
)


@pytest.mark.parametrize(("text", "complaint"), more([NO_TENSOR, *UNREADABLE]))
def test_a_file_without_a_model_says_why(tmp_path, text, complaint):
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(UsageError) as error:
        make_folder("own", f"kernelbench:{tmp_path / 'model.py'}")
    assert complaint in str(error.value)
