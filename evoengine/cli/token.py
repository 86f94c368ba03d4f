"""evoengine token"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from evoengine.cli.options import CheckedGroup, OneOf, db_option, json_option

if TYPE_CHECKING:
    from evoengine.views.service import TokenInfo, TokenList

SCOPES = ("read", "submit", "work", "admin")


@click.group(cls=CheckedGroup)
def token() -> None:
    """Create, list and revoke tokens for the service.

    Each scope includes those before it. read: read results. submit: submit jobs and cancel one's own. work: write to
    the caches of other tuners. admin: cancel any job.
    """


@token.command()
@click.argument("name")
@click.option("--scope", type=OneOf(SCOPES), default="read", show_default=True, help="What the token permits.")
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), help="Days until the token expires.  [default: never]"
)
@db_option
def new(name: str, scope: str, days: float | None, db: str | None) -> None:
    """Create a token and print it. It cannot be shown again: the ledger stores only its SHA-256."""
    from evoengine.cli.ledger import say_which
    from evoengine.service.database import open_service
    from evoengine.service.tokens import Tokens

    with open_service(db, create=True) as database:
        say_which(db)
        click.echo(Tokens(database).new(name, scope, days))


@token.command("list")
@db_option
@json_option
def list_(db: str | None, as_json: bool) -> None:
    """List the tokens with their scope, expiry and last use."""
    from evoengine.cli.display import stdout
    from evoengine.cli.ledger import say_which
    from evoengine.cli.output import print_json
    from evoengine.service.database import open_service
    from evoengine.service.tokens import Tokens
    from evoengine.times import utc
    from evoengine.views.encoding import SCHEMA
    from evoengine.views.tables import Column, Table

    with open_service(db, create=False) as database:
        say_which(db)
        known = Tokens(database).all()
    if as_json:
        tokens: list[TokenInfo] = [
            {
                "name": t.name, "scope": t.scope, "expired": t.expired, "created_at": t.created_at,
                "expires_at": t.expires_at, "used_at": t.used_at,
            }
            for t in known
        ]  # fmt: skip
        listed: TokenList = {"schema": SCHEMA, "tokens": tokens}
        print_json(listed)
        return
    columns = [Column(name) for name in ("name", "scope", "made", "expires", "last used")]
    lines = [
        [
            t.name, t.scope, utc(t.created_at) or "", f"{utc(t.expires_at) or 'never'}{' (expired)' * t.expired}",
            utc(t.used_at) or "never",
        ]
        for t in known
    ]  # fmt: skip
    stdout.print(Table(columns, lines))


@token.command()
@click.argument("name")
@db_option
def revoke(name: str, db: str | None) -> None:
    """Revoke a token. Running servers refuse it within seconds."""
    from evoengine.cli.display import say
    from evoengine.cli.ledger import say_which
    from evoengine.service.database import open_service
    from evoengine.service.tokens import Tokens

    with open_service(db, create=False) as database:
        say_which(db)
        Tokens(database).revoke(name)
    say(f"revoked {name}")
