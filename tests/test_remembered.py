"""What tests remember is what would be made again."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from sqlalchemy import create_engine, select

from evoengine.ledger import schema
from evoengine.ledger.database import make_engine, parse_url
from evoengine.ledger.models import CandidateRow
from evoengine.ledger.store import open_ledger
from evoengine.paths import asset
from evoengine.space.space import load_space
from evoengine.workloads.attention.problem import parse_problem
from tests.support import remembered


def made(path) -> tuple[list, list]:
    """The tables of a file, and what is in each."""
    with closing(sqlite3.connect(path)) as tables:
        entries = tables.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
        names = [name for kind, name, _ in entries if kind == "table"]
        return entries, [(name, tables.execute(f'SELECT * FROM "{name}"').fetchall()) for name in names]


def test_a_new_ledger_has_the_tables_that_the_migrations_make(tmp_path):
    engine = make_engine(parse_url(str(tmp_path / "migrated.db")))
    schema.upgrade(engine)
    engine.dispose()
    for name in ("first.db", "second.db"):
        open_ledger(str(tmp_path / name), create=True).close()
    assert remembered._statements
    assert made(tmp_path / "second.db") == made(tmp_path / "first.db") == made(tmp_path / "migrated.db")


def test_a_ledger_that_is_not_new_goes_through_the_migrations(tmp_path, monkeypatch):
    path = tmp_path / "evo.db"
    open_ledger(str(path), create=True).close()
    seen = []
    monkeypatch.setattr(remembered, "_upgrade", seen.append)
    engine = make_engine(parse_url(str(path)))
    remembered.upgrade_as_before(engine)
    engine.dispose()
    assert seen == [engine]


def test_a_shipped_space_is_bound_once_for_each_problem_and_has_what_binding_it_gives(problem, gpu, monkeypatch):
    file = asset("search_spaces") / "attention.toml"
    space = load_space(file, problem, gpu)
    assert load_space(file, problem, gpu) is space
    monkeypatch.setattr("evoengine.space.space._bound", remembered._bound)
    other = load_space(file, problem, gpu)
    assert other is not space
    for one, another in zip(space._enumerations.values(), other._enumerations.values(), strict=True):
        assert all((one.rows[knob] == another.rows[knob]).all() for knob in another.rows)
    assert (space.valid, space.starts, space.size) == (other.valid, other.starts, other.size)


def test_other_families_problems_and_texts_are_other_spaces(problem, gpu, tmp_path):
    file = asset("search_spaces") / "attention.toml"
    space = load_space(file, problem, gpu)
    assert load_space(file, problem, gpu, ["wmma"]).families == ("wmma",)
    assert load_space(file, parse_problem("b1,h1,s64,d32,fp16"), gpu).valid != space.valid
    (tmp_path / "own.toml").write_text(f"{file.read_text()}\n# of one's own")
    own = load_space(tmp_path / "own.toml", problem, gpu)
    assert own is not space and own is not load_space(tmp_path / "own.toml", problem, gpu)


def test_sql_is_made_once_for_alike_databases_and_for_others_again(tmp_path):
    statement, known = select(CandidateRow.reason.label("why_once")), []
    for name in ("first.db", "second.db"):
        with open_ledger(str(tmp_path / name), create=True) as ledger, ledger._reading() as session:
            session.execute(statement).all()
        known.append(sum("why_once" in str(sql) for sql in remembered._sql.values()))
    assert known == [1, 1]
    file, server = create_engine("sqlite://"), create_engine("postgresql+psycopg://evo@127.0.0.1/evo")
    assert file._compiled_cache is server._compiled_cache is remembered._sql
    assert file.dialect == create_engine("sqlite://").dialect != server.dialect
    assert file.dialect != create_engine("sqlite://", json_serializer=str).dialect
