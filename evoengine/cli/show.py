"""evoengine show"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from evoengine.cli.options import RECORDED, db_option, json_option

if TYPE_CHECKING:
    from evoengine.records import Candidate


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
    from evoengine.cli.display import stdout
    from evoengine.cli.ledger import reading
    from evoengine.cli.output import print_json
    from evoengine.errors import NothingFound, UsageError
    from evoengine.lineage import path
    from evoengine.text import plain_lines
    from evoengine.views.candidate_page import candidate_page, profile_page
    from evoengine.views.candidate_tables import lineage
    from evoengine.views.trials import lineage_json, page_json

    if with_source and (with_lineage or as_json):
        raise UsageError(f"--source prints the source alone; leave {'--lineage' if with_lineage else '--json'} out")
    with reading(db) as ledger:
        candidate, profile = ledger.candidate(trial), ledger.profile(trial)
        pruned = ledger.is_pruned(trial)
        known = ledger.ancestors(trial) if with_lineage else {}
    if with_source:
        if candidate.source is None:
            why = "db prune took it out" if pruned else _why_no_source(candidate)
            raise NothingFound(f"trial {trial} has no source: {why}")
        # a pipe may lead to a compiler, which must get what the ledger has; without `color` escape sequences are cut
        text = candidate.source.text
        click.echo(plain_lines(text) if stdout.is_terminal else text, color=True)
    elif with_lineage:
        steps = path(trial, known)
        if as_json:
            print_json(lineage_json(steps))
        else:
            stdout.print(lineage(steps))
    elif as_json:
        print_json(page_json(candidate, profile))
    else:
        stdout.print(candidate_page(candidate), *([profile_page(profile)] if profile else []))


def _why_no_source(candidate: Candidate) -> str:
    if candidate.problem.startswith(RECORDED):
        return "another tuner recorded it, with its times and without its kernel"
    if candidate.outcome is None:
        return "it was not rendered before its search ended, or is not yet"
    return f"it could not be rendered{f': {candidate.reason}' if candidate.reason else ''}"
