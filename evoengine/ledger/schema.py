"""The schema of a ledger: its revisions, and how a database comes to the newest."""

from __future__ import annotations

import secrets
from collections.abc import Set
from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Index,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    inspect,
    text,
)
from sqlalchemy.orm import Session

from evoengine.ledger import models, service_models
from evoengine.ledger.optuna_schema import TABLES as OPTUNA_TABLES
from evoengine.ledger.optuna_schema import declared_tables
from evoengine.ledger.ranking import rebuild
from evoengine.ledger.views import create_views, drop_views
from evoengine.ledger.write_ahead_log import empty_log
from evoengine.paths import asset

if TYPE_CHECKING:
    # slow to import, and a database whose schema is this evoengine's does without
    from alembic.config import Config as AlembicConfig

TABLES = (models, service_models)
"""the modules whose tables make up the schema"""
LOCK_KEY = 0x65766F
"""of PostgreSQL's advisory locks: any number that other programs are unlikely to use"""


def alembic_config(connection: Connection | None = None) -> AlembicConfig:
    from alembic.config import Config as AlembicConfig

    config = AlembicConfig(attributes={"connection": connection})
    config.set_main_option("script_location", str(asset("db/migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@cache
def known_revisions() -> list[str]:
    """Oldest first, by the names of the scripts, which begin with what they lead to: reading the scripts themselves
    takes longer than what most commands do."""
    return sorted(script.name.partition("_")[0] for script in asset("db/migrations").glob("versions/[0-9]*.py"))


def expected_tables(held: Set[str]) -> list[Table]:
    """Return the ledger's tables and, if the database holds any of Optuna's, those as the Optuna installed declares
    them."""
    expected = models.Base.metadata.sorted_tables
    return [*expected, *declared_tables()] if OPTUNA_TABLES & held else expected


def missing_columns(connection: Connection) -> list[Column[Any]]:
    """Return the columns that expected tables of the database do not have."""
    looked = inspect(connection)
    held = set(looked.get_table_names())
    return [
        column
        for table in expected_tables(held)
        if table.name in held
        for column in table.columns
        if column.name not in {found["name"] for found in looked.get_columns(table.name)}
    ]


def missing_indexes(connection: Connection) -> list[Index]:
    """Return the indexes that expected tables, all of which are there, do not have, in the order of their names."""
    looked = inspect(connection)
    return [
        index
        for table in expected_tables(set(looked.get_table_names()))
        for index in sorted(table.indexes, key=lambda index: str(index.name))
        if index.name not in {found["name"] for found in looked.get_indexes(table.name)}
    ]


def number_for_a_file() -> int:
    """What PRAGMA user_version says of a ledger's or a backup's file: by it a log of another file is known for one
    (`check_log`), and so is another file that was copied over this one (`watch.py`)."""
    return 1 + secrets.randbelow(2**31 - 1)


def mark(engine: Engine) -> None:
    """Gives an SQLite file a number of its own."""
    if engine.dialect.name != "sqlite":
        return
    with engine.begin() as connection:
        if not connection.exec_driver_sql("PRAGMA user_version").scalar():
            connection.exec_driver_sql(f"PRAGMA user_version = {number_for_a_file()}")
    empty_log(engine)  # the number has to be in the file itself


def upgrade(engine: Engine) -> None:
    """Bring the schema to the newest revision and make again what follows from the rows, in one transaction.

    Of several processes that try at once, one does it.
    """
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # SQLite's transaction has the write lock from its beginning
            connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK_KEY})"))
        if not inspect(connection).has_table(models.VERSION_TABLE):
            _create(connection)
            return
        drop_views(connection)
        migrate(connection)
        create_views(connection)
        with Session(connection) as session:
            rebuild(session)
            session.flush()


def _create(connection: Connection) -> None:
    """Make all tables at once, as the migrations would have left them; tests/ledger/test_migrations.py compares."""
    name = models.VERSION_TABLE
    revision = Column("version_num", String(32), nullable=False)
    versions = Table(name, MetaData(), revision, PrimaryKeyConstraint("version_num", name=f"{name}_pkc"))
    versions.create(connection)
    connection.execute(versions.insert().values(version_num=known_revisions()[-1]))
    models.Base.metadata.create_all(connection, checkfirst=False)
    create_views(connection)


def migrate(connection: Connection, revision: str = "head") -> None:
    """Run the migrations that the database has not had, up to that one; views are none of their business."""
    # slow to import
    from alembic import command

    command.upgrade(alembic_config(connection), revision)
