"""Numbers and spaces beyond all limits are refused at once, in a sentence."""

from __future__ import annotations

import time

import pytest

from evoengine.errors import UsageError
from evoengine.workloads import parse_problem

SPACE = """kernel = "gemm"
[knobs]
family = ["one"]
{knobs}
[launch.one]
threads = 32
grid = [1, 1, 1]
shared = 0
{more}
"""
LONG_HEX = f"0x{'f' * 6000}"


@pytest.mark.parametrize(
    ("knobs", "more", "says"),
    [
        (f"x = [1, {'1' * 5000}]", "", "not valid TOML: it has a number of thousands of digits"),
        (f"x = [1, {LONG_HEX}]", "", "knobs.x holds an integer of 24000 bits"),
        ("x = [1]", f"[let]\ny = {LONG_HEX}", "let.y holds an integer of 24000 bits"),
        ("x = [1]", f"[[start]]\nx = {LONG_HEX}", "start.x holds an integer of 24000 bits"),
        ("x = [1]", '[[constraint]]\nexpr = "9**9**9 > 0"\nwhy = "it is"', "has no value (a power"),
        ("\n".join(f"k{i} = [1, 2]" for i in range(5000)), "", "5001 knobs; at most 256"),
        ("\n".join(f"k{i} = {list(range(10))}" for i in range(30)), "", "more than 50,000,000 valid"),
        (f"x = {[*range(16000), *range(16000)]}", "", "lists 0 twice"),
    ],
)
def test_what_is_too_large_is_refused_at_once(load, knobs, more, says):
    started = time.process_time()
    with pytest.raises(UsageError) as refused:
        load(SPACE.format(knobs=knobs, more=more))
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert time.process_time() - started < 3


def test_a_knob_of_32_000_values_is_read_at_once(load):
    started = time.process_time()
    assert len(load(SPACE.format(knobs=f"x = {list(range(32000))}", more=""))) == 32000
    assert time.process_time() - started < 3


@pytest.mark.parametrize("text", ["gemm:m{},n64,k64,fp16", "rms_norm:rows{},hidden64,fp16", "b{},h2,s64,d64,fp16"])
def test_a_size_of_5_000_digits_is_too_large(text):
    with pytest.raises(UsageError, match="must be from 1 to (2147483647|65535)"):
        parse_problem(text.format("1" * 5000))
    assert parse_problem(text.format("0" * 5000 + "2"))[1] == parse_problem(text.format("2"))[1]
