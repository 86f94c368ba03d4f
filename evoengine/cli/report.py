"""evoengine report"""

from __future__ import annotations

from pathlib import Path

import click

from evoengine.cli.options import db_option, gpu_option, json_option, stored_problem_option
from evoengine.errors import NothingFound, UsageError
from evoengine.hints import hint


@click.command()
@gpu_option(default=None)
@stored_problem_option
@click.option(
    "--html", "page", type=click.Path(path_type=Path), metavar="FILE",
    help="Write all results with charts to a self-contained HTML file.",
)  # fmt: skip
@db_option
@json_option
def report(gpu: str | None, problem: str | None, page: Path | None, db: str | None, as_json: bool) -> None:
    """Show which knob changes improved the time, and the lineage of the best kernel; with --html, write charts.

    Without --problem and --gpu those of the last run are used.
    """
    if page is None:
        _print(gpu, problem, db, as_json)
    elif as_json:
        raise UsageError("--html and --json contradict each other; leave one out")
    else:
        _write(page, gpu, problem, db)


def _write(page: Path, gpu: str | None, problem: str | None, db: str | None) -> None:
    from evoengine.cli.display import say
    from evoengine.cli.ledger import say_which
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.report import write_report

    with LiveProgress() as live:
        overview = write_report(page, problem, gpu, db=db, on_stage=live.stage)
    say_which(db)
    say(f"wrote {overview.problem} on {overview.gpu}, {overview.total:,} trials, to {page}")


def _print(gpu: str | None, problem: str | None, db: str | None, as_json: bool) -> None:
    from evoengine.cli.display import say, stdout
    from evoengine.cli.ledger import reading
    from evoengine.cli.output import print_json
    from evoengine.lineage import path
    from evoengine.views.candidate_tables import effects_table, lineage
    from evoengine.views.results import report_json

    with reading(db) as ledger:
        gpu_key, problem_text = ledger.last_target(gpu, problem)
        best = ledger.best(problem_text, gpu_key, top=1)
        if not best:
            raise NothingFound(
                f"the ledger holds no correct candidate for {problem_text} on {gpu_key}: "
                f"{hint('history', db=db, problem=problem_text, gpu=gpu_key)} shows how each ended"
            )
        steps = path(best[0].trial, ledger.ancestors(best[0].trial))
        found = ledger.lists.effects(problem_text, gpu_key)
        trials = ledger.count(problem_text, gpu_key)
        apart = ledger.ranked_apart(best[0])
    if as_json:
        print_json(report_json(best[0], steps, found, apart))
        return
    say(f"{problem_text} on {gpu_key}: {trials} trials, {best[0].ranked_by.kind} figures")
    for other in apart:
        say(str(other))
    stdout.print(lineage(steps))
    if found.effects:
        stdout.print()
        say(f"changes of knobs, {found}")
        stdout.print(effects_table(found.effects))
    else:
        say("no trial was made from another yet: start points have no parents, and most samplers name none")
