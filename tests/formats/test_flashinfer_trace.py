"""FlashInfer-Trace definitions in the schema's dialects: brought in with a kernel or a skeleton, and gated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from evoengine.errors import UsageError
from evoengine.formats.folder import NewFolder, write_folder
from evoengine.formats.importers import make_folder
from evoengine.records import Outcome
from evoengine.workloads.base import Case
from evoengine.workloads.folder import load_folder
from evoengine.workloads.folder_cases import MOST_WORK, work
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


def test_an_rms_norm_of_a_sum_with_a_residual_has_a_kernel_where_the_reference_adds_them(tmp_path):
    tensors = RMS_NORM["inputs"]
    inputs = {"hidden_states": tensors["hidden_states"], "residual": tensors["hidden_states"]} | tensors
    plain = RMS_NORM["reference"].replace("run(hidden_states, weight)", "run(hidden_states, residual, weight)")
    added = plain.replace("torch.float32)\n", "torch.float32) + residual.to(torch.float32)\n", 1)
    verdict = gate(
        written(tmp_path, RMS_NORM | {"inputs": inputs, "reference": added}),
        {"family": "own", "block_size_x": 64, "unroll": 2},
    )
    assert verdict.correct, verdict.reason
    other = imported(tmp_path, RMS_NORM | {"inputs": inputs, "reference": plain})
    assert any("skeleton" in remark for remark in other.remarks)


def test_an_input_that_may_be_left_out_is_always_given(tmp_path):
    inputs = {name: item | {"optional": name == "weight"} for name, item in RMS_NORM["inputs"].items()}
    made = imported(tmp_path, RMS_NORM | {"inputs": inputs})
    assert made.problem["inputs"] == RMS_NORM["inputs"]
    assert "that weight may be left out: a kernel always gets its inputs" in made.remarks


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
    drawn = {"indptr": {"type": "indptr", "total": "pages"}, "sm_scale": {"type": "scalar", "value": 0.25}}
    assert made.problem["workloads"] == [{"axes": axes, "inputs": drawn}]
    said = "\n".join(made.remarks)
    assert "the contents of indptr by safetensors" in said
    assert made.problem["constraints"] == ["ends == batch + 1", "ends >= 2"]


def test_large_constants_of_a_gemm_vary_so_that_the_gate_can_afford_them(tmp_path):
    axes = GEMM["axes"] | {axis: {"type": "const", "value": value} for axis, value in (("N", 4096), ("K", 14336))}
    made = imported(tmp_path, GEMM | {"axes": axes}, [{"axes": {"M": 7}}])
    assert made.problem["workloads"] == [{"axes": {"M": 7, "N": 4096, "K": 14336}, "inputs": {}}]
    assert "int M, int N, int K" in made.kernel
    assert any("that N=4096, K=14336 are constants" in remark for remark in made.remarks)
    named = GEMM["reference"].replace("    return", "    assert B.shape == (4096, 14336)\n    return")
    assert imported(tmp_path, GEMM | {"axes": axes, "reference": named}).problem["axes"] == axes


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
        (
            {"inputs": GEMM["inputs"] | {"B": {"shape": ["N", "L"], "dtype": "float16"}}},
            "names L, which is not an axis",
        ),
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


# --- attention

PAGED: dict[str, Any] = {
    "name": "decode",
    "op_type": "gqa_paged",
    "axes": {
        "batch_size": {"type": "var"},
        "num_qo_heads": {"type": "const", "value": 4},
        "num_kv_heads": {"type": "const", "value": 2},
        "head_dim": {"type": "const", "value": 32},
        "num_pages": {"type": "var"},
        "page_size": {"type": "const", "value": 2},
        "len_indptr": {"type": "var"},
        "num_kv_indices": {"type": "var"},
    },
    "constraints": ["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"],
    "inputs": {
        "q": {"shape": ["batch_size", "num_qo_heads", "head_dim"], "dtype": "float16"},
        "k_cache": {"shape": ["num_pages", "page_size", "num_kv_heads", "head_dim"], "dtype": "float16"},
        "v_cache": {"shape": ["num_pages", "page_size", "num_kv_heads", "head_dim"], "dtype": "float16"},
        "kv_indptr": {"shape": ["len_indptr"], "dtype": "int32"},
        "kv_indices": {"shape": ["num_kv_indices"], "dtype": "int32"},
        "last_page_len": {"shape": ["batch_size"], "dtype": "int32"},
        "unused": {"shape": ["batch_size"], "dtype": "int32"},
        "sm_scale": {"shape": None, "dtype": "float32"},
    },
    "outputs": {
        "output": {"shape": ["batch_size", "num_qo_heads", "head_dim"], "dtype": "float16"},
        "lse": {"shape": ["batch_size", "num_qo_heads"], "dtype": "float32"},
    },
    "reference": """import math
import torch

