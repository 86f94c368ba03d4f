"""KernelBench files: the model becomes the reference, its weights are inputs, and the kernel is to be written."""

from __future__ import annotations

import json
import shutil

import pytest

from evoengine.errors import UsageError
from evoengine.formats import kernelbench
from evoengine.formats.folder import run_script, write_folder
from evoengine.formats.importers import make_folder
from evoengine.formats.model_probe import look
from evoengine.workloads.base import Tolerance
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


def look_here(kind, script):
    """What a process of the script's own would say, said by this one."""
    return json.loads(json.dumps([look(str(script))]))


def imported(tmp_path, text, run_script=look_here):
    (tmp_path / "model.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernelbench, "run_script", run_script)
        made = make_folder("own", f"kernelbench:{tmp_path / 'model.py'}")
    write_folder(made, tmp_path / "own")
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model, and what was imported."""
    place = tmp_path_factory.mktemp("model")
    return place / "own", imported(place, MODEL, run_script)


def test_a_model_becomes_a_reference_with_its_weights_as_inputs_and_its_sizes_as_axes(model):
    folder, made = model
    assert made.problem["axes"] == {"rows": {"type": "var"}, "columns": {"type": "var"}}
    assert made.problem["inputs"] == {
        "x": {"shape": ["rows", "columns"], "dtype": "float32"},
        "linear_weight": {"shape": ["8", "columns"], "dtype": "float32"},
        "linear_bias": {"shape": ["8"], "dtype": "float32"},
    }
    assert made.problem["outputs"] == {"out": {"shape": ["rows", "8"], "dtype": "float32"}}
    assert made.problem["workloads"] == [{"axes": {"rows": 16, "columns": 40}, "inputs": {}}]
    assert load_folder(folder).tolerance == Tolerance(roundings=8192)


def test_the_naive_kernel_of_a_model_passes_the_gate_and_a_wrong_one_does_not(model, tmp_path):
    shutil.copytree(model[0], tmp_path / "own")
    config, file = {"family": "own", "block_size_x": 64}, tmp_path / "own" / "own.cu"
    verdict = gate(tmp_path / "own", config)
    assert verdict.correct, verdict.reason
    assert len({case.problem for case in verdict.cases}) > 3
    text = file.read_text()
    for old, new in (("fmaxf(", "fminf("), ("< columns;", "< 40;")):  # another sign, another size
        assert old in text
        file.write_text(text.replace(old, new, 1))
        assert not gate(tmp_path / "own", config).correct


OPERATIONS = {
    "softmax": "torch.softmax(x, dim=1)",
    "a norm": "x / torch.norm(x, p=2, dim=1, keepdim=True)",
    "a reversed sum": "torch.cumsum(x.flip(1), dim=1).flip(1)",
    "an exclusive sum": "torch.cat((0 * x[:, :1], x.narrow(1, 0, x.shape[1] - 1).cumsum(1)), dim=1)",
    "the largest": "torch.max(x, dim=1)[0]",
    "its place": "torch.argmax(x, dim=0)",
    "layers": "F.layer_norm(x, x.shape[1:])",
    "convolution": "F.conv2d(x[None, None], w[None, None, :3, :5], stride=(2, 1), padding=(1, 2), dilation=(1, 2))",
    "transposed": "F.conv_transpose2d(x[None, None], w[None, None, :3, :1], stride=2, padding=(1, 0))",
    "pooling": "F.avg_pool2d(x[None], 3, stride=2, padding=1)",
    "the largest of a window": "F.max_pool2d(x[None], 2, stride=3)",
    "a loss": "F.smooth_l1_loss(x, x * 0.5)",
    "other shapes of the same elements": "(x.t()[None].expand(3, m, n).reshape(3 * m, n)[:, :, None].reshape(3, -1))",
    "a norm that updates in place": "F.rms_norm(x, x.shape[1:]).mul_(0.5)",
    "parts": "torch.cat([part * (i + 1) for i, part in enumerate((*x.split((5, 7, m - 12), 1), *x.chunk(2, 1)))], 1)",
    "a mask": "x.masked_fill(~((x > 0.2) & torch.ones(m, device=x.device).bool() | (x < -1)), 0.5)",
    "rows of a table": "F.embedding(torch.argmax(x, dim=0), x).unbind(1)[0]",
    "several": "F.gelu(torch.matmul(x, w.t()) * 0.3).mean(dim=0)",
}
GENERIC = """import torch
import torch.nn.functional as F

n, m = 24, 21

class Model(torch.nn.Module):
    def forward(self, x, w):
        return OPERATION

def get_inputs():
    return [torch.rand(n, m), torch.rand(9, m)]
"""


@pytest.mark.parametrize("operation", more(OPERATIONS))
def test_operations_have_naive_kernels_that_are_right_at_all_sizes(tmp_path, operation):
    made = imported(tmp_path, GENERIC.replace("OPERATION", OPERATIONS[operation]))
    assert not any("skeleton" in remark for remark in made.remarks), made.remarks
    verdict = gate(tmp_path / "own", {"family": "own", "block_size_x": 32})
    assert verdict.correct, verdict.reason


def test_attentions_factor_which_is_a_power_of_a_size_varies_with_it(tmp_path):
    made = imported(tmp_path, GENERIC.replace("OPERATION", "F.scaled_dot_product_attention(x, w, w * 0.5)"))
    assert made.problem["axes"] == {"n": {"type": "var"}, "m": {"type": "var"}}
    assert "powf(1.0f * m, (-0.25f))" in made.kernel
    verdict = gate(tmp_path / "own", {"family": "own", "block_size_x": 32})
    assert verdict.correct, verdict.reason


def test_sizes_that_the_gate_cannot_afford_are_halved_in_the_example_and_named(tmp_path):
    made = imported(tmp_path, MODEL.replace("16, 40", "4096, 393216"))
    assert made.problem["workloads"][0]["axes"] == {"rows": 512, "columns": 768}  # 512 · 8 · 768 steps, 4 M at most
    assert made.problem["flops"] == "2 * (rows * 8 * columns)"
    assert any("--problem own:rows=4096,columns=393216" in remark for remark in made.remarks)


def test_what_each_element_repeats_counts_in_the_size_of_the_example(tmp_path):
    whole = GENERIC.replace("n, m = 24, 21", "n, m = 4096, 4096").replace("OPERATION", "x / torch.norm(x)")
    made = imported(tmp_path, whole)
    assert made.problem["workloads"][0]["axes"] == {"n": 32, "m": 64}  # 2,048 elements, each from 2,048


@pytest.mark.parametrize(
    ("operation", "constraints"),
    [
        ("F.avg_pool3d(x[None, None], (1, 3, 3), 2, (0, 1, 1))", ["n >= 3", "m >= 3"]),
        *more([("x[4:, 2:] * 2", ["n >= 5", "m >= 3"])]),  # of no elements below
    ],
)
def test_a_size_that_the_model_refuses_is_none_of_the_gates(tmp_path, operation, constraints):
    made = imported(tmp_path, GENERIC.replace("OPERATION", operation))
    assert made.problem["constraints"] == constraints
    verdict = gate(tmp_path / "own", {"family": "own", "block_size_x": 32})
    assert verdict.correct, verdict.reason


TIED = """import torch

batch = 24
shape = (24,)
classes = 18
width = (classes,)

class Model(torch.nn.Module):
    def forward(self, x, y, scores, of):
        return torch.mean(torch.clamp(1 - x * y, min=0)) + torch.nn.functional.cross_entropy(scores, of)

def get_inputs():
    x, y, scores = torch.rand(batch, *shape), torch.rand(batch), torch.rand(batch, *width)
    return [x, y, scores, torch.randint(0, classes, (batch,))]
"""


def test_a_number_among_the_inputs_is_an_argument_of_the_naive_kernel(tmp_path):
    made = imported(
        tmp_path, MODEL.replace("x)", "x, s)").replace("x, s))", "x)) * s + s").replace("columns)]", "columns), 3.25]")
    )
    assert made.problem["workloads"][0]["inputs"] == {"s": {"type": "scalar", "value": 3.25}}
    verdict = gate(tmp_path / "own", {"family": "own", "block_size_x": 64})
    assert verdict.correct, verdict.reason
    assert "other scalars" in {case.name for case in verdict.cases}


def test_sizes_that_must_be_equal_and_entries_of_tuples_that_are_a_size_vary_with_it(tmp_path):
    made = imported(tmp_path, TIED)
    assert made.problem["axes"] == {"batch": {"type": "var"}, "classes": {"type": "var"}}
    assert made.problem["inputs"]["x"]["shape"] == ["batch", "batch"]
    assert made.problem["workloads"][0]["inputs"]["of"] == {"type": "integers", "low": 0, "high": "classes"}
    verdict = gate(tmp_path / "own", {"family": "own", "block_size_x": 32})
    assert verdict.correct, verdict.reason


def test_an_operation_without_a_naive_form_leaves_a_skeleton_and_its_name(tmp_path):
    made = imported(tmp_path, GENERIC.replace("OPERATION", "torch.linalg.inv(x @ x.t())"))
    assert any("own.cu is a skeleton to write" in remark and "linalg_inv" in remark for remark in made.remarks)


OUTPUT = {"name": "output", "op": "output", "args": [{"node": "x"}]}
PLACEHOLDER = {"name": "x", "op": "placeholder", "args": [], "named": {}, "shape": [4], "dtype": "float32"}


@pytest.mark.parametrize(
    "graph",
    [
        "no list",
        [],
        [PLACEHOLDER],
        [PLACEHOLDER, {**OUTPUT, "args": []}],
        [PLACEHOLDER | {"shape": [{"size": "n; int z"}]}, OUTPUT],
        [PLACEHOLDER, {**PLACEHOLDER, "name": "y", "op": "aten.relu.default", "args": [{"node": "y"}]},
         {**OUTPUT, "args": [{"node": "y"}]}],
    ],
)  # fmt: skip
def test_a_trace_that_is_none_gives_a_skeleton(tmp_path, monkeypatch, graph):
    (tmp_path / "model.py").write_text(MODEL)
    item = {"shape": [4], "dtype": "float32"}
    found = {"sizes": {}, "names": ["x"], "inputs": [item], "weights": {}, "outputs": [item], "draws": [{}]}
    found |= {"least": {}, "follow": {}}
    monkeypatch.setattr(kernelbench, "run_script", lambda kind, script: [found | {"graph": graph}])
    made = make_folder("own", f"kernelbench:{tmp_path / 'model.py'}")
    assert any("skeleton" in remark for remark in made.remarks) and "int z" not in made.kernel


UNREADABLE = [
    ("x = 1", "described no kernel to import: KeyError: 'Model'"),
    (MODEL.replace("torch.randn(rows, columns)", "3"), "described no kernel to import"),
]
NO_TENSOR = (
    MODEL.replace("return [torch.randn(rows, columns)]", "return [torch.randn(rows, columns), 3]").replace(
        "self, x", "self, x, n"
    ),
    "which is not a tensor",
)


@pytest.mark.parametrize(("text", "complaint"), more([NO_TENSOR, *UNREADABLE]))
def test_a_file_without_a_model_says_why(tmp_path, text, complaint):
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(UsageError) as error:
        make_folder("own", f"kernelbench:{tmp_path / 'model.py'}")
    assert complaint in str(error.value)
