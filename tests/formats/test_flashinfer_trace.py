"""FlashInfer-Trace definitions in the schema's dialects: brought in with a kernel or a skeleton, and gated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evoengine.errors import UsageError
from evoengine.formats.folder import NewFolder, write_folder
from evoengine.formats.importers import make_folder
from evoengine.records import Outcome
from evoengine.workloads.base import Case
from evoengine.workloads.folder import load_folder
from tests.support.folders import gate

GEMM: dict[str, Any] = {
    "name": "gemm_n72_k40",
    "op_type": "gemm",
    "tags": ["status:verified"],
    "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 72}, "K": {"type": "const", "value": 40}},
    "inputs": {"A": {"shape": ["M", "K"], "dtype": "float16"}, "B": {"shape": ["N", "K"], "dtype": "float16"}},
    "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16", "description": "the product"}},
    "reference": "import torch\n\ndef run(A, B):\n    return torch.matmul(A, B.T)\n",
}
RMS_NORM: dict[str, Any] = {
    "name": "rmsnorm_h96",
    "op_type": "rmsnorm",
    "axes": {"batch_size": {"type": "var", "parent": None}, "hidden_size": {"type": "const", "value": 96}},
    "inputs": {
        "hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"},
        "weight": {"shape": ["hidden_size"], "dtype": "bfloat16"},
    },
    "outputs": {"output": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"}},
    "reference": """import torch

@torch.no_grad()
def run(hidden_states, weight):
    assert hidden_states.shape[1] == 96
    EPS = 1e-5
    x = hidden_states.to(torch.float32)
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS) * weight.to(torch.float32)
    return y.to(hidden_states.dtype)
