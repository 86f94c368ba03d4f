"""`evoengine verify` of a kernel in a binary (--cubin) and of a Triton kernel (--triton)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evoengine.cli.output import display, print_json, say
from evoengine.errors import UsageError
from evoengine.sass.predict import Prediction
from evoengine.text import number
from evoengine.views.candidate_page import profile_page
from evoengine.views.foreign_kernels import cubin_answer, cubins_table, triton_answer
from evoengine.views.tables import Column, Table

if TYPE_CHECKING:
    from evoengine.virtual.cubin_verify import CubinVerdict
    from evoengine.virtual.gate import ConfigVerdict


def verify_cubin(
    file: Path, entry: str | None, launch: Path | None, reference: str | None, sample: bool, gpu: str,
    seed: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Execute and judge a kernel of a binary, show the verdict, and return the exit code."""
    from evoengine.tuning.boards import choose_gpu

    if entry is None or launch is None:
        raise UsageError("--cubin requires --entry NAME and --launch FILE.json, which describes the launch")
    from evoengine.virtual.cubin_verify import profile_of, verify

    seed = secrets.randbelow(1 << 32) if seed is None else seed
    key = choose_gpu(gpu, None).gpu.key
    found = verify(file, entry, launch, reference, key, seed, sample)
    if as_json:
        print_json(cubin_answer(file, key, seed, found))
        return 0 if found.wrong is None else 1
    display(cubins_table([one.kernel for one in found.launches]))
    display(_launches(found, key))
    for one in found.launches:
        if one.figures:
            display(profile_page(profile_of(one, key)))
    for line in _cubin_remarks(found, reference is not None):
        say(line)
    say(f"{'not correct' if found.wrong else 'correct'} · seed {seed}")
    return 0 if found.wrong is None else 1


def _launches(found: CubinVerdict, gpu: str) -> Table:
    """Return a row for each launch."""
    verdict = "wrong" if found.wrong else "correct"
    rows = []
    for n, one in enumerate(found.launches):
        of_all = ("", "", "") if n else (verdict, str(len(found.attempts)), _percent(found.worst_share))
        rows.append((one.kernel.entry, *of_all, *_time(one.prediction)))
    return Table(_columns("launch", gpu), rows)


def _cubin_remarks(found: CubinVerdict, compared: bool) -> Iterator[str]:
    """Yield a line for what is wrong, was sampled, has no time, or was not compared."""
    if found.wrong:
        yield f"{found.wrong.draw}: {found.wrong.reason}"
    for one in found.launches:
        if one.sampled:
            yield f"{one.kernel.entry}: only {one.sampled} blocks were executed and judged"
        if isinstance(one.prediction, str):
            yield f"{one.kernel.entry}: no time is predicted: {one.prediction}"
    for name, elements in found.written.items():
        yield f"{name}: {elements:,} elements written"
    if not compared and found.worst_share is None:
        yield (
            "without --reference or expected values outputs are not compared: only hazards, races, bad accesses and "
            "NaN were looked for"
        )


def verify_triton(
    target: str, call: str | None, reference: str | None, exact: bool, gpu: str, seed: int | None, as_json: bool
) -> int:
    """Gate a Triton kernel, show the verdicts, and return the exit code. Raises UsageError without `call`."""
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.boards import choose_gpu
    from evoengine.tuning.verify import verify_triton as gate
    from evoengine.workloads.triton_kernel import is_served, read_host

    host = read_host(target, call, reference)
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    on = choose_gpu(gpu, None).gpu
    with LiveProgress() as live:
        found = gate(host, on, seed, exact, live.stage)
    correct = not any(verdict.wrong for verdict in found)
    if as_json:
        print_json(triton_answer(target, on.key, seed, found))
        return 0 if correct else 1
    display(table(found, on.key))
    for line in remarks(found, is_served(host) or reference is not None):
        say(line)
    if exact:
        for line in algebra(found):
            say(line)
    say(f"{'correct' if correct else 'not correct'} · seed {seed}")
    return 0 if correct else 1


def table(verdicts: Sequence[ConfigVerdict], gpu: str) -> Table:
    """Return a row for each configuration."""
    rows = [
        (v.config, v.outcome, str(len(v.attempts)), _percent(v.worst_share), *_time(v.prediction)) for v in verdicts
    ]
    return Table(_columns("configuration", gpu), rows)


def _columns(first: str, gpu: str) -> list[Column]:
    return [
        Column(first, least=20), Column("verdict"), Column("attempts", right=True),
        Column("error of allowed", right=True), Column(f"est. µs on {gpu}", right=True), Column("bound by"),
    ]  # fmt: skip # a table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _time(predicted: Prediction | str | None) -> tuple[str, str]:
    """Return the predicted time in µs and what bounds it."""
    return (number(predicted.time_us), predicted.bound) if isinstance(predicted, Prediction) else ("?", "")


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
        yield "without --reference outputs are not compared: only hazards, races, bad accesses and NaN were looked for"
        largest = max((v.largest_difference for v in verdicts if v.largest_difference is not None), default=None)
        if largest is not None:
            yield f"outputs of the configurations differ by at most {largest:.2e}"


def algebra(verdicts: Sequence[ConfigVerdict]) -> Iterator[str]:
    """Yield lines on the comparison in exact algebra."""
    compared = [verdict for verdict in verdicts if not verdict.wrong]
    for verdict in compared:
        if verdict.inexact:
            other = "the reference" if verdict.with_reference else verdicts[0].config
            yield (
                f"{verdict.config}: in exact algebra it differs from {other} ({'; '.join(verdict.inexact)}); rounding "
                "cannot be the cause"
            )
        for sizes, why in verdict.unbuilt.items():
            yield f"{verdict.config}: {sizes or 'no sizes'}: the build in exact algebra cannot be executed: {why}"
    if compared and not any(verdict.inexact or verdict.unbuilt for verdict in compared):
        too = ", and the reference too" if any(verdict.with_reference for verdict in compared) else ""
        yield f"in exact algebra all configurations that passed agree bit by bit{too}"
