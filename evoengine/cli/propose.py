"""evoengine propose"""

from __future__ import annotations

from pathlib import Path

import click

from evoengine.cli.options import db_option, gpu_option, json_option, kernel_option, problem_option
from evoengine.errors import hint
from evoengine.gpu import AUTO


@click.command()
@click.option(
    "--with",
    "command",
    metavar="COMMAND",
    required=True,
    help="Shell command that reads a line of JSON for each proposal and prints one (docs/proposing.md).",
)
@kernel_option
@problem_option
@gpu_option(default=AUTO)
@click.option(
    "--from",
    "start",
    metavar="TRIAL",
    type=click.IntRange(min=1),
    help="First parent, a trial of the ledger.  [default: the first start point of the kernel's space]",
)
@click.option(
    "--proposals", type=click.IntRange(min=1), default=20, show_default=True, help="Number of proposals to judge."
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Time limit of each answer.",
)
@db_option
@json_option
def propose(
    command: str,
    kernel: Path | None,
    problem: str | None,
    gpu: str,
    start: int | None,
    proposals: int,
    timeout: float,
    db: str | None,
    as_json: bool,
) -> int:
    """Judge texts that a program proposes for a kernel.

    Each text is compiled and run in a jail (bubblewrap), and gated and predicted as a search's candidates are. Grid,
    block, shapes and reference stay those of the kernel. The ledger keeps each proposal with its parent.
    """
    from evoengine.cli.output import print_json, stdout
    from evoengine.cli.progress import LiveProgress, result_code
    from evoengine.tuning.propose import propose as run
    from evoengine.views.candidate_tables import ranking
    from evoengine.views.results import proposed_json

    with LiveProgress(trials=True) as live:
        found = run(
            command,
            problem,
            gpu,
            kernel=kernel,
            start=start,
            proposals=proposals,
            timeout=timeout,
            db=db,
            echo=live.say,
            on_stage=live.stage,
            on_trial=live.trial,
        )
    live.say(f"{found.judged} proposals judged in run {found.run}: {found.ended}")
    if as_json:
        print_json(proposed_json(found))
    elif found.best:
        stdout.print(ranking(dict(enumerate(found.best, 1))))
    return result_code(0 if found.best else 1, hint("best", db=db), live.say)
