"""Copies an SQLite ledger, as it is, into an empty database of a PostgreSQL server."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, Table, delete, func, insert, select, text

from evoengine.ledger.database import make_engine, open_database, parse_url
from evoengine.ledger.tables import Base

ROWS = 10_000
"""at a time"""


def copy_ledger(path: Path, url: str) -> None:
    """With all numbers and checksums; studies stay behind."""
    source, target = make_engine(parse_url(str(path))), open_database(parse_url(url), create=True)
    try:
        for table in Base.metadata.sorted_tables:
            _copy(source, target, table)
        with target.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))  # as the server itself does within minutes
    finally:
        source.dispose()
        target.dispose()


def _copy(source: Engine, target: Engine, table: Table) -> None:
    reading = source.execution_options(reading=True, yield_per=ROWS)
    with reading.connect() as rows, target.begin() as connection:
        connection.execute(delete(table))  # a new ledger has a chain of its own
        for some in rows.execute(select(table)).mappings().partitions():
            connection.execute(insert(table), [dict(row) for row in some])
        if "id" in table.columns and table.columns["id"].autoincrement:
            _go_on_after(connection, table)


def _go_on_after(connection: Connection, table: Table) -> None:
    """Has the server number new rows after those that are there."""
    highest = connection.scalar(select(func.max(table.columns["id"])))
    sequence = connection.scalar(text("SELECT pg_get_serial_sequence(:table, 'id')"), {"table": table.name})
    if highest and sequence:
        connection.execute(text("SELECT setval(:sequence, :highest)"), {"sequence": sequence, "highest": highest})
