"""evoengine export"""

from __future__ import annotations

import json
from pathlib import Path

import click

from evoengine.cli.options import OneOf, db_option
from evoengine.errors import NothingFound, UsageError
from evoengine.hints import hint


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--format", "kind", type=OneOf(["t4"]), default="t4", show_default=True, help="t4: FAIR T4 results.")
@click.option("--run", type=click.IntRange(min=1), help="Run to write.  [default: the last]")
@db_option
def export(file: Path, kind: str, run: int | None, db: str | None) -> None:
    """Write a run to a T4 file, the common format of auto-tuners, for other tools or another ledger."""
    from evoengine.cli.display import say
    from evoengine.cli.ledger import reading
    from evoengine.publish.t4 import to_t4

    with reading(db) as ledger:
        if file.resolve() == Path(ledger.place).resolve():
            raise UsageError(f"{file} is the ledger itself; name another file for the run, and the ledger with --db")
        runs = {r.id: r for r in ledger.runs()}
        if not runs:
            raise NothingFound(f"the ledger holds no run: {hint('search', db=db)} fills it")
        run = run or max(runs)
        if run not in runs:
            raise UsageError(f"there is no run {run}: the ledger's are numbered {min(runs)} to {max(runs)}")
        data = to_t4(ledger.whole_run(run))
    try:
        file.write_text(json.dumps(data, allow_nan=False) + "\n", "utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {file}: {error.strerror}; name a file in a folder that can be written"
        ) from error
    say(f"wrote run {run}, {len(data['results'])} trials, to {file}")
