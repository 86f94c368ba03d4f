"""The clock of a prediction: of an idle GPU, locked, or sustained at the power limit by back-to-back launches."""

from __future__ import annotations

import re
from dataclasses import dataclass

from evoengine.errors import UsageError

BOOST, SUSTAINED = "boost", "sustained"
_LOCKED = re.compile(r"locked:(\d+)")
LOWEST_MHZ, HIGHEST_MHZ = 100, 5000


@dataclass(frozen=True, slots=True)
class Clock:
    """`kind` is boost, sustained or locked, the latter with its MHz."""

    kind: str
    mhz: int = 0

    def __str__(self) -> str:
        return f"locked:{self.mhz}" if self.mhz else self.kind

    @classmethod
    def parse(cls, text: str) -> Clock:
        """Raise UsageError for what is none of boost, sustained and locked:MHZ."""
        if text in (BOOST, SUSTAINED):
            return cls(text)
        locked = _LOCKED.fullmatch(text)
        if not locked or not LOWEST_MHZ <= int(locked[1]) <= HIGHEST_MHZ:
            known = f"boost, sustained, or locked:MHZ from {LOWEST_MHZ} to {HIGHEST_MHZ}"
            raise UsageError(f"unknown clock {text!r}: it is {known}, as in locked:1500")
        return cls("locked", int(locked[1]))


DEFAULT = Clock(BOOST)
"""what figures are ranked by on a GPU: it rests between repetitions, and rounds in which it throttled are dropped"""
