"""evoengine claims: what later searches take over"""

from __future__ import annotations

import click

from evoengine.cli.options import CheckedGroup, db_option


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
    from evoengine.cli.display import say
    from evoengine.cli.ledger import reading

    with reading(db) as ledger:
        revoked = ledger.revoke_claim(trial)
    if revoked:
        say(f"the next search that comes to the kernel of trial {trial} evaluates it")
    else:
        say(f"no search would have taken over how trial {trial} ended")
