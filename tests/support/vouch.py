"""Has a ledger vouch for what a hand wrote into it: as if evoengine had written the rows so."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, create_engine, select, update

from evoengine.ledger import integrity
from evoengine.ledger.check import CHECKED
from evoengine.ledger.integrity import checked_columns, row_checksum
from evoengine.ledger.tables import Base


def vouch(connection: Connection, *rows: type[Base]) -> None:
    """For the checksums of these tables, or of all."""
    for row in rows or CHECKED:
        table = row.__table__
        columns = [table.c.id, *(table.c[name] for name in checked_columns(row))]
        for values in connection.execute(select(*columns)).mappings().all():
            total = row_checksum(row, values)
            connection.execute(update(table).where(table.c.id == values["id"]).values(checksum=total))


def vouch_for_all(database: str) -> None:
    """For the checksums of an SQLite file, and for its rows being all that there are."""
    engine: Engine = create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        vouch(connection)
        integrity.begin_all(connection, integrity.WRITTEN)
    engine.dispose()
