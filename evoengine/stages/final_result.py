"""The result of finals, sent from the device to the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evoengine.records import Measurement


@dataclass(frozen=True, slots=True)
class Finals:
    """The best candidates timed against each other: trials best first, each with its new figure.

    `tied` are the fastest and its equals, fewest registers first in `order`; `open` was not shown to be slower.
    """

    order: tuple[int, ...]
    tied: tuple[int, ...]
    figures: Mapping[int, Measurement]
    open: tuple[int, ...] = ()
    lead: tuple[float, float, float] | None = None
    """the winner's time over the second one's, from the same rounds, with the ends of its interval"""
    sustained: Mapping[int, Measurement] = field(default_factory=dict)
    """additional figures, of kernels run back to back"""
    wrong: Mapping[int, str] = field(default_factory=dict)
    """trial with a wrong output in a repetition → which, and how; it has no figure and no place"""
