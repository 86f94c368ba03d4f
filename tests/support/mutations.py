"""Files as nobody wrote them in earnest: a valid one with one value replaced, at every place and by every kind."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
GONE = object()
"""stands for a key that is left out"""
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.0, -0.5, 1e308, float("nan"),
    float("inf"), float("-inf"), "", "x", "../../x", "/etc/passwd", "..", "a\0b", "\ud800", "a\nb", "\x1b[2J", "[/red]",
    "nan", "running", "x" * 100_000, [], [1], [[]], [None], ["../x"], {}, {"a": 1}, {"place": 1.0}, DEEP, GONE,
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value, the outermost first."""
    yield at
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from places(value[key], (*at, key))


def replaced(value: Any, at: tuple[Any, ...], by: Any) -> Any:
    """A copy with the value at that place replaced, or left out."""
    if not at:
        return by
    changed = copy.copy(value)
    if len(at) == 1 and by is GONE:
        del changed[at[0]]
    else:
        changed[at[0]] = replaced(changed[at[0]], at[1:], by)
    return changed


def mutations(value: Any, seed: int, most: int) -> list[tuple[str, Any]]:
    """As many as are asked for, each with what was done; the same for the same seed."""
    rng = random.Random(seed)
    everywhere = [(at, by) for at in places(value) if at for by in HOSTILE]
    chosen = everywhere if len(everywhere) <= most else rng.sample(everywhere, most)
    return [(f"{'.'.join(map(str, at))} = {_short(by)}", replaced(value, at, by)) for at, by in chosen]


def _short(value: Any) -> str:
    return "gone" if value is GONE else repr(value)[:30]
