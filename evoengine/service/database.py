"""The ledger with the tables of the service, which jobs, tokens and caches are kept in."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sqlalchemy.orm import Session

from evoengine.ledger.database import make_engine, open_database, parse_url
from evoengine.ledger.store import Ledger
from evoengine.paths import chosen_database


class Database(Ledger):
    """A Ledger whose transactions the modules of the service may use; any thread may."""

    def writing(self) -> AbstractContextManager[Session]:
        """Return a transaction that is committed at the end. Raises as a Ledger does."""
        return self.database.writing()

    def reading(self) -> AbstractContextManager[Session]:
        return self.database.reading()

    def twin(self) -> Database:
        """Return the same database with connections of its own, to be closed too."""
        return Database(self.database.url, make_engine(self.database.url))


def open_service(database: str | None, *, create: bool) -> Database:
    """Open the service's database as `open_ledger` does."""
    url = parse_url(chosen_database(database))
    return Database(url, open_database(url, create=create))
