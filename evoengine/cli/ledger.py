"""The ledger that a command reads, and the line that names it where --db does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evoengine.cli.display import say
from evoengine.ledger.database import parse_url
from evoengine.ledger.driver_errors import display_url
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.paths import chosen_database


@contextmanager
def reading(db: str | None) -> Iterator[Ledger]:
    """Open an existing ledger. Raises NothingFound if there is none."""
    with open_ledger(db, create=False) as ledger:
        say_which(db)
        yield ledger


def say_which(db: str | None) -> None:
    """Print which ledger a command used if --db was not given."""
    if db is None:
        say(f"ledger {display_url(parse_url(chosen_database(None)))}")
