"""How problems of these workloads are written, and what is said of a text that is none."""

from __future__ import annotations

import pickle

import pytest

from evoengine.errors import UsageError
from evoengine.workloads import parse_problem, workloads
from evoengine.workloads.convolution import ConvolutionProblem
from evoengine.workloads.gemm.problem import GemmProblem
from evoengine.workloads.rms_norm import RmsNormProblem

WRITTEN = {
    "gemm:m4096,n512,k64,fp16": GemmProblem(4096, 512, 64, "fp16"),
    "gemm:m1,n2,k3,bf16,bias_gelu": GemmProblem(1, 2, 3, "bf16", "bias_gelu"),
    "gemm:b4,m1,n2,k3,bf16,a_km,b_nk,silu,residual": GemmProblem(1, 2, 3, "bf16", "silu", 4, "km", "nk", True),
    "gemm:m1,n2,k3,fp8_e4m3,b_nk,row_scales": GemmProblem(
        1, 2, 3, "fp8_e4m3", b_layout="nk", out_dtype="bf16", scales="row"
    ),
    "gemm:m1,n2,k3,int8,b_nk,residual,out_fp32": GemmProblem(
        1, 2, 3, "int8", b_layout="nk", residual=True, out_dtype="fp32", scales="tensor"
    ),
    "gemm:m1,n2,k3,bf16,b_nk,swiglu": GemmProblem(1, 2, 3, "bf16", "swiglu", b_layout="nk"),
    "gemm:m1,n2,k3,fp16,out_fp32": GemmProblem(1, 2, 3, "fp16", out_dtype="fp32"),
    "rms_norm:rows7,hidden4096,fp32": RmsNormProblem(7, 4096, "fp32"),
    "convolution:w100,h50,fw17,fh3": ConvolutionProblem(100, 50, 17, 3),
}


@pytest.mark.parametrize(("text", "problem"), WRITTEN.items())
def test_a_problem_is_read_and_written(text, problem):
    workload, read = parse_problem(text)
    assert read == problem and str(read) == text
    assert text.startswith(f"{workload.name}:")


@pytest.mark.parametrize(
    "text",
    ["decode:b1,h4,s64,d64,fp16,page\u0663", "varlen:h4,d64,fp16,lens=40,page\u0663", "varlen:h4,d64,fp16,lens=\u0663"],
)
def test_digits_of_other_scripts_are_no_numbers(text):
    with pytest.raises(UsageError, match="\u0663' that is not|'\u0663' is not a length"):
        parse_problem(text)


def test_parts_may_come_in_any_order_and_with_spaces():
    assert parse_problem("gemm: bias, fp16, k3, n2, m1")[1] == GemmProblem(1, 2, 3, "fp16", "bias")


@pytest.mark.parametrize(
    "name", ["gemm", "rms_norm", "rowwise", "convolution", "conv2d", "varlen", "grouped-gemm", "w4a16"]
)
def test_the_example_is_a_problem_of_the_workload(name):
    workload = workloads()[name]
    assert str(workload.parse(workload.example)) == workload.example


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gemm:m1,n2,k3", "does not give dtype; write it like gemm:m4096"),
        ("gemm:m1,n2,fp16", "does not give k"),
        (
            "gemm:m1,n2,k3,fp32",
            "part 'fp32' that is not m, n, k, b with a number, or fp16 or bf16 or fp8_e4m3 or fp8_e5m2 or int8 or bias or",
        ),
        ("gemm:m1,n2,k3,fp16,swish", "part 'swish'"),
        ("gemm:m1,m2,n2,k3,fp16", "gives m twice"),
        ("gemm:m0,n2,k3,fp16", "m 0; it must be from 1"),
        ("gemm:m9999999999,n2,k3,fp16", "m 9999999999; it must be from 1 to 2147483647"),
        ("gemm:", "part ''"),
        ("gemm:m1,n2,k3,fp8_e4m3", "along k alone, A as [m, k] and B as [n, k]: without a_km, and with b_nk"),
        ("gemm:m1,n2,k3,int8,a_km,b_nk", "without a_km"),
        ("gemm:m1,n2,k3,bf16,row_scales", "bf16 has no scales, which are for fp8_e4m3, fp8_e5m2, int8"),
        ("gemm:m1,n2,k3,bf16,out_fp16", "C of bf16 is bf16 or fp32: leave out_fp16 out, or write out_fp32"),
        ("gemm:m1,n2,k3,int8,b_nk,swiglu", "swiglu is of fp16 and bf16 alone"),
        ("gemm:m1,n2,k3,fp8_e5m2,b_nk,out_fp32", "keep 14 bits of sums of fp8_e5m2: leave out_fp32 out"),
        ("rms_norm:rows4,hidden,bf16", "part 'hidden' that is not rows, hidden with a number"),
        ("rms_norm:rows4,hidden8,fp8", "part 'fp8'"),
        ("convolution:w4,h4,fw3", "does not give filter_h; write it like convolution:w4096"),
        ("convolution:w4,h4,fw3,fh-1", "part 'fh-1' that is not w, h, fw, fh with a number; write"),
        ("convolution:w2147483647,h4,fw3,fh3", "an image of more than 2147483647"),
    ],
)
def test_a_text_that_is_no_problem_is_called_by_its_fault(text, said):
    with pytest.raises(UsageError) as error:
        parse_problem(text)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("wrong", "near"), [("bfloat16", "bf16"), ("float16", "fp16"), ("swigglu", "swiglu")])
def test_an_unknown_word_is_refused_with_the_nearest_known_one(wrong, near):
    with pytest.raises(UsageError, match=f"a part '{wrong}' .*; did you mean {near}\\?$"):
        parse_problem(f"gemm:m16,n16,k64,{wrong}")


@pytest.mark.parametrize("workload", workloads().values(), ids=lambda workload: workload.name)
def test_a_workload_equals_its_copy_from_another_process_and_no_other(workload):
    copy = pickle.loads(pickle.dumps(workload))
    assert copy == workload and hash(copy) == hash(workload)
    assert sum(other == workload for other in workloads().values()) == 1
    copy.state = "of its own"
    assert copy != workload
