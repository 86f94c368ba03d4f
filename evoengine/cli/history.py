"""evoengine history, runs, compare and claims: what the ledger holds, and what later searches reuse"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import CheckedGroup, db_option, gpu_option, json_option, reading, stored_problem_option
from evoengine.errors import NothingFound, UsageError, hint
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


@click.group(cls=CheckedGroup, invoke_without_command=True)
@db_option
@json_option
@click.pass_context
def runs(context: click.Context, db: str | None, as_json: bool) -> None:
    """List the runs in the ledger: searches, measure sessions, and imports."""
    if context.invoked_subcommand:
        if db or as_json:
            raise UsageError(f"options of {context.invoked_subcommand} go behind it: evoengine runs remove N --db FILE")
        return
    from evoengine.cli.output import print_json, stdout
    from evoengine.views.candidate_tables import runs_table
    from evoengine.views.results import runs_json

    with reading(db) as ledger:
        found = list(ledger.run_summaries())
    if as_json:
        print_json(runs_json(found))
    elif found:
        stdout.print(runs_table(found))
    else:
        raise NothingFound(f"the ledger holds no run: {hint('search', db=db)} fills it")


@runs.command()
@click.argument("numbers", type=click.IntRange(min=1), nargs=-1, required=True, metavar="N...")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@db_option
def remove(numbers: Sequence[int], yes: bool, db: str | None) -> None:
    """Delete runs with their trials, figures, Optuna studies, and the sources and binaries that no other run uses.

    The numbers of deleted runs and trials are not reused. A run cannot be deleted while it, or another run of the same
    problem on the same GPU, is in progress.
    """
    from evoengine.cli.output import say

    wanted = list(dict.fromkeys(numbers))
    with reading(db) as ledger:
        known = {s.run.id: s for s in ledger.run_summaries() if s.run.id in wanted}
        for number, summary in known.items():
            say(f"run {number}: {summary.run.problem} on {summary.run.gpu}, {summary.trials} trials")
        if len(known) == len(wanted) and not (yes or agreed(f"Remove from {ledger.place}?")):
            say("nothing was removed")
            return
        ledger.remove_runs(wanted)
    say(f"removed {', '.join(f'run {number}' for number in wanted)}")


def agreed(question: str) -> bool:
    """Ask for confirmation. Raises UsageError if stdin is not a terminal."""
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise UsageError("nobody is there to answer; --yes removes without asking") from None


@click.command()
@click.argument("first", type=click.IntRange(min=1), metavar="RUN")
@click.argument("second", type=click.IntRange(min=1), metavar="RUN")
@db_option
@json_option
def compare(first: int, second: int, db: str | None, as_json: bool) -> None:
    """Compare two runs: settings, outcomes, best figures, and the configurations that both evaluated.

    Of the best figure of each kind, the number of trials to come within 5 % of it is shown. Figures are compared only
    if problem, GPU, kind, device and measurement policy agree.
    """
    from evoengine.cli.output import print_json, say, stdout
    from evoengine.tuning.comparison import compare_runs
    from evoengine.views.comparison import comparison_json, comparison_page

    with reading(db) as ledger:
        found = compare_runs(ledger, first, second)
    if as_json:
        print_json(comparison_json(found))
        return
    for run in found.runs:
        began = f"{run.started_at:%Y-%m-%d %H:%M}"
        say(f"run {run.id}: {run.problem} on {run.gpu}, {run.device.name}, {began}, {run.status}")
    for remark_or_table in comparison_page(found):
        if isinstance(remark_or_table, str):
            say(remark_or_table)
        else:
            stdout.print(remark_or_table)


@click.group(cls=CheckedGroup)
def claims() -> None:
    """Control which results later searches reuse."""


@claims.command()
@click.argument("trial", type=click.IntRange(min=1))
@db_option
def revoke(trial: int, db: str | None) -> None:
    """Do not reuse the outcome of TRIAL: the next search that reaches its kernel evaluates it again.

    TRIAL and the trials that reused its outcome before do not change.
    """
    from evoengine.cli.output import say

    with reading(db) as ledger:
        revoked = ledger.claims.revoke(trial)
    if revoked:
        say(f"the next search that comes to the kernel of trial {trial} evaluates it")
    else:
        say(f"no search would have taken over how trial {trial} ended")
