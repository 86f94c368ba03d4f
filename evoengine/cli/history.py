"""evoengine history, runs, compare, claims, show and profile: the contents of the ledger"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import (
    RECORDED,
    CheckedGroup,
    db_option,
    gpu_option,
    json_option,
    kernel_option,
    reading,
    stored_problem_option,
)
from evoengine.cli.output import display, print_json, print_json_list, say
from evoengine.errors import NothingFound, UsageError, hint
from evoengine.lineage import path
from evoengine.paths import write_atomically
from evoengine.records import PENDING, Outcome, Rejection
from evoengine.text import plain_lines

if TYPE_CHECKING:
    from evoengine.ledger.read import Wanted
    from evoengine.ledger.store import Ledger
    from evoengine.records import Candidate


ENDINGS = (*map(str, Outcome), PENDING)
SHOWN = 50
"""default number of trials in a table"""
PAGE = 1000
"""rows of one table; each page has its own heading and columns"""
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
            from evoengine.views.trials import trial_json

            print_json_list("trials", map(trial_json, ledger.candidates_by_id(trials)))
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
    from evoengine.views.candidate_tables import history_table

    for start in range(0, len(trials), PAGE):
        display(history_table(list(ledger.lists.listed(trials[start : start + PAGE]))))


def _not_shown(shown: int, earlier: int | None) -> str:
    hidden = "earlier matches" if earlier is None else f"{earlier:,} earlier ones"
    return f"the last {shown} trials; {hidden} are not shown: --all shows all, --limit N the last N"


def _write_csv(ledger: Ledger, trials: Sequence[int], file: Path) -> None:
    from evoengine.views.trials import csv_lines

    lines = csv_lines(ledger.candidates_by_id(trials), ledger.lists.knobs_of(trials))
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
        then = f"{hint('search', db=db)} adds some" if empty else f"{hint('history', db=db)} lists its trials"
        return f"the ledger holds no such trial: {then}"
    there_are = f"outcomes {', '.join(sorted(outcomes))}" + (f"; families {', '.join(families)}" if families else "")
    return f"none of {sum(outcomes.values())} trials matches; they have {there_are}"


@click.group(cls=CheckedGroup, invoke_without_command=True)
@db_option
@json_option
@click.pass_context
def runs(context: click.Context, db: str | None, as_json: bool) -> None:
    """List the runs in the ledger: searches, measure sessions, and imports."""
    if context.invoked_subcommand:
        if db or as_json:
            raise UsageError(
                f"options of {context.invoked_subcommand} go after its name: evoengine runs remove N --db FILE"
            )
        return
    from evoengine.views.candidate_tables import runs_table
    from evoengine.views.results import runs_json

    with reading(db) as ledger:
        found = list(ledger.run_summaries())
    if as_json:
        print_json(runs_json(found))
    elif found:
        display(runs_table(found))
    else:
        raise NothingFound(f"the ledger holds no run: {hint('search', db=db)} starts one")


@runs.command()
@click.argument("numbers", type=click.IntRange(min=1), nargs=-1, required=True, metavar="N...")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@db_option
def remove(numbers: Sequence[int], yes: bool, db: str | None) -> None:
    """Delete runs with their trials, figures, Optuna studies, and the sources and binaries that no other run uses.

    The numbers of deleted runs and trials are not reused. A run cannot be deleted while it, or another run of the same
    problem on the same GPU, is in progress.
    """
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
        raise UsageError("cannot ask for confirmation: stdin is not a terminal; --yes skips the question") from None


@click.command()
@click.argument("first", type=click.IntRange(min=1), metavar="RUN")
@click.argument("second", type=click.IntRange(min=1), metavar="RUN")
@db_option
@json_option
def compare(first: int, second: int, db: str | None, as_json: bool) -> None:
    """Compare two runs: settings, outcomes, best figures, and the configurations evaluated in both.

    The number of trials until one came within 5 % of the best figure of its kind is shown. Figures are compared only
    if problem, GPU, kind, device and measurement policy agree.
    """
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
            display(remark_or_table)


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
    with reading(db) as ledger:
        revoked = ledger.claims.revoke(trial)
    if revoked:
        say(f"the next search that reaches the kernel of trial {trial} evaluates it")
    else:
        say(f"no search would have reused the outcome of trial {trial}")


@click.command()
@click.argument("trial", type=click.IntRange(min=1))
@click.option("--source", "with_source", is_flag=True, help="Print only the kernel's source.")
@click.option(
    "--lineage",
    "with_lineage",
    is_flag=True,
    help="Print the lineage from the start point, with the gain of each step.",
)
@db_option
@json_option
def show(trial: int, with_source: bool, with_lineage: bool, db: str | None, as_json: bool) -> None:
    """Show one trial: outcome, configuration, resources, figure, gate cases and coverage."""
    from evoengine.cli.console import stdout
    from evoengine.views.candidate_page import candidate_page, profile_page
    from evoengine.views.candidate_tables import lineage
    from evoengine.views.trials import lineage_json, page_json

    if with_source and (with_lineage or as_json):
        raise UsageError(f"--source prints only the source; leave {'--lineage' if with_lineage else '--json'} out")
    with reading(db) as ledger:
        candidate, profile = ledger.candidate(trial), ledger.profile(trial)
        baselines = ledger.baselines(candidate.run)
        pruned = ledger.is_pruned(trial)
        known = ledger.ancestors(trial) if with_lineage else {}
    if with_source:
        if candidate.source is None:
            why = "db prune deleted it" if pruned else _why_no_source(candidate)
            raise NothingFound(f"trial {trial} has no source: {why}")
        # a pipe may lead to a compiler, which needs the exact text; without `color` click removes escape sequences
        text = candidate.source.text
        click.echo(plain_lines(text) if stdout.is_terminal else text, color=True)
    elif with_lineage:
        steps = path(trial, known)
        if as_json:
            print_json(lineage_json(steps))
        else:
            display(lineage(steps))
    elif as_json:
        print_json(page_json(candidate, profile, baselines))
    else:
        display(candidate_page(candidate, baselines), *([profile_page(profile)] if profile else []))


def _why_no_source(candidate: Candidate) -> str:
    if candidate.problem.startswith(RECORDED):
        return "it was recorded by another tuner, without its kernel"
    if candidate.outcome is None:
        return "it is not rendered yet, or its search ended before"
    return f"it could not be rendered{f': {candidate.reason}' if candidate.reason else ''}"


@click.command()
@click.argument("trial", type=click.IntRange(min=1))
@kernel_option
@db_option
@json_option
def profile(trial: int, kernel: Path | None, db: str | None, as_json: bool) -> None:
    """Show what limits one candidate, by Nsight Compute or by the performance model.

    On a GPU that can run the binary: use of the tensor and MUFU pipes, memory throughput, bank conflicts, occupancy,
    stall reasons and sanitizer output, as far as the tools are installed. Otherwise, from the model: use of each pipe,
    and the instructions with the longest stalls and their reasons. The profile is stored with the trial; evoengine show
    prints it.
    """
    from evoengine.cli.progress import LiveProgress
    from evoengine.devices.driver import find_driver, supports_arch
    from evoengine.search.compilers import with_machine_code
    from evoengine.search.targets import target_of
    from evoengine.stages.profile import profile as take
    from evoengine.tuning.setup import lock_gpu, register_kernel
    from evoengine.views.candidate_page import profile_page
    from evoengine.views.trials import profile_json

    if kernel:
        register_kernel(kernel)
    with LiveProgress() as live, reading(db) as ledger:
        live.stage("reading the ledger")
        candidate = with_machine_code(ledger, trial)
        if isinstance(candidate, Rejection):
            why = f"it was imported, and its source does not compile here: {candidate.reason}"
            raise NothingFound(f"trial {trial} has no binary to profile: {why}")
        if candidate.binary is None:
            ended = candidate.outcome or "pending"
            raise NothingFound(f"trial {trial} has no binary to profile: it ended as {ended}")
        found = find_driver()
        devices = [] if isinstance(found, str) else [d for d in found[1] if supports_arch(d, candidate.binary.arch)]
        device = devices[0] if devices else None
        if device is None:
            live.say(f"no GPU here can run a binary for {candidate.binary.arch}: the page is by the model of the chip")
        live.stage("profiling" if device else "running the model")
        with lock_gpu(device, live.say):
            name, uuid = (device.name, device.uuid) if device else ("", None)
            page = take(target_of(ledger, candidate), candidate.contender, name, uuid)
        ledger.record_profile(trial, page)
    if as_json:
        print_json(profile_json(trial, page))
    else:
        display(profile_page(page))
