"""Kernels of the form of vLLM's and SGLang's are tuned and written as the files that these read.

The kernel here is our own, with the parameters of theirs; the file's imports say whose it is, and are not executed.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

import evoengine
from evoengine import workloads
from evoengine.cli.main import evoengine as cli
from evoengine.errors import EvoengineError, NothingFound, UsageError
from evoengine.gpu import find_gpu
from evoengine.tuning import fused_moe
from evoengine.tuning.fused_moe import find_fused_moe, is_finished, write_fused_moe
from evoengine.workloads.triton_kernel import Served, served_file_name
from tests.support.exhaustive import more

triton = pytest.importorskip("triton", reason="Triton is not installed")

from evoengine.virtual.served import _aligned  # noqa: E402 - imports Triton

IMPORTS = {
    "vllm": "from vllm.triton_utils import tl, triton\n",
    "sglang": "import triton\nimport triton.language as tl\nfrom sglang.srt.utils import is_cuda\n",
}
MOE = """
unused = 1 / 0


@triton.jit
def product(a, b, total):
    return total + tl.dot(a, b)


@triton.jit
def fused_moe_kernel(
    a_ptr, b_ptr, c_ptr, a_scale_ptr, b_scale_ptr, topk_weights_ptr, sorted_token_ids_ptr, expert_ids_ptr,
    num_tokens_post_padded_ptr, N, K, EM, num_valid_tokens, stride_am, stride_ak, stride_be, stride_bk, stride_bn,
    stride_cm, stride_cn, stride_asm, stride_ask, stride_bse, stride_bsk, stride_bsn, group_n: tl.constexpr,
    group_k: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr, MUL_ROUTED_WEIGHT: tl.constexpr, top_k: tl.constexpr, compute_type: tl.constexpr,
    use_fp8_w8a8: tl.constexpr,
):
    tiles = tl.cdiv(N, BLOCK_SIZE_N)
    m, n = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if m * BLOCK_SIZE_M >= tl.load(num_tokens_post_padded_ptr):
        return
    rows = tl.load(sorted_token_ids_ptr + m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M))
    valid = rows < num_valid_tokens
    expert = tl.load(expert_ids_ptr + m)
    columns = n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    ks = tl.arange(0, BLOCK_SIZE_K)
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_SIZE_K):
        at = k + ks
        a = tl.load(a_ptr + (rows // top_k)[:, None] * stride_am + at[None, :],
                    mask=valid[:, None] & (at < K)[None, :], other=0.0)
        b = tl.load(b_ptr + expert * stride_be + columns[None, :] * stride_bn + at[:, None],
                    mask=(columns < N)[None, :] & (at < K)[:, None], other=0.0)
        if group_k > 0:
            of_a = tl.load(a_scale_ptr + rows // top_k * stride_asm + k // group_k * stride_ask, mask=valid, other=0.0)
            of_b = tl.load(b_scale_ptr + expert * stride_bse + columns // group_n * stride_bsn
                           + k // group_k * stride_bsk, mask=columns < N, other=0.0)
            total += tl.dot(a, b) * of_a[:, None] * of_b[None, :]
        else:
            total = product(a, b, total)
    if use_fp8_w8a8 and group_k == 0:
        total *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr + expert)
    if MUL_ROUTED_WEIGHT:
        total *= tl.load(topk_weights_ptr + rows, mask=valid, other=0.0)[:, None]
    tl.store(c_ptr + rows[:, None] * stride_cm + columns[None, :], total.to(compute_type),
             mask=valid[:, None] & (columns < N)[None, :])
"""
GEMM = '''
@triton.jit
def {name}(
    A, B, C, As, Bs, M, N, K, group_n, group_k, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    stride_As_m, stride_As_k, stride_Bs_k, stride_Bs_n, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
):
    tiles = tl.cdiv(N, BLOCK_SIZE_N)
    rows = tl.program_id(0) // tiles * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    columns = tl.program_id(0) % tiles * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_SIZE_K):
        at = k + tl.arange(0, BLOCK_SIZE_K)
        a = tl.load(A + rows[:, None] * stride_am + at[None, :], mask=(rows < M)[:, None] & (at < K)[None, :], other=0.)
        b = tl.load(B + columns[None, :] * stride_bn + at[:, None],
                    mask=(columns < N)[None, :] & (at < K)[:, None], other=0.)
        of_a = tl.load(As + rows * stride_As_m + k // group_k * stride_As_k, mask=rows < M, other=0.)
        of_b = tl.load(Bs + columns // group_n * stride_Bs_n + k // group_k * stride_Bs_k, mask=columns < N, other=0.)
        total += tl.dot(a, b) * of_a[:, None] * of_b[None, :]
    tl.store(C + rows[:, None] * stride_cm + columns[None, :], total.to(C.dtype.element_ty),
             mask=(rows < M)[:, None] & (columns < N)[None, :])
'''  # fmt: skip
CONFIG = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}
"""keys that both read"""


pytestmark = pytest.mark.usefixtures("tools", "compiled_anew")


def search_in(folder: Path, text: str, kernel: str = "fused_moe_kernel", framework: str = "vllm", **options):
    """Search a kernel in a file of its own, and return what was found and said."""
    file = folder / f"{framework}_{kernel}.py"
    file.write_text(IMPORTS.get(framework, "import triton\nimport triton.language as tl\n") + text)
    said: list[str] = []
    found = evoengine.tune(
        triton=f"{file}::{kernel}", gpu="h100", seed=1, jobs=1, trials=1, db=folder / "own.db", echo=said.append,
        **options,
    )  # fmt: skip
    return found, said


@pytest.fixture
def searched(tmp_path):
    return partial(search_in, tmp_path)


@pytest.fixture(scope="module")
def found_before(tmp_path_factory):
    """A folder with a ledger of two runs, and the best of the last one."""
    folder = tmp_path_factory.mktemp("moe")
    with patch.dict(workloads._registered):  # tests/conftest.py cleans up behind a test, not behind a module's fixture
        for m in (4, 2):
            found, said = search_in(folder, MOE, problem=f"fused_moe_kernel:M={m},E=2,N=24,K=40,topk=2")
            assert not any("without --reference" in line for line in said)
    return folder, found.best[0]


@pytest.fixture
def known(found_before, tmp_path):
    """The ledger's copy in the test's own folder; the best of its last run."""
    shutil.copy(found_before[0] / "own.db", tmp_path)
    return found_before[1]


def written(folder: Path) -> dict[str, dict]:
    return {str(path.relative_to(folder)): json.loads(path.read_text()) for path in folder.rglob("*.json")}


def write(tmp_path: Path) -> dict[str, dict]:
    write_fused_moe(tmp_path / "configs", find_gpu("h100"), str(tmp_path / "own.db"))
    return written(tmp_path / "configs")


def test_a_row_for_each_m_is_written_under_the_name_that_vllm_reads(known, tmp_path):
    [(name, rows)] = write(tmp_path).items()
    assert name == "E=2,N=24,device_name=NVIDIA_H100_80GB_HBM3.json"
    assert list(rows) == ["2", "4"] and all(set(row) == CONFIG for row in rows.values())
    assert rows["2"] == {key: known.config[key] for key in CONFIG}


@pytest.mark.exhaustive
def test_one_search_of_several_m_tries_each_ones_best_on_the_others(tmp_path):
    file = tmp_path / "moe.py"
    file.write_text(IMPORTS["vllm"] + MOE)
    problems = [f"--problem=fused_moe_kernel:M={m},E=2,N=16,K=16,topk=1" for m in (1, 2)]
    done = CliRunner().invoke(
        cli,
        ["search", "--triton", f"{file}::fused_moe_kernel", *problems, "--gpu", "h100", "--trials", "1", "--jobs", "1",
         "--seed", "1", "--db", str(tmp_path / "own.db")],
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert [set(rows) for rows in write(tmp_path).values()] == [{"1", "2"}]


@pytest.mark.parametrize("data", more(["fp8_w8a8", "fp8_w8a8_block"]))
def test_a_kernel_in_fp8_has_its_scales_in_the_name(searched, tmp_path, data):
    searched(MOE, framework="sglang", call=data, problem="M=3,E=2,N=24,K=160,topk=1")
    [name] = write(tmp_path)
    block = ",block_shape=[128, 128]" if data == "fp8_w8a8_block" else ""
    version = triton.__version__.replace(".", "_")
    assert name == f"configs/triton_{version}/E=2,N=24,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8{block}.json"


@pytest.mark.parametrize(
    ("framework", "kernel", "block"),
    [
        pytest.param("vllm", "_w8a8_triton_block_scaled_mm", "[128,128]", marks=pytest.mark.exhaustive),
        ("sglang", "_w8a8_block_fp8_matmul", "[128, 128]"),
    ],
)
def test_a_product_with_block_scales_is_named_by_n_and_k(searched, tmp_path, framework, kernel, block):
    searched(GEMM.format(name=kernel), kernel, framework, problem=f"{kernel}:M=5,N=130,K=200")
    assert list(write(tmp_path)) == [
        f"N=130,K=200,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape={block}.json"
    ]


WRONG = {
    "the router's weight is left out": ("if MUL_ROUTED_WEIGHT:", "if False:"),
    "the tail of k is not masked": ("& (at < K)[None, :], other=0.0)", ", other=0.0)"),
    "all rows go to the first expert": ("expert = tl.load(expert_ids_ptr + m)", "expert = 0"),
    "tokens are not divided by top_k": ("(rows // top_k)[:, None]", "(rows % (num_valid_tokens // top_k))[:, None]"),
}


@pytest.mark.parametrize(
    "fault", [next(iter(WRONG)), *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(WRONG)[1:])]
)
def test_a_wrong_kernel_gets_no_file(searched, tmp_path, fault):
    assert MOE.count(WRONG[fault][0]) == 1
    found, _ = searched(MOE.replace(*WRONG[fault]), problem="M=4,E=3,N=24,K=40,topk=2")
    assert not found.best
    with pytest.raises(NothingFound, match="no correct configuration"):
        write(tmp_path)
    assert not (tmp_path / "configs").exists()


def test_a_wrong_scale_of_a_block_gets_no_file(searched, tmp_path):
    text = GEMM.format(name="_w8a8_triton_block_scaled_mm").replace("columns // group_n * stride_Bs_n", "columns * 0")
    found, _ = searched(text, "_w8a8_triton_block_scaled_mm", problem="M=5,N=130,K=200")
    assert not found.best


def test_what_the_gate_did_not_finish_is_judged_before_it_is_written(known, tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(fused_moe, "is_judged", lambda verdicts: False)
    ledger = evoengine.open_ledger(tmp_path / "own.db", create=False)
    with ledger, pytest.raises(NothingFound, match="the gate of trial 2 is not finished: evoengine best"):
        find_fused_moe(ledger, find_gpu("h100"), is_finished)
    real = fused_moe.judge_export
    monkeypatch.setattr(
        fused_moe, "judge_export", lambda ledger, c, seed: asked.append(c.trial) or real(ledger, c, seed)
    )
    assert write(tmp_path) and asked == [2, 1]


def test_a_file_that_somebody_else_wrote_is_left_as_it_is(known, tmp_path):
    own = tmp_path / "configs" / "E=2,N=24,device_name=NVIDIA_H100_80GB_HBM3.json"
    own.parent.mkdir()
    own.write_text("{}")
    with pytest.raises(UsageError, match="exists with other contents"):
        write(tmp_path)
    assert own.read_text() == "{}"
    own.unlink()
    assert write(tmp_path) == write(tmp_path)  # the second time they are there, and say the same


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"framework": "nobody"}, "imports neither vllm nor sglang"),
        ({"text": "x = ("}, "is not Python text"),
        ({"text": "\n" + "(" * 500}, "is not Python text"),
        ({"text": "x = 1\n"}, "has no kernel fused_moe_kernel"),
        ({"text": MOE.replace("EM,", "EM, new_ptr,")}, "missing .* 'new_ptr'"),
        ({"reference": "mine"}, "--reference is not for"),
        ({"call": "fp4"}, "no function 'fp4' for --call; of fused_moe_kernel it may be bf16, fp8_w8a8, fp8_w8a8_block"),
        ({"problem": "M=2,X=3"}, "is not a size"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_sentence(searched, tmp_path, change, why):
    with pytest.raises(EvoengineError, match=why) as refused:
        searched(**({"text": MOE, "problem": "M=2,E=2,N=16,K=16,topk=1"} | change))
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2
    assert not (tmp_path / "own.db").exists()


def test_a_kernel_of_the_same_name_with_functions_of_its_own_is_the_users(searched):
    with pytest.raises(UsageError, match="cannot be imported"):  # the file is executed, as any other of a user's
        searched(f"{MOE}\n\ndef my_call(M=2):\n    pass\n", call="my_call", problem="M=2")


@pytest.mark.parametrize(
    ("served", "gpu", "name"),
    [
        (Served("vllm", "fused_moe_kernel", "bf16"), "h200", "E=8,N=64,device_name=NVIDIA_H200.json"),
        (
            Served("vllm", "fused_moe_kernel", "fp8_w8a8_block"),
            "a100",
            "E=8,N=64,device_name=NVIDIA_A100-SXM4-80GB,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
        (
            Served("sglang", "fused_moe_kernel", "bf16"),
            "h100",
            "configs/triton_3_7_1/E=8,N=64,device_name=NVIDIA_H100_80GB_HBM3.json",
        ),
    ],
)
def test_names_are_those_of_the_frameworks_own_files(served, gpu, name):
    assert served_file_name(served, {"M": 1, "E": 8, "N": 64, "K": 32}, find_gpu(gpu), "3.7.1") == name


@pytest.mark.parametrize(("tokens", "experts", "tile"), [(1, 1, 16), (5, 3, 16), (40, 4, 16), (3, 8, 32)])
def test_rows_are_placed_in_tiles_of_one_expert(tokens, experts, tile):
    chosen = torch.randint(experts, (tokens,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ids, of_tile, padded = _aligned(chosen, experts, tile)
    assert ids is not None and sorted(ids[ids < tokens].tolist()) == list(range(tokens))
    for place, row in enumerate(ids.tolist()):
        if row < tokens:
            assert place < int(padded) and of_tile[place // tile] == chosen[row]


@pytest.mark.parametrize("more", [(), ("--gpu", "h100", "--top", "3"), ("--gpu", "h100", "--pareto")])
def test_it_goes_with_a_gpu_and_nothing_else(tmp_path, more):
    done = CliRunner().invoke(
        cli, ["best", "--fused-moe", str(tmp_path / "new"), "--db", str(tmp_path / "x.db"), *more]
    )
    assert isinstance(done.exception, EvoengineError) and done.exception.exit_code == 2
    assert "--fused-moe takes only --gpu" in str(done.exception)
