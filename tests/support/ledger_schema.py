"""The schema of a ledger, as it is made at once and as the migrations make it."""

from __future__ import annotations

from sqlalchemy import Connection, MetaData, inspect

from evoengine.ledger.database import make_engine, parse_url
from evoengine.ledger.schema import drop_views, known_revisions, migrate, upgrade
from evoengine.ledger.tables import VERSION_TABLE


def schema(connection: Connection) -> dict[str, object]:
    """Return all that makes up the tables, indexes and views of a database, whatever their order."""
    looked = inspect(connection)
    found: dict[str, object] = {name: looked.get_view_definition(name) for name in looked.get_view_names()}
    for table in looked.get_table_names():
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
    """Return the schema of a ledger that is made at once, and of one that went through the migrations."""
    found = []
    for prepare in (lambda connection: None, lambda connection: migrate(connection, "0001")):
        engine = make_engine(parse_url(url))
        with engine.begin() as connection:
            clear(connection)
            prepare(connection)
        upgrade(engine)
        with engine.connect() as connection:
            found.append(schema(connection))
            assert list(connection.exec_driver_sql(f"SELECT * FROM {VERSION_TABLE}")) == [(known_revisions()[-1],)]
        engine.dispose()
    return found[0], found[1]


def clear(connection: Connection) -> None:
    drop_views(connection)
    held = MetaData()
    held.reflect(connection)
    held.drop_all(connection)
