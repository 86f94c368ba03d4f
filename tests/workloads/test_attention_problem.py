"""A problem is read from a short text, and a wrong text is answered with what would be right."""

from __future__ import annotations

import pytest

from evoengine.errors import UsageError
from evoengine.workloads.attention.problem import AttentionProblem, parse_problem


@pytest.mark.parametrize(
    "text",
    [
        "b16,h16,s2048,d64,fp16",
        "b1,h8,s128,d128,bf16,causal",
        "b2,h12,s77,d96,fp16,kv4",
        "b1,h4,sq1,sk513,d32,fp16,causal,kv1",
        "b1,h128,s4096,d192,dv128,bf16,causal",
    ],
)
def test_a_problem_reads_back_what_it_prints(text):
    assert str(parse_problem(text)) == f"attention:{text}"
    assert parse_problem(str(parse_problem(text))) == parse_problem(text)


def test_kv_heads_default_to_heads_and_lengths_to_each_other():
    assert parse_problem("b1,h8,s128,d64,fp16") == AttentionProblem(1, 8, 8, 128, 128, 64, 64, "fp16", False)


def test_rows_of_v_are_as_long_as_those_of_k_unless_said_otherwise():
    """Under one spelling, whether it is said or not."""
    alike = parse_problem("b1,h8,s128,d64,dv64,fp16")
    assert alike == parse_problem("b1,h8,s128,d64,fp16") and "dv" not in str(alike)
    assert parse_problem("b1,h8,s128,d192,dv128,fp16").head_dim_v == 128


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("b16,h16,s2048,d192,dv100,fp16", "head_dim_v 100; the templates cover 32, 64, 96, 128"),
        ("b16,h16,s2048,dv128,fp16", "does not give head_dim"),
        ("b16,h16,s2048,d192,dv128,dv128,fp16", "head_dim_v twice"),
        ("b16,h16,s0,d64,fp16", "seq 0"),
        ("b16,h16,s2048,d77,fp16", "32, 64, 96, 128"),
        ("b16,h16,s2048,d64,fp16,kv5", "multiple of kv heads"),
        ("b16,h16,s2048,d64,fp16,kv0", "kv_heads 0"),
        ("b16,h16,s2048,d64", "does not give dtype"),
        ("b16,h16,s2048,d64,fp64", "'fp64'"),
        ("b16,h16,s2048,s512,d64,fp16", "seq twice"),
        ("b16,h16,s2048,sq1,d64,fp16", "use s… alone"),
        ("b1,h1,sq9,sk8,d64,fp16,causal", "must not exceed"),
        ("", "b16,h16,s2048,d64,fp16"),
        ("b16;h16", "b16,h16,s2048,d64,fp16"),
        ("b-1,h16,s2048,d64,fp16", "'b-1'"),
    ],
)
def test_a_wrong_problem_says_what_is_wrong(text, names):
    with pytest.raises(UsageError) as error:
        parse_problem(text)
    assert names in str(error.value)
    assert "\n" not in str(error.value)
