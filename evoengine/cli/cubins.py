"""evoengine cubins and evoengine verify --cubin"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import json_option
from evoengine.cli.output import print_json, say, stdout
from evoengine.errors import NothingFound, UsageError
from evoengine.sass.predict import Prediction
from evoengine.text import number, plain_lines
from evoengine.views.candidate_page import profile_page
from evoengine.views.foreign_kernels import cubin_answer, cubins_json, cubins_table
from evoengine.views.tables import Column, Table

if TYPE_CHECKING:
    from evoengine.virtual.cubin_verify import CubinVerdict


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--arch", type=click.IntRange(min=10), metavar="NUMBER", help="Only kernels for this one, such as 90.")
@click.option("--entry", metavar="NAME", help="Print the machine code of this kernel, of --arch or the newest.")
@json_option
def cubins(file: Path, arch: int | None, entry: str | None, as_json: bool) -> None:
    """List the kernels in a cubin, a fatbin, an object or a library, with what each needs at launch.

    The file is parsed and never loaded: nothing in it is executed. Sizes are in bytes, parameters in their order.
    """
    from evoengine.virtual.cubin_file import kernels_in, listing_of

    if entry is not None:
        if as_json:
            raise UsageError("--entry prints machine code; leave --json out")
        click.echo(plain_lines(listing_of(file, entry, arch)))
        return
    found = [kernel for kernel in kernels_in(file) if arch in (None, kernel.arch)]
    if not found:
        of = f" for sm_{arch}" if arch else ""
        raise NothingFound(f"{file} has no kernel{of} as machine code")
    if as_json:
        print_json(cubins_json(file, found))
    else:
        stdout.print(cubins_table(found))


def verify_cubin(
    file: Path, entry: str | None, launch: Path | None, reference: str | None, sample: bool, gpu: str,
    seed: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Execute and judge a kernel of a binary, show what was found, and return the exit code."""
    from evoengine.tuning.boards import choose_gpu

    if entry is None or launch is None:
        raise UsageError("--cubin needs --entry NAME and --launch FILE.json, which says how the kernel is launched")
    from evoengine.virtual.cubin_verify import profile_of, verify

    seed = secrets.randbelow(1 << 32) if seed is None else seed
    key = choose_gpu(gpu, None).gpu.key
    found = verify(file, entry, launch, reference, key, seed, sample)
    if as_json:
        print_json(cubin_answer(file, key, seed, found))
        return 0 if found.wrong is None else 1
    stdout.print(cubins_table([one.kernel for one in found.launches]))
    stdout.print(_launches(found, key))
    for one in found.launches:
        if one.figures:
            stdout.print(profile_page(profile_of(one, key)))
    for line in _remarks(found, reference is not None):
        say(line)
    say(f"{'not correct' if found.wrong else 'correct'} · seed {seed}")
    return 0 if found.wrong is None else 1


def _launches(found: CubinVerdict, gpu: str) -> Table:
    """Return a row for each launch."""
    columns = [
        Column("launch", least=20), Column("verdict"), Column("attempts", right=True),
        Column("error of allowed", right=True), Column(f"est. µs on {gpu}", right=True), Column("bound by"),
    ]  # fmt: skip
    worst = found.worst_share
    share = "" if worst is None else f"{100 * worst:.0f} %"
    verdict = "wrong" if found.wrong else "correct"
    rows = []
    for n, one in enumerate(found.launches):
        predicted = one.prediction
        time, bound = (number(predicted.time_us), predicted.bound) if isinstance(predicted, Prediction) else ("?", "")
        of_all = ("", "", "") if n else (verdict, str(len(found.attempts)), share)
        rows.append((one.kernel.entry, *of_all, time, bound))
    return Table(columns, rows)


def _remarks(found: CubinVerdict, compared: bool) -> Iterator[str]:
    """Yield a line for what is wrong, was sampled, has no time, or was not compared."""
    if found.wrong:
        yield f"{found.wrong.draw}: {found.wrong.reason}"
    for one in found.launches:
        if one.sampled:
            yield f"{one.kernel.entry}: {one.sampled} blocks were executed, and what they wrote was judged alone"
        if isinstance(one.prediction, str):
            yield f"{one.kernel.entry}: no time is predicted: {one.prediction}"
    for name, elements in found.written.items():
        yield f"{name}: {elements:,} elements written"
    if not compared and found.worst_share is None:
        yield (
            "without --reference or expected values nothing says what is right: hazards, races, bad accesses and NaN "
            "were looked for"
        )
