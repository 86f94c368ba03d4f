"""What `evoengine verify --triton` shows to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from evoengine.sass.predict import Prediction
from evoengine.text import number
from evoengine.views.tables import Column, Table

if TYPE_CHECKING:
    from evoengine.virtual.gate import ConfigVerdict


def table(verdicts: Sequence[ConfigVerdict], gpu: str) -> Table:
    """Return a row for each configuration."""
    columns = [
        Column("configuration", least=20), Column("verdict"), Column("attempts", right=True),
        Column("error of allowed", right=True), Column(f"est. µs on {gpu}", right=True), Column("bound by"),
    ]  # fmt: skip
    return Table(columns, map(_row, verdicts))


def _row(verdict: ConfigVerdict) -> tuple[str, ...]:
    worst, found = verdict.worst_share, verdict.prediction
    share = "" if worst is None else f"{100 * worst:.0f} %"
    time, bound = (number(found.time_us), found.bound) if isinstance(found, Prediction) else ("?", "")
    return verdict.config, verdict.outcome, str(len(verdict.attempts)), share, time, bound


def remarks(verdicts: Sequence[ConfigVerdict], compared: bool) -> Iterator[str]:
    """Yield a line for what is wrong, what was refused, and what was not compared."""
    for verdict in verdicts:
        if verdict.wrong:
            yield f"{verdict.config}: {verdict.wrong.sizes or 'no sizes'}, {verdict.wrong.draw}: {verdict.wrong.reason}"
        if isinstance(verdict.prediction, str):
            yield f"{verdict.config}: no time is predicted: {verdict.prediction}"
    refused = {(sizes, why): None for verdict in verdicts for sizes, why in verdict.refused.items()}
    for sizes, why in refused:
        yield f"{sizes or 'no sizes'}: not judged, since the launch was refused: {why}"
    if not compared:
        yield "without --reference nothing says what is right: hazards, races, bad accesses and NaN were looked for"
        largest = max((v.largest_difference for v in verdicts if v.largest_difference is not None), default=None)
        if largest is not None:
            yield f"outputs of the configurations differ by {largest:.2e} at most"
