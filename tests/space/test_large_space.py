from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evoengine.errors import UsageError
from evoengine.space import rows
from evoengine.space.space import SearchSpace

ROOT = Path(__file__).parents[2]
FREE = [8, 6, 6, 5]  # sizes of the knobs that no constraint names

LARGE = (
    """\
kernel = "k"
[knobs]
family = ["a", "b"]
big    = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
"""
    + "".join(f"free{i} = {list(range(n))}\n" for i, n in enumerate(FREE))
    + """\
small  = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
odd    = { values = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], when = "family == 'b'" }
late   = { values = [1, 2], when = "odd > 4" }
[[constraint]]
expr = "small <= big"
why  = "only the lower triangle"
[[constraint]]
expr = "(small + odd) % 2 == 0"
why  = "only even sums"
[launch.a]
threads = "32 * big"
grid    = ["ceil_div(seq_q, big * small)", "heads", "batch"]
shared  = "small * big"
[launch.b]
threads = "32 * big"
grid    = ["ceil_div(seq_q, big * small)", "heads", "batch"]
shared  = "small * big * (1 + odd)"
"""
)

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from evoengine.gpu import find_gpu
from evoengine.workloads.attention.problem import parse_problem
from evoengine.space.space import load_space

space = load_space(Path(sys.argv[1]), parse_problem("b16,h16,s2048,d64,fp16"), find_gpu("h100"))
drawn = space.sample(np.random.default_rng(0), 1000)
assert all(space.contains(config) for config in drawn)
print(space.size, len(space), sum(c["family"] == "a" for c in drawn))
# ru_maxrss would count the process that started this one; VmHWM begins again with the program
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


def test_ten_million_combinations_are_counted_right_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    path.write_text(LARGE)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    size, valid, in_a, megabytes = map(int, done.stdout.split())
    free = math.prod(FREE)
    # `late` doubles the six values of odd above 4, so family b has 5 + 2 · 6 settings of the two.
    assert size == free * 20 * 20 * (1 + 17) > 10_000_000
    # On the triangle small ≤ big, 110 pairs have an even small and 100 an odd one.
    even_small = sum(1 for big in range(1, 21) for small in range(1, big + 1) if small % 2 == 0)
    odd_small = 210 - even_small
    even_settings = sum(2 if odd > 4 else 1 for odd in range(0, 11, 2))
    odd_settings = sum(2 if odd > 4 else 1 for odd in range(1, 11, 2))
    assert valid == free * (210 + even_small * even_settings + odd_small * odd_settings)
    assert abs(in_a / 1000 - 0.5) < 0.05
    assert megabytes < 500


def test_a_space_too_large_to_hold_is_refused(
    load: Callable[[str], SearchSpace], small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(load(small)) > 20
    monkeypatch.setattr(rows, "MAX_VALID", 20)
    with pytest.raises(UsageError, match="more than 20 valid configurations; give its knobs fewer values"):
        load(small)
    monkeypatch.setattr(rows, "MAX_VISITED", 10)
    with pytest.raises(UsageError, match="more than 10 combinations to look at"):
        load(small)


def test_the_size_of_a_chunk_changes_nothing(
    load: Callable[[str], SearchSpace], small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(load(small).enumerate())
    for chunk in (1, 5):
        monkeypatch.setattr(rows, "CHUNK", chunk)
        assert list(load(small).enumerate()) == whole
