"""What the gate on a binary found, or why it did not run."""

from __future__ import annotations

from dataclasses import dataclass

from evoengine.records import Verdict


@dataclass(frozen=True, slots=True)
class BinaryCheck:
    """What executing a binary found."""

    verdict: Verdict | None
    why_not: str | None = None
    """why there is no verdict: the machine code was not executed"""

    @property
    def refuted(self) -> bool:
        return self.verdict is not None and not self.verdict.correct

    def __str__(self) -> str:
        if self.verdict is None:
            return f"its machine code was not executed: {self.why_not}"
        if self.verdict.correct:
            return f"its machine code was executed on {len(self.verdict.cases)} cases and is correct"
        return f"its machine code is {self.verdict.outcome}, {self.verdict.reason}"
