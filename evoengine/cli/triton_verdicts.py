"""evoengine verify --triton"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from evoengine.cli.output import print_json, say, stdout
from evoengine.sass.predict import Prediction
from evoengine.text import number
from evoengine.views.tables import Column, Table

if TYPE_CHECKING:
    from evoengine.virtual.gate import ConfigVerdict


def verify_triton(
    target: str, call: str | None, reference: str | None, exact: bool, gpu: str, seed: int | None, as_json: bool
) -> int:
    """Gate a Triton kernel, show the verdicts, and return the exit code. Raises UsageError without `call`."""
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.boards import choose_gpu
    from evoengine.tuning.verify_triton import verify_triton as gate
    from evoengine.views.triton_kernels import as_answer
    from evoengine.workloads.served_kernel import is_served
    from evoengine.workloads.triton_kernel import read_host

    host = read_host(target, call, reference)
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    on = choose_gpu(gpu, None).gpu
    key = on.key
    with LiveProgress() as live:
        found = gate(host, on, seed, exact, live.stage)
    correct = not any(verdict.wrong for verdict in found)
    if as_json:
        print_json(as_answer(target, key, seed, found))
        return 0 if correct else 1
    stdout.print(table(found, key))
    for line in remarks(found, is_served(host) or reference is not None):
        say(line)
    if exact:
        for line in algebra(found):
            say(line)
    say(f"{'correct' if correct else 'not correct'} · seed {seed}")
    return 0 if correct else 1


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


def algebra(verdicts: Sequence[ConfigVerdict]) -> Iterator[str]:
    """Yield what a comparison in exact algebra asks."""
    compared = [verdict for verdict in verdicts if not verdict.wrong]
    for verdict in compared:
        if verdict.inexact:
            other = "the reference" if verdict.with_reference else verdicts[0].config
            yield (
                f"{verdict.config}: in exact algebra it computes something else than {other} "
                f"({'; '.join(verdict.inexact)}): is that meant? Rounding alone makes no difference there"
            )
        for sizes, why in verdict.unbuilt.items():
            yield f"{verdict.config}: {sizes or 'no sizes'}: its build in exact algebra cannot be executed: {why}"
    if compared and not any(verdict.inexact or verdict.unbuilt for verdict in compared):
        too = ", and the reference too" if any(verdict.with_reference for verdict in compared) else ""
        yield f"in exact algebra all configurations that passed compute the same, bit by bit{too}"
