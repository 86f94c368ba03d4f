"""evoengine history"""

from __future__ import annotations

import json

import click

from evoengine.cli.options import db_option, gpu_option, json_option, stored_problem_option
from evoengine.errors import NothingFound
from evoengine.hints import hint


@click.command()
@gpu_option(default=None)
@stored_problem_option
@click.option("--run", type=click.IntRange(min=1), help="Only this run.")
@db_option
@json_option
def history(gpu: str | None, problem: str | None, run: int | None, db: str | None, as_json: bool) -> None:
    """List every trial of the ledger, with how it ended."""
    from evoengine.cli.display import history_table, stdout
    from evoengine.ledger.store import open_ledger

    with open_ledger(db, create=False) as ledger:
        found = ledger.candidates(run=run, problem=problem, gpu=gpu)
        empty = ledger.is_empty()
    if not found:
        then = f"{hint('search', db=db)} fills it" if empty else f"{hint('history', db=db)} lists all it has"
        raise NothingFound(f"the ledger holds no such trial: {then}")
    if as_json:
        click.echo(json.dumps([c.to_json() for c in found], indent=2))
    else:
        stdout.print(history_table(found))
