"""Propose a search space for a Triton kernel from its autotuner's list, as the text of a space file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from evoengine.records import Value

WARPS, STAGES = "num_warps", "num_stages"
MOST_WARPS = 32
"""1024 threads"""
LISTED = ("num_ctas", "maxnreg")
"""fields of which only the list's own values are proposed: most kernels run with one of them alone"""

HEAD = """\
# {kernel}, from the {count} of its autotuner's list: its values, the powers of two between them, and a step beyond.
# Values may be added and taken away; [[constraint]] leaves combinations out. The function that launches the kernel
# states grid and arguments, and what Triton refuses is recorded as such.
kernel = {name}
"""
LAUNCH = """
# what is known before a candidate is compiled; its launch is read when the function launches it
[launch]
threads = "32 * num_warps"
grid = [1, 1, 1]
shared = 0
"""


def proposed_space(kernel: str, configs: Sequence[Mapping[str, Value]]) -> str:
    """Return a space around the configurations, which are its start points. All of them have the same names."""
    count = "1 configuration" if len(configs) == 1 else f"{len(configs)} configurations"
    text = HEAD.format(kernel=kernel, count=count, name=json.dumps(kernel)) + "\n[knobs]\n"
    for name in configs[0]:
        text += f"{name} = {_toml(_proposed(name, [config[name] for config in configs]))}\n"
    text += LAUNCH
    for config in configs:
        text += "\n[[start]]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in config.items())
    return text


def _proposed(name: str, listed: Sequence[Value]) -> list[Value]:
    values = list(dict.fromkeys(listed))
    if all(type(value) is bool for value in values):
        return [False, True]
    numbers = sorted(value for value in values if type(value) is int)
    if len(numbers) < len(values) or name in LISTED:
        return sorted(values, key=str) if len(numbers) < len(values) else list(numbers)
    if name == STAGES:
        return list(range(max(1, numbers[0] - 1), numbers[-1] + 2))
    if numbers[0] < 1 or (numbers[-1] == 1 and name != WARPS) or any(n & (n - 1) for n in numbers):
        return list(numbers)
    first, last = max(1, numbers[0] // 2), numbers[-1] * 2
    return [1 << n for n in range(first.bit_length() - 1, last.bit_length()) if name != WARPS or 1 << n <= MOST_WARPS]


def _toml(value: Value | list[Value]) -> str:
    """Return JSON, which is TOML too for numbers, texts, booleans and lists of them."""
    return json.dumps(value)
