"""The account of a virtual GPU as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evoengine.gpu import Gpu
from evoengine.sass.predict import MODEL_VERSION
from evoengine.text import number, plain

if TYPE_CHECKING:
    from evoengine.virtual.device import Use

HEADINGS = ("kernel", "launches", "µs each", "µs in all", "bound by", "options")
_LEFT = (0, 4, 5)


def table(gpu: Gpu, uses: Sequence[Use]) -> str:
    """Return a line for each kernel that was executed, then what failed, was sampled, only timed, or has no time."""
    executed = [_cells(use) for use in uses if use.executed]
    if not uses:
        return f"virtual {gpu.key}: no Triton kernel was launched"
    rows = [HEADINGS, *executed] if executed else []
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(HEADINGS))]
    lines = [
        "  ".join(c.ljust(w) if i in _LEFT else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    head = f"virtual {gpu.key}: predicted times of the kernels that were executed (model version {MODEL_VERSION})"
    return "\n".join(line.rstrip() for line in (head, *lines, *_remarks(uses)))


def _cells(use: Use) -> tuple[str, ...]:
    times = use.times_us
    if not times:
        return plain(use.name), str(use.executed), "?", "?", "?", plain(use.options)
    low, high = number(min(times)), number(max(times))
    each = low if low == high else f"{low} to {high}"
    bound = max(use.bounds, key=use.bounds.__getitem__)
    return plain(use.name), str(use.executed), each, number(sum(times)), bound, plain(use.options)


def _remarks(uses: Sequence[Use]) -> list[str]:
    timed = sum(use.only_predicted for use in uses)
    found = (
        [f"{timed} launches of benchmarks, of autotuners, or without an effect were predicted and not executed"]
        if timed
        else []
    )
    for use in uses:
        found += [f"{use.name} ({use.options}): failed: {failure}" for failure in use.failures]
        found += [f"{use.name} ({use.options}): race: {race}" for race in dict.fromkeys(use.races)]
        if use.sampled:
            found.append(f"{use.name}: {use.sampled} launches were sampled: most of their blocks were not executed")
        if use.unpredictable:
            found.append(f"{use.name} ({use.options}): no time is predicted: {use.unpredictable}")
    return [plain(line) for line in found]
