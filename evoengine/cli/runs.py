"""evoengine runs, compare and claims: the searches that the ledger holds, and what later ones reuse"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from evoengine.cli.options import CheckedGroup, db_option, json_option, reading
from evoengine.errors import NothingFound, UsageError
from evoengine.hints import hint


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