""",
}
DECODE: dict[str, Any] = {
    "name": "gqa_decode_h4_kv2_d16",
    "op_type": "gqa_paged",
    "axes": {
        "batch": {"type": "var"}, "pages": {"type": "var"}, "ends": {"type": "var"},
        "heads": {"type": "const", "value": 4}, "head_dim": {"type": "const", "value": 16},
    },
    "constraints": ["ends == batch + 1", "pages == indptr[-1].item()"],
    "inputs": {
        "q": {"shape": ["batch", "heads", "head_dim"], "dtype": "bfloat16"},
        "cache": {"shape": ["pages", "heads", "head_dim"], "dtype": "bfloat16"},
        "indptr": {"shape": ["ends"], "dtype": "int32"},
        "sm_scale": {"shape": None, "dtype": "float32"},
    },
    "outputs": {
        "output": {"shape": ["batch", "heads", "head_dim"], "dtype": "bfloat16"},
        "lse": {"shape": ["batch", "heads"], "dtype": "float32"},
    },
    "reference": "def run(q, cache, indptr, sm_scale):\n    return q * sm_scale, q.float().sum(-1)\n",
}  # fmt: skip


def imported(
    folder: Path, definition: dict[str, Any], workloads: list[Any] | None = None, name: str = "own"
) -> NewFolder:
    (folder / "definition.json").write_text(json.dumps(definition))
    (folder / "workloads.jsonl").write_text("\n".join(map(json.dumps, workloads or [])))
    lines = f",{folder / 'workloads.jsonl'}" if workloads else ""
    return make_folder(name, f"trace:{folder / 'definition.json'}{lines}")


def written(folder: Path, *args: Any) -> Path:
    write_folder(imported(folder, *args), folder / "own")
    return folder / "own"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gemm_comes_with_a_kernel_that_passes_the_gate(tmp_path, dtype):
    tensors = {name: spec | {"dtype": dtype} for name, spec in (GEMM["inputs"] | GEMM["outputs"]).items()}
    own = GEMM | {"inputs": {n: tensors[n] for n in "AB"}, "outputs": {"C": tensors["C"]}}
    config = {"family": "own", "block_size_x": 16, "block_size_y": 4, "tile_k": 16, "rows_per_thread": 2}
    verdict = gate(written(tmp_path, own), config)
    assert verdict.correct, verdict.reason


def test_an_rms_norm_comes_with_a_kernel_that_passes_the_gate(tmp_path):
    verdict = gate(written(tmp_path, RMS_NORM), {"family": "own", "block_size_x": 64, "unroll": 2})
    assert verdict.correct, verdict.reason


def test_its_epsilon_is_the_references(tmp_path):
    folder = written(tmp_path, RMS_NORM)
    kernel = folder / "own.cu"
    assert "1e-05f" in kernel.read_text()
    kernel.write_text(kernel.read_text().replace("1e-05f", "3e-2f"))
    assert gate(folder, {"family": "own", "block_size_x": 64, "unroll": 2}).outcome is Outcome.INCORRECT


def test_any_other_operation_comes_with_a_skeleton_that_the_gate_refuses(tmp_path):
    made = imported(tmp_path, DECODE)
    assert any("is a skeleton to write, which the gate refuses as it is" in remark for remark in made.remarks)
    write_folder(made, tmp_path / "own")
    verdict = gate(tmp_path / "own", {"family": "own", "block_size_x": 128})
    assert verdict.outcome is Outcome.INCORRECT and "never written" in verdict.reason


def test_workloads_give_sizes_and_values_and_what_else_they_hold_is_named(tmp_path):
    inputs = {
        "q": {"type": "random"}, "indptr": {"type": "safetensors", "path": "a.safetensors", "tensor_key": "indptr"},
        "sm_scale": {"type": "scalar", "value": 0.25},
    }  # fmt: skip
    axes = {"batch": 3, "pages": 40, "ends": 4}
    lines = [
        {"definition": "another", "workload": {"uuid": "0", "axes": {"batch": 9}, "inputs": {}}},
        {"definition": DECODE["name"], "workload": {"uuid": "1", "axes": axes, "inputs": inputs}, "solution": None},
    ]
    made = imported(tmp_path, DECODE, lines)
    assert made.problem["workloads"] == [{"axes": axes, "inputs": {"sm_scale": {"type": "scalar", "value": 0.25}}}]
    said = "\n".join(made.remarks)
    assert "the contents of indptr by safetensors" in said and "pages == indptr[-1].item()" in said
    assert made.problem["constraints"] == ["ends == batch + 1"]


def test_without_workloads_sizes_and_values_are_chosen_and_said(tmp_path):
    made = imported(tmp_path, RMS_NORM)
    assert "sizes: no workload gives any; problem.json has batch_size=256" in made.remarks


def test_a_reference_of_another_name_is_called(tmp_path):
    made = imported(tmp_path, GEMM | {"reference": GEMM["reference"].replace("run", "gemm_reference")})
    assert "that the reference has no run: its function gemm_reference is called" in made.remarks
    write_folder(made, tmp_path / "own")
    found = load_folder(tmp_path / "own")
    problem = found.parse("own:M=5")
    tensors = found.tensors()
    inputs = tensors.draw(Case("any", problem), seed=1).inputs
    assert tensors.own_dtype(problem, inputs)["C"].shape == (5, 72)


def test_the_dialect_with_computed_axes_is_read(tmp_path):
    axes = GEMM["axes"] | {"K": {"type": "expr", "expression": "N // 2 + 4", "description": "half"}}
    found = load_folder(written(tmp_path, GEMM | {"axes": axes}))
    assert found.parse("own:M=5").axes["K"] == 40


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"axes": None}, "is no FlashInfer-Trace definition"),
        ({"outputs": {"A": GEMM["inputs"]["A"]}}, "A is both an input and an output"),
        (
            {"inputs": GEMM["inputs"] | {"B": {"shape": ["N", "K"], "dtype": "float8_e4m3fn"}}},
            "which the emulator does not have",
        ),
        ({"inputs": GEMM["inputs"] | {"B": {"shape": ["N", "L"], "dtype": "float16"}}}, "names L, which is no axis"),
        ({"inputs": GEMM["inputs"] | {"B; rm -rf": {"shape": [], "dtype": "float16"}}}, "cannot name a tensor"),
        ({"inputs": None}, "inputs must be an object of tensors"),
        ({"reference": "x = 1"}, "the reference has no function run"),
    ],
)
def test_a_definition_that_makes_no_kernel_is_refused_in_one_sentence(tmp_path, changes, complaint):
    with pytest.raises(UsageError) as error:
        imported(tmp_path, GEMM | changes)
    assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["{", '{"definition": "another", "workload": {"axes": {}}}'])
def test_workloads_that_are_none_of_the_definition_are_refused(tmp_path, line):
    (tmp_path / "d.json").write_text(json.dumps(GEMM))
    (tmp_path / "w.jsonl").write_text(line)
    with pytest.raises(UsageError):
        make_folder("own", f"trace:{tmp_path / 'd.json'},{tmp_path / 'w.jsonl'}")
