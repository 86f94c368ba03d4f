"""The lead of a search without a GPU: the best prediction so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEADS = 6
"""trials that end behind a leader before its gate is finished: most leaders are overtaken sooner, and the gate costs as
much as a dozen candidates that do not lead"""


@dataclass(slots=True)
class Lead:
    trial: int | None = None
    rank_key: tuple[bool, float] = (True, math.inf)
    """of its figure; before there is one any prediction is better"""
    finished: bool = False
    """whether its gate is finished, or about to be"""
    behind: int = 0
    """trials that have ended since it took the lead"""

    @property
    def due(self) -> bool:
        """Whether the gate is to be finished for it now."""
        return self.trial is not None and not self.finished and self.behind >= LEADS
