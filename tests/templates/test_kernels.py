"""The rendered kernels themselves: NVRTC takes them, nothing spills at the starts, and they are right on the
emulator."""

from __future__ import annotations

import pytest

from evoengine.cuda_files import disassembler
from evoengine.records import Source
from evoengine.stages import compile as stage
from evoengine.stages.compile import CompileFailed, compile_source
from evoengine.workloads.attention.problem import HEAD_DIMS
from tests.support.exhaustive import more

HEADLINE = "b16,h16,s2048,d64,fp16"
FAMILIES = ("scalar", "wmma")
"""mma and wgmma have tests of their own"""


def starts(gate, family):
    return [c for c in gate.space.starts if c["family"] == family]


def drawn(gate, family, count, seed):
    return [c for c in gate.draw(40 * count, seed) if c["family"] == family][:count]


ALL = 99
EACH = [(family, 1) for family in FAMILIES] + more((family, ALL) for family in FAMILIES)
"""family, and how many of its starts are tried at most"""


@pytest.mark.parametrize(("family", "most"), EACH)
def test_the_starts_compile_without_spills_or_warnings(attention_gate, family, most):
    gate = attention_gate(HEADLINE)
    assert starts(gate, family)
    for config in starts(gate, family)[:most]:
        binary = compile_source(gate.source(config), "sm_90a")
        assert (binary.spill_bytes, binary.stack_bytes, binary.warnings) == (0, 0, ()), config


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
def test_the_families_multiply_where_they_say_they_do(attention_gate, monkeypatch):
    monkeypatch.setattr(stage, "disassembler", disassembler)
    gate = attention_gate(HEADLINE)
    scalar, wmma = (compile_source(gate.source(starts(gate, f)[0]), "sm_90a").mix for f in FAMILIES)
    assert "HMMA" not in scalar and scalar["FFMA"] > 100
    assert wmma["HMMA"] > 0


@pytest.mark.parametrize("count", [1, *more([6])])
@pytest.mark.parametrize("family", ["scalar", *more(["wmma"])])
def test_configurations_drawn_at_random_compile(attention_gate, family, count):
    gate = attention_gate(HEADLINE)
    configs = drawn(gate, family, count, seed=11)
    assert len(configs) == count
    for config in configs:
        assert compile_source(gate.source(config), "sm_90a").registers > 0, config


@pytest.mark.parametrize("dtype", ["fp16", *more(["bf16"])])
@pytest.mark.parametrize("head_dim", [96, *more(d for d in HEAD_DIMS if d != 96)])
@pytest.mark.parametrize("family", ["wmma", *more(["scalar"])])
def test_every_head_dim_and_dtype_compiles_for_an_older_gpu_too(attention_gate, family, head_dim, dtype):
    gate = attention_gate(f"b2,h4,s256,d{head_dim},{dtype},causal")
    assert compile_source(gate.source(starts(gate, family)[-1]), "sm_80").spill_bytes == 0


@pytest.mark.parametrize("head_dim", [128, *more(d for d in HEAD_DIMS if d != 128)])
@pytest.mark.parametrize("family", ["wmma", *more(["scalar"])])
def test_every_head_dim_is_right_with_grouped_heads(attention_gate, family, head_dim):
    gate = attention_gate(f"b2,h4,s256,d{head_dim},fp16,kv2")
    verdict = gate.judge(starts(gate, family)[-1])
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize(("family", "most"), [("scalar", 1), *more((family, ALL) for family in FAMILIES)])
def test_the_starts_are_right_under_a_mask_in_bf16(attention_gate, family, most):
    gate = attention_gate("b2,h6,sq256,sk512,d96,bf16,causal,kv2")
    for config in starts(gate, family)[:most]:
        verdict = gate.judge(config)
        assert verdict.correct, f"{config}: {verdict.reason}"


def test_a_launch_that_disagrees_with_the_template_about_shared_memory_does_not_compile(attention_gate):
    gate = attention_gate(HEADLINE)
    for family in FAMILIES:
        good = gate.source(starts(gate, family)[0])
        stated = f"== {good.launch.shared_bytes}"
        assert stated in good.text
        short = Source(good.text.replace(stated, f"== {good.launch.shared_bytes - 16}"), good.entry, good.launch)
        with pytest.raises(CompileFailed, match="static assertion failed"):
            compile_source(short, "sm_90a")
