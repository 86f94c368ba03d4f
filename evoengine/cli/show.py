"""evoengine show"""

from __future__ import annotations

import json

import click

from evoengine.cli.options import db_option, json_option


@click.command()
@click.argument("trial", type=click.IntRange(min=1))
@click.option("--source", "with_source", is_flag=True, help="Print the kernel's source alone.")
@db_option
@json_option
def show(trial: int, with_source: bool, db: str | None, as_json: bool) -> None:
    """Show one trial: configuration, resources, verdict, figure, source."""
    from evoengine.cli.display import sheet, stdout
    from evoengine.errors import NothingFound
    from evoengine.ledger.store import open_ledger

    with open_ledger(db, create=False) as ledger:
        candidate = ledger.candidate(trial)
    if with_source:
        if candidate.source is None:
            raise NothingFound(f"trial {trial} has no source: it ended before it was rendered")
        click.echo(candidate.source.text)
    elif as_json:
        click.echo(json.dumps(candidate.to_json(), indent=2))
    else:
        stdout.print(sheet(candidate))
