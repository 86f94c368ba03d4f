"""What is the same each time and dear to make is made once in a process of the tests: the tables of a new SQLite
ledger, the spaces of the files that evoengine comes with, SQL of statements (SQLAlchemy keeps it for each engine, and
each ledger has one), and the list of Optuna's migrations. Processes that tests start make all for themselves.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from optuna.storages._rdb.storage import _VersionManager
from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.util import LRUCache

from evoengine.ledger import database, schema
from evoengine.paths import asset
from evoengine.space import space as spaces

_upgrade, _bound = schema.upgrade, spaces._bound
_statements: list[str] = []
"""that make what all migrations make of an empty file"""
_spaces: dict[object, spaces.SearchSpace] = {}
_sql = LRUCache(4096)
"""by dialect and statement"""
_made_engine, _migrations = Engine.__init__, _VersionManager._create_alembic_script
_of_optuna: list[Any] = []
_DIALECTS = SQLiteDialect_pysqlite, PGDialect_psycopg


def remember() -> None:
    """From now on, in this process."""
    database.upgrade = upgrade_as_before
    spaces._bound = bound_as_before
    Engine.__init__ = engine_with_sql_of_before
    _VersionManager._create_alembic_script = migrations_as_before
    for dialect in _DIALECTS:
        dialect.__eq__, dialect.__hash__ = is_alike, hash_of_alike


def engine_with_sql_of_before(engine: Engine, *arguments: Any, **options: Any) -> None:
    _made_engine(engine, *arguments, **options)
    if isinstance(engine.dialect, _DIALECTS):
        engine._compiled_cache = _sql


def what_shapes(dialect: Dialect) -> tuple[object, ...]:
    """Of two dialects of the same, SQL is the same."""
    return type(dialect), dialect.paramstyle, dialect._json_serializer, dialect._json_deserializer


def is_alike(dialect: Dialect, other: object) -> bool:
    return type(dialect) is type(other) and what_shapes(dialect) == what_shapes(other)


def hash_of_alike(dialect: Dialect) -> int:
    return hash(what_shapes(dialect))


def migrations_as_before(manager: Any) -> Any:
    """They are the installed package's, whatever the database."""
    if not _of_optuna:
        _of_optuna.append(_migrations(manager))
    return _of_optuna[0]


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
