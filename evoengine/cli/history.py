"""evoengine history"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import db_option, gpu_option, json_option, reading, stored_problem_option
from evoengine.errors import NothingFound, UsageError
from evoengine.hints import hint
from evoengine.records import PENDING, Outcome

if TYPE_CHECKING:
    from evoengine.ledger.read import Wanted
    from evoengine.ledger.store import Ledger

ENDINGS = (*map(str, Outcome), PENDING)
SHOWN = 50
"""trials in a table where nobody says how many"""
PAGE = 1000
"""rows that are laid out together: the next ones have a heading, and the columns that they need"""
STDOUT = Path("-")


@click.command()
@gpu_option(default=None)
@stored_problem_option
@click.option("--run", type=click.IntRange(min=1), help="Restrict the output to this run.")
@click.option(
    "--outcome",
    "outcomes",
    type=click.Choice(ENDINGS),
    multiple=True,
    metavar="NAME",
    help=f"Restrict the output to trials with this outcome ({', '.join(ENDINGS)}). Can be repeated.",
)
@click.option(
    "--family", "families", multiple=True, metavar="NAME", help="Restrict the output to this family. Can be repeated."
)
@click.option(
    "--where",
    metavar="EXPRESSION",
    help="Restrict the output to trials whose knobs satisfy this expression, as in space files: 'tile_m >= 64 and "
    "stages in [2, 3]'.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), help=f"Show only the last N trials.  [default: {SHOWN} in a table]"
)
@click.option("--all", "all_of_them", is_flag=True, help="Show all trials in the table.")
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the trials as CSV with the fields of the JSON as columns; - writes to stdout.",
)
@db_option
@json_option
def history(
    gpu: str | None,
    problem: str | None,
    run: int | None,
    outcomes: Sequence[str],
    families: Sequence[str],
    where: str | None,
    limit: int | None,
    all_of_them: bool,
    csv_file: Path | None,
    db: str | None,
    as_json: bool,
) -> None:
    """List the trials in the ledger and their outcomes."""
    from evoengine.cli.output import say
    from evoengine.ledger.read import Wanted
    from evoengine.space.expression import Where

    if all_of_them and limit:
        raise UsageError("--all and --limit contradict each other; leave one out")
    if csv_file and as_json:
        raise UsageError("--csv and --json contradict each other; leave one out")
    condition = Where(where) if where else None
    with reading(db) as ledger:
        wanted = Wanted(run, problem, ledger.targets.known_gpu(gpu), outcomes, families, condition)
        if condition and not ledger.is_empty():
            condition.require_known(*ledger.lists.missing_knobs(wanted, condition.names))
        as_table = not (as_json or csv_file)
        most = limit or (SHOWN if as_table and not all_of_them else None)
        trials, earlier = _found(ledger, wanted, most)
        if not trials:
            raise NothingFound(_nothing(ledger, wanted, db))
        if csv_file:
            _write_csv(ledger, trials, csv_file)
        elif as_json:
            from evoengine.cli.output import print_json_list
            from evoengine.views.trials import trial_json

            print_json_list("trials", map(trial_json, ledger.whole(trials)))
        else:
            _print_tables(ledger, trials)
            if not limit and earlier != 0:
                say(_not_shown(len(trials), earlier))


def _found(ledger: Ledger, wanted: Wanted, most: int | None) -> tuple[list[int], int | None]:
    """Return the trials to show and the number of earlier ones that match; None if that number was not computed."""
    if most is None:
        return ledger.lists.matching(wanted), 0
    last = ledger.lists.last_matching(wanted, most)
    return last.trials, last.earlier


def _print_tables(ledger: Ledger, trials: Sequence[int]) -> None:
    """Print tables page by page while the trials are read.

    The first page of a million trials appears at once.
    """
    from evoengine.cli.output import stdout
    from evoengine.views.candidate_tables import history_table

    for start in range(0, len(trials), PAGE):
        stdout.print(history_table(list(ledger.lists.listed(trials[start : start + PAGE]))))


def _not_shown(shown: int, earlier: int | None) -> str:
    before = "earlier ones that match are" if earlier is None else f"{earlier:,} earlier ones are"
    return f"the last {shown}; {before} not shown: --all lists all, --limit N the last N"


def _write_csv(ledger: Ledger, trials: Sequence[int], file: Path) -> None:
    from evoengine.cli.output import say
    from evoengine.paths import write_atomically
    from evoengine.views.trials import csv_lines

    lines = csv_lines(ledger.whole(trials), ledger.lists.knobs_of(trials))
    if file == STDOUT:
        for line in lines:
            click.echo(line, nl=False, color=True)
        return
    if file.resolve() == Path(ledger.place).resolve():
        raise UsageError(f"{file} is the ledger itself; name another file for the CSV")
    write_atomically(file, lines)
    say(f"wrote {len(trials):,} trials to {file}")


def _nothing(ledger: Ledger, wanted: Wanted, db: str | None) -> str:
    """Return why no trial is listed, with the outcomes and families that exist."""
    outcomes, families = ledger.lists.endings(wanted)
    if not outcomes:
        empty = ledger.is_empty()
        then = f"{hint('search', db=db)} fills it" if empty else f"{hint('history', db=db)} lists what it has"
        return f"the ledger holds no such trial: {then}"
    there_are = f"outcomes {', '.join(sorted(outcomes))}" + (f"; families {', '.join(families)}" if families else "")
    return f"none of {sum(outcomes.values())} trials is such a one; they have {there_are}"