def run(q, k_cache, v_cache, kv_indptr, kv_indices, last_page_len, sm_scale):
    assert len(kv_indices) == int(kv_indptr[-1])
    batch, heads, dim = q.shape
    out = torch.zeros_like(q)
    lse = torch.full((batch, heads), -float("inf"), dtype=torch.float32)
    for b in range(batch):
        pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        if not len(pages):
            continue
        count = (len(pages) - 1) * k_cache.shape[1] + int(last_page_len[b])
        k, v = (c[pages].flatten(0, 1)[:count].float().repeat_interleave(2, 1) for c in (k_cache, v_cache))
        logits = torch.einsum("hd,nhd->hn", q[b].float(), k) * sm_scale
        lse[b] = torch.logsumexp(logits, -1) / math.log(2)
        out[b] = torch.einsum("hn,nhd->hd", logits.softmax(-1), v).to(q.dtype)
    return {"output": out, "lse": lse}
""",
}


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decode")
    (folder / "d.json").write_text(json.dumps(PAGED))
    write_folder(make_folder("decode", f"trace:{folder / 'd.json'}"), folder / "decode")
    return folder / "decode"


def test_a_definition_of_attention_has_valid_draws_of_its_indices(decode):
    problem = json.loads((decode / "problem.json").read_text())
    draws = problem["workloads"][0]["inputs"]
    assert draws["kv_indptr"] == {"type": "indptr", "total": "num_kv_indices"}
    assert draws["kv_indices"] == {"type": "integers", "low": 0, "high": "num_pages"}
    assert draws["last_page_len"] == {"type": "integers", "low": 1, "high": "page_size + 1"}
    assert problem["constraints"] == ["len_indptr == batch_size + 1", "len_indptr >= 2"]


def test_of_a_causal_prefill_every_query_has_its_own_key(tmp_path):
    queries = {"qo_indptr": {"shape": ["len_indptr"], "dtype": "int32"}}
    inputs = {"q": PAGED["inputs"]["q"] | {"shape": ["total_q", *PAGED["inputs"]["q"]["shape"][1:]]}} | queries
    changes = {
        "name": "causal",
        "axes": PAGED["axes"] | {"total_q": {"type": "var"}},
        "inputs": inputs | {name: item for name, item in PAGED["inputs"].items() if name != "q"},
        "constraints": [*PAGED["constraints"], "total_q == qo_indptr[-1].item()"],
    }
    made = imported(tmp_path, PAGED | changes)
    draws = made.problem["workloads"][0]["inputs"]
    assert draws["kv_indptr"] == {"type": "indptr", "total": "num_kv_indices", "over": "qo_indptr"}
    assert "num_kv_indices >= total_q" in made.problem["constraints"]


def test_lengths_of_last_pages_are_one_fewer_than_offsets_where_no_constraint_says_so(tmp_path):
    named = {f"kv_{n}" if n == "last_page_len" else n: item for n, item in PAGED["inputs"].items()}
    reference = PAGED["reference"].replace("last_page_len", "kv_last_page_len")
    constraints = [one for one in PAGED["constraints"] if "batch_size" not in one]
    made = imported(tmp_path, PAGED | {"inputs": named, "reference": reference, "constraints": constraints})
    assert "len_indptr == batch_size + 1" in made.problem["constraints"]
    example = made.problem["workloads"][0]
    assert example["axes"]["len_indptr"] == example["axes"]["batch_size"] + 1
    assert example["inputs"]["kv_last_page_len"] == {"type": "integers", "low": 1, "high": "page_size + 1"}
    assert "kv_last_page_len[segment_]" in made.kernel


ATTENTION = {"family": "decode", "block_size_x": 64}


def test_its_operations_are_those_of_both_products(decode):
    found = load_folder(decode)
    problem = found.parse("decode:batch_size=3,len_indptr=4,num_pages=9,num_kv_indices=12")
    assert found.flops(problem) == 2 * 4 * (32 + 32) * (12 * 2)


def test_cases_of_large_pages_are_halved_although_a_constraint_fixes_the_longest_axis(tmp_path):
    large = {"page_size": {"type": "const", "value": 64}, "head_dim": {"type": "const", "value": 256}}
    found = load_folder(written(tmp_path, PAGED | {"axes": PAGED["axes"] | large}))
    problem = found.parse("own:batch_size=24,len_indptr=25,num_pages=24,num_kv_indices=24")
    affordable = [case for case in found.cases(problem, ATTENTION) if not case.name.startswith("own ")]
    assert len(affordable) > 5
    assert all(work(found.definition, case.problem) <= MOST_WORK for case in affordable)


def test_its_kernel_passes_the_gate_with_segments_that_are_empty(decode):
    verdict = gate(decode, ATTENTION)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (": -INFINITY;", ": -1e30f;", "outputs of lse are not the infinities that the reference gives"),
        (" * 1.4426950408889634f", "", "of lse"),
        ("+ last_page_len[segment_]", "+ 2", "error"),
        ("head_ / (num_qo_heads / num_kv_heads)", "head_ % num_kv_heads", "error"),
    ],
)
def test_a_fault_in_it_is_seen(decode, tmp_path, right, wrong, said):
    own = tmp_path / "decode"
    shutil.copytree(decode, own)
    text = (own / "decode.cu").read_text()
    assert right in text
    (own / "decode.cu").write_text(text.replace(right, wrong))
    verdict = gate(own, ATTENTION)
    assert not verdict.correct and said in verdict.reason
