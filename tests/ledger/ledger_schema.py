"""The schema of a ledger, as it is made at once and as an upgrade makes it, and ledgers of older schemas."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sqlalchemy import Connection, Engine, MetaData, create_engine, insert, inspect, select

from evoengine.ledger.database import make_engine, parse_url
from evoengine.ledger.optuna.schema import TABLES as OPTUNA_TABLES
from evoengine.ledger.schema import REVISIONS, drop_views, upgrade
from evoengine.ledger.tables import VERSION_TABLE, Base
from tests.ledger.frozen.freeze import FOLDER, thaw


def schema(connection: Connection) -> dict[str, object]:
    """Return all that makes up the tables, indexes and views of a database, whatever their order, but Optuna's."""
    looked = inspect(connection)
    found: dict[str, object] = {name: looked.get_view_definition(name) for name in looked.get_view_names()}
    for table in set(looked.get_table_names()) - OPTUNA_TABLES:
        described = [
            {column["name"]: {**column, "type": str(column["type"])} for column in looked.get_columns(table)},
            looked.get_pk_constraint(table),
            sorted(looked.get_foreign_keys(table), key=str),
            sorted(looked.get_unique_constraints(table), key=str),
            sorted(looked.get_check_constraints(table), key=str),
            sorted(
                (i["name"], i["column_names"], i["unique"], {k: str(v) for k, v in i["dialect_options"].items()})
                for i in looked.get_indexes(table)
            ),
        ]
        found[table] = described
    if connection.dialect.name == "sqlite":
        made = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE sql LIKE '%AUTOINCREMENT%'").scalars()
        found["numbers are not given twice"] = sorted(made)
    return found


def made_both_ways(url: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return the schema of a ledger that is made at once, and of one that was upgraded from the oldest."""
    found = []
    for prepare in (lambda engine: None, lambda engine: fill_with_frozen(engine, REVISIONS[0])):
        engine = make_engine(parse_url(url))
        with engine.begin() as connection:
            clear(connection)
        prepare(engine)
        upgrade(engine)
        with engine.connect() as connection:
            found.append(schema(connection))
            assert list(connection.exec_driver_sql(f"SELECT * FROM {VERSION_TABLE}")) == [(REVISIONS[-1],)]
        engine.dispose()
    return found[0], found[1]


def fill_with_frozen(engine: Engine, revision: str) -> None:
    """Give an empty database the tables and rows of the frozen ledger of that schema."""
    with tempfile.TemporaryDirectory() as folder:
        thaw(FOLDER / f"{revision}.sql.gz", Path(folder, "frozen.db"))
        frozen = create_engine(f"sqlite:///{Path(folder, 'frozen.db')}")
        held = MetaData()
        held.reflect(frozen)
        for table in held.sorted_tables:
            declared = Base.metadata.tables.get(table.name)
            for column in table.columns:
                known = declared is not None and column.name in declared.columns
                column.type = declared.columns[column.name].type if known else column.type.as_generic()
            if declared is not None:
                table.primary_key.name = declared.primary_key.name  # SQLite keeps none for numbers never given twice
                table.dialect_options["sqlite"]["autoincrement"] = declared.dialect_options["sqlite"]["autoincrement"]
        with frozen.connect() as rows, engine.begin() as connection:
            held.create_all(connection)
            for table in held.sorted_tables:
                if of_table := [dict(row) for row in rows.execute(select(table)).mappings()]:
                    connection.execute(insert(table), of_table)
        frozen.dispose()


def empty_frozen(revision: str, path: Path) -> None:
    """Write a ledger of that schema without a row to a new SQLite file."""
    thaw(FOLDER / f"{revision}.sql.gz", path)
    engine, held = create_engine(f"sqlite:///{path}"), MetaData()
    held.reflect(engine)
    with engine.begin() as connection:
        for table in reversed(held.sorted_tables):
            if table.name != VERSION_TABLE:
                connection.execute(table.delete())
    engine.dispose()


def clear(connection: Connection) -> None:
    drop_views(connection)
    held = MetaData()
    held.reflect(connection)
    held.drop_all(connection)
