"""evoengine show"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import RECORDED, db_option, json_option

if TYPE_CHECKING:
    from evoengine.records import Candidate


@click.command()
@click.argument("trial", type=click.IntRange(min=1))
@click.option("--source", "with_source", is_flag=True, help="Print the kernel's source alone.")
@click.option(
    "--lineage", "with_lineage", is_flag=True, help="Print the path from its start point, and what each step gained."
)
@db_option
@json_option
def show(trial: int, with_source: bool, with_lineage: bool, db: str | None, as_json: bool) -> None:
    """Show one trial: configuration, resources, verdict, figure, source."""
    from evoengine.cli.display import candidate_panel, lineage, profile_page, stdout
    from evoengine.errors import NothingFound, UsageError
    from evoengine.ledger.store import open_ledger
    from evoengine.lineage import path, step_json

    if with_source and (with_lineage or as_json):
        raise UsageError(f"--source prints the source alone; leave {'--lineage' if with_lineage else '--json'} out")
    with open_ledger(db, create=False) as ledger:
        candidate, profile = ledger.candidate(trial), ledger.profile(trial)
        known = ledger.candidates(problem=candidate.problem, gpu=candidate.gpu) if with_lineage else []
    if with_source:
        if candidate.source is None:
            raise NothingFound(f"trial {trial} has no source: {_why_no_source(candidate)}")
        click.echo(candidate.source.text)
    elif with_lineage:
        steps = path(trial, {c.trial: c for c in known})
        if as_json:
            click.echo(json.dumps([step_json(s) for s in steps], indent=2))
        else:
            stdout.print(lineage(steps))
    elif as_json:
        click.echo(json.dumps(candidate.to_json(), indent=2))
    else:
        stdout.print(candidate_panel(candidate), *([profile_page(profile)] if profile else []))


def _why_no_source(candidate: Candidate) -> str:
    if candidate.problem.startswith(RECORDED):
        return "another tuner recorded it, with its times and without its kernel"
    if candidate.outcome is None:
        return "it was not rendered before its search ended, or is not yet"
    return f"it could not be rendered{f': {candidate.reason}' if candidate.reason else ''}"
