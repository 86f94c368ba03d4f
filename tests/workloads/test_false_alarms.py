"""No right kernel is called wrong: 100 valid configurations drawn at random pass the gate on the emulator."""

from __future__ import annotations

import pytest

PROBLEMS = [
    "b8,h64,s128,d64,fp16",
    "b8,h64,s256,d64,bf16,causal,kv32",
    "b1,h4,s128,d32,fp16,causal",
    "b1,h2,s128,d128,bf16",
    "b1,h6,s128,d96,fp16,kv2",
]
CONFIGURATIONS = 100


@pytest.mark.parametrize("number", range(CONFIGURATIONS))
def test_a_valid_configuration_passes(attention_gate, number):
    gate = attention_gate(PROBLEMS[number % len(PROBLEMS)])
    [config] = gate.draw(1, seed=number)
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{config}: {verdict.reason}"
