"""What candidates are timed beside computes the same as they do."""

from __future__ import annotations

import pytest
import torch

from evoengine.stages.verify import compare
from evoengine.timing.bench import AS_BASELINE
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case, Drawn
from evoengine.workloads.rowwise import OPERATORS
from tests.support.exhaustive import more

MAIN_OUTPUT = {"gemm": "c", "w4a16": "c", "rms_norm": "y", "convolution": "output", "conv2d": "y"}
PROBLEMS = [
    "gemm:m5,n7,k9,bf16",
    "gemm:m5,n7,k9,fp16,bias",
    "w4a16:m5,n8,k64,bf16,g32,zeros,bias_relu",
    "gemm:m5,n7,k9,bf16,bias_relu",
    "gemm:m5,n7,k9,fp16,bias_gelu",
    "rms_norm:rows3,hidden40,bf16",
    "rms_norm:rows3,hidden40,fp32",
    "convolution:w9,h5,fw4,fh3",
    "conv2d:n2,c8,h9,w10,k16,r3,s2,stride2,pad1,dilation2,bf16,bias_relu,residual",
    *(f"rowwise:{name},rows3,hidden128,fp16" for name in OPERATORS),
]


@pytest.mark.parametrize("text", PROBLEMS)
def test_a_baseline_computes_the_reference_but_for_rounding(text):
    workload, problem = parse_problem(text)
    tensors = workload.tensors()
    inputs = tensors.draw(Case("any", problem), seed=1).inputs
    every = tensors.reference(problem, inputs)
    expected = every[MAIN_OUTPUT.get(workload.name, next(iter(every)))]
    (name,) = tensors.baselines(problem)
    found = tensors.baseline(name, problem, inputs)()
    spacing = torch.finfo(found.dtype).eps * float(expected.abs().max())
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) < 8 * spacing


OF_ATTENTION = [
    "attention:b1,h4,sq9,sk40,d64,bf16,causal,kv2",
    "varlen:h4,kv2,d64,bf16,causal,lens=12+0+33,kvlens=30+5+33",
    "decode:b2,h4,kv2,s40,d64,bf16,page16",
    "attention-backward:b1,h4,kv2,s40,d64,bf16,causal",
    "grouped-gemm:rows=5+0+9,n40,k48,bf16,b_nk",
]


@pytest.mark.parametrize("text", [*PROBLEMS, *OF_ATTENTION])
def test_a_baseline_passes_the_rule_by_which_it_is_believed(text):
    workload, problem = parse_problem(text)
    tensors = workload.tensors()
    inputs = tensors.draw(Case("any", problem), seed=1).inputs
    outputs = tensors.outputs_of(problem, tensors.baseline(tensors.baselines(problem)[-1], problem, inputs)())
    seen = tensors.as_baselines_see(problem, inputs)
    case = Case("full problem", problem, draw=AS_BASELINE)
    assert outputs
    assert compare(workload, case, Drawn(seen, seen), outputs, 1).correct
    doubled = {name: 2 * output for name, output in outputs.items()}
    assert not compare(workload, case, Drawn(seen, seen), doubled, 1).correct


@pytest.mark.parametrize("text", PROBLEMS)
def test_the_library_computes_all_outputs(text):
    workload, problem = parse_problem(text)
    tensors = workload.tensors()
    inputs = tensors.draw(Case("any", problem), seed=1).inputs
    expected, found = tensors.reference(problem, inputs), tensors.library(problem, inputs)
    assert (
        expected.keys()
        == found.keys()
        == {p.name for p in workload.parameters(problem, {}) if getattr(p, "output", False)}
    )
    for name, output in found.items():
        spacing = torch.finfo(output.dtype).eps * float(expected[name].abs().max())
        assert float((output.double() - expected[name]).abs().max()) < 8 * spacing


@pytest.mark.parametrize("text", ["b2,h4,s40,d192,dv128,fp16,kv2", *more(["b1,h2,sq9,sk40,d64,dv128,bf16,causal"])])
def test_sdpa_takes_rows_of_v_unlike_those_of_k(text):
    """What torch computes in one call, and the reference by parts."""
    workload, problem = parse_problem(text)
    tensors = workload.tensors()
    inputs = tensors.draw(Case("any", problem), seed=1).inputs
    expected = tensors.reference(problem, inputs)["o"]
    assert expected.shape == (problem.batch, problem.heads, problem.seq_q, problem.head_dim_v)
    for found in (tensors.baseline("MATH", problem, inputs)(), tensors.library(problem, inputs)["o"]):
        assert found.shape == expected.shape
        assert float((found.double() - expected).abs().max()) < 8 * torch.finfo(found.dtype).eps
