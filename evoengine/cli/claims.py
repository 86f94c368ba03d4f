"""evoengine claims: what later searches take over"""

from __future__ import annotations

import click

from evoengine.cli.options import CheckedGroup, db_option


@click.group(cls=CheckedGroup)
def claims() -> None:
    """Say of which trials no other search takes the end over."""


@claims.command()
@click.argument("trial", type=click.IntRange(min=1))
@db_option
def revoke(trial: int, db: str | None) -> None:
    """Have the next search that comes to the kernel of TRIAL evaluate it again, instead of taking over how TRIAL ended.

    The trial itself stays as it is, and so do trials that took its end over before.
    """
    from evoengine.cli.display import say
    from evoengine.cli.ledger import reading

    with reading(db) as ledger:
        revoked = ledger.revoke_claim(trial)
    if revoked:
        say(f"the next search that comes to the kernel of trial {trial} evaluates it")
    else:
        say(f"no search would have taken over how trial {trial} ended")
