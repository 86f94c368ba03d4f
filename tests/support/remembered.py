"""What is the same each time and dear to make is made once in a process of the tests: the tables of a new SQLite
ledger, and the spaces of the files that evoengine comes with. Processes that tests start make both for themselves.
"""

from __future__ import annotations

from functools import cache

from sqlalchemy import Engine

from evoengine.ledger import database, schema
from evoengine.paths import asset
from evoengine.space import space as spaces

_upgrade, _bound = schema.upgrade, spaces._bound
_statements: list[str] = []
"""that make what all migrations make of an empty file"""
_spaces: dict[object, spaces.SearchSpace] = {}


def remember() -> None:
    """From now on, in this process."""
    database.upgrade = upgrade_as_before
    spaces._bound = bound_as_before


def upgrade_as_before(engine: Engine) -> None:
    """As `schema.upgrade`: by the migrations, but for a file that is empty, where they have been through one before."""
    if engine.dialect.name != "sqlite":
        return _upgrade(engine)
    with engine.begin() as connection:  # has the write lock, so that another process has made all tables or none
        empty = not connection.exec_driver_sql("SELECT 1 FROM sqlite_master").first()
        for statement in _statements if empty else ():
            connection.exec_driver_sql(statement)
    if not (empty and _statements):
        _upgrade(engine)
    if empty and not _statements:
        with engine.connect() as connection:
            made = connection.connection.driver_connection.iterdump()
            _statements.extend(line for line in made if line not in ("BEGIN TRANSACTION;", "COMMIT;"))


def bound_as_before(definition, problem, gpu, families):
    """As `spaces._bound`, which enumerates; a space that was bound is never changed."""
    if definition.text not in shipped():
        return _bound(definition, problem, gpu, families)
    variables = {**problem.variables(), **gpu.variables()}
    key = (definition.path, definition.text, tuple(variables.items()), tuple(families))
    if key not in _spaces:
        _spaces[key] = _bound(definition, problem, gpu, families)
    return _spaces[key]


@cache
def shipped() -> frozenset[str]:
    """The texts of the space files."""
    return frozenset(file.read_text() for file in asset("search_spaces").glob("*.toml"))
