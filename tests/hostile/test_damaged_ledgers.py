"""150 ledgers, each damaged in one place that is drawn, and seven commands on each: a command answers as from the sound
ledger, or says in one sentence that the ledger is damaged. None ends in a traceback, none answers otherwise."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.hostile.test_hostile_ledgers import answers, call, sound  # noqa: F401
from tests.support.exhaustive import each_nth

DAMAGED, SEED = 150, 4
COMMANDS = (
    ("best", "--json"), ("history", "--json"), ("show", "3"), ("report",), ("runs", "--json"),
    ("show", "2", "--lineage"), ("db", "check"),
)  # fmt: skip
VALUES = (
    float("inf"), float("-inf"), 1e308, -1, 2**63 - 1, -(2**63), "", "\x00", "x", "[]", "{}", "NaN", "[Infinity]", b"",
    b"\xff\xfe", "[" * 5000, "2026-02-30 00:00:00.000000", None,
)  # fmt: skip
TABLES = (
    "runs", "candidates", "verdicts", "measurements", "baselines", "profiles", "binaries", "sources", "devices",
    "chains", "links", "standings", "rankings",
)  # fmt: skip
SCHEMA = ("\x00", "CREATE", "CREATE TABLE x", "garbage", "(", "é" * 9)


def columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def change_a_value(path: Path, draw: random.Random) -> str:
    with closing(sqlite3.connect(path)) as connection:
        while True:
            table = draw.choice(TABLES)
            column, value = draw.choice(columns(connection, table)), draw.choice(VALUES)
            (row,) = draw.choice(connection.execute(f"SELECT rowid FROM {table}").fetchall())
            held = f"SELECT quote({column}) FROM {table} WHERE rowid = ?"
            before = connection.execute(held, [row]).fetchone()
            try:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", [value, row])
            except sqlite3.Error:  # a constraint holds it off
                continue
            if connection.execute(held, [row]).fetchone() not in (before, None):
                connection.commit()
                return f"{table}.{column} = {value!r:.40}"
            connection.rollback()


def delete_a_row(path: Path, draw: random.Random) -> str:
    table = draw.choice(TABLES)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"DELETE FROM {table} WHERE rowid = (SELECT rowid FROM {table} ORDER BY random() LIMIT 1)")
        connection.commit()
    return f"a row of {table}"


def change_the_schema(path: Path, draw: random.Random) -> str:
    with closing(sqlite3.connect(path)) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL")]
        name, how = draw.choice(names), draw.choice((*SCHEMA, "cut", "flip"))
        (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", [name]).fetchone()
        place = draw.randrange(len(sql))
        text = {"cut": sql[:place], "flip": sql[:place] + chr(ord(sql[place]) ^ 1) + sql[place + 1 :]}.get(how, how)
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", [text, name])
        connection.commit()
    return f"the schema's {name}: {how[:20]!r}"


def drop(path: Path, draw: random.Random) -> str:
    with closing(sqlite3.connect(path)) as connection:
        of_schema = "SELECT type, name FROM sqlite_master WHERE sql IS NOT NULL AND name <> 'sqlite_sequence'"
        kind, name = draw.choice(connection.execute(of_schema).fetchall())
        connection.execute(f"DROP {kind} {name}")
        connection.commit()
    return f"{kind} {name}"


def flip_a_bit(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    used = [page for page in range(0, len(data), 4096) if any(data[page + 8 : page + 4096])]
    place = draw.choice(used) + draw.randrange(4096)
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"byte {place}"


def blank_a_page(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    page = draw.randrange(1, len(data) // 4096)
    data[page * 4096 : (page + 1) * 4096] = draw.choice((b"\0", b"\xff")) * 4096
    path.write_bytes(data)
    return f"page {page}"


def cut(path: Path, draw: random.Random) -> str:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])
    return "its end"


WAYS: tuple[Callable[[Path, random.Random], str], ...] = (
    change_a_value, change_a_value, change_a_value, delete_a_row, change_the_schema, change_the_schema, drop,
    flip_a_bit, blank_a_page, cut,
)  # fmt: skip
FOUND_BY_CHECK = (change_a_value, delete_a_row, cut)
"""what `db check` must name; a bit or a page may be of none of the ledger's rows"""


@pytest.fixture(scope="module")
def said_of_sound(sound) -> dict[tuple[str, ...], tuple[int, str]]:  # noqa: F811
    said = {command: call(sound, *command) for command in COMMANDS}
    assert {code for code, _ in said.values()} == {0}
    return said


@pytest.mark.parametrize("number", each_nth(25, range(DAMAGED)))
def test_every_command_answers_as_before_or_names_the_damage(sound, said_of_sound, tmp_path, number):  # noqa: F811
    draw = random.Random(SEED * 1000 + number)
    damaged = Path(shutil.copy(sound, tmp_path / "damaged.db"))
    way = WAYS[number % len(WAYS)]
    what = way(damaged, draw)
    for command in COMMANDS:
        copy = Path(shutil.copy(damaged, tmp_path / "copy.db"))  # a command may repair what follows from the rest
        code, said = call(copy, *command)
        as_before = (code, said) == said_of_sound[command]
        assert not (as_before and command == ("db", "check") and way in FOUND_BY_CHECK), what
        assert as_before or code in (1, 2, 3), (what, command, code, said)
        assert as_before or "damaged" in said or "not what was written" in said or str(copy) in said, (
            what,
            command,
            said,
        )
        Path(copy).unlink()
