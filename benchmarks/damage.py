"""Damaged ledgers: whether each command says so in a sentence, and whether `db check` notices what is not harmless.

    python benchmarks/damage.py --ledgers 150 --seed 1

Each ledger is a copy of a frozen one with one drawn damage: a bit of the file, a value, an infinity, a row deleted or
inserted, an object dropped, or the text of the schema. Seven commands read it. A damage is silent where `db check`
finds nothing and the contents differ from those of the undamaged copy. Rows are changed, deleted and inserted in the
ledger's own tables, as those of Optuna are made from them, and inserted where they belong to a run. The exit code is 1
if a command ended with a traceback or a damage was silent.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import click
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))

from evoengine.cli.main import evoengine
from evoengine.errors import EvoengineError
from evoengine.ledger.store import open_ledger
from tests.ledger.frozen.freeze import FOLDER, thaw

COMMANDS = (
    ("db", "check"), ("runs",), ("history",), ("show", "1"), ("best", "--gpu", "h100"), ("report", "--gpu", "h100"),
    ("best", "--gpu", "h100", "--export"),
)  # fmt: skip
OF_A_RUN = ("candidates", "measurements", "verdicts", "runs")
KINDS = ("byte", "value", "infinity", "deleted", "inserted", "dropped", "schema")


@click.command()
@click.option("--ledgers", default=150, show_default=True)
@click.option("--seed", default=1, show_default=True)
def measure(ledgers: int, seed: int) -> None:
    """Damage ledgers and print what became of each kind of damage."""
    draw = random.Random(seed)
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole.db")
        thaw(max(FOLDER.glob("*.sql.gz")), whole)
        with open_ledger(str(whole), create=False):
            pass
        for number in range(ledgers):
            kind = KINDS[number % len(KINDS)]
            path = Path(folder, f"{number}.db")
            shutil.copy(whole, path)
            done = damage(path, kind, draw)
            found[kind]["damaged"] += 1
            differs = contents(path) != contents(whole)
            codes = [call(path, command, Path(folder, f"out{number}")) for command in COMMANDS]
            found[kind]["tracebacks"] += sum(code is None for code in codes)
            found[kind]["refused or noticed"] += any(codes)
            if silent := differs and codes[0] == 0:
                found[kind]["silent"] += 1
            if silent or None in codes:
                click.echo(f"ledger {number}: {done}: {codes}", err=True)
            path.unlink()
    for kind, counts in found.items():
        click.echo(
            f"{kind:10}"
            + "".join(f"{counts[name]:5} {name}" for name in ("damaged", "refused or noticed", "tracebacks", "silent"))
        )
    sys.exit(int(any(counts["tracebacks"] or counts["silent"] for counts in found.values())))


def call(path: Path, command: tuple[str, ...], out: Path) -> int | None:
    """Return the exit code; None where the command ended with another exception than those that it tells."""
    arguments = [*command, *([str(out)] if command[-1] == "--export" else []), "--db", str(path)]
    done = CliRunner().invoke(evoengine, arguments)
    if isinstance(done.exception, EvoengineError):
        return done.exception.exit_code
    return done.exit_code if done.exception is None or isinstance(done.exception, SystemExit) else None


def damage(path: Path, kind: str, draw: random.Random) -> str:
    """Damage the ledger; returns what was done."""
    if kind == "byte":
        data = bytearray(path.read_bytes())
        place = draw.randrange(100, len(data))
        data[place] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        return f"a bit of byte {place}"
    with closing(sqlite3.connect(path, isolation_level=None)) as ledger:
        while True:
            with suppress(sqlite3.IntegrityError, sqlite3.OperationalError):
                if done := _change(ledger, kind, draw):
                    return done


def _change(ledger: sqlite3.Connection, kind: str, draw: random.Random) -> str | None:
    """None where what was drawn cannot be damaged so."""
    if kind == "dropped":
        what, name = draw.choice(ledger.execute(
            "SELECT type, name FROM sqlite_master WHERE type IN ('table', 'view', 'index') AND sql IS NOT NULL "
            "AND name NOT LIKE 'sqlite%'"
        ).fetchall())  # fmt: skip
        statement = f'DROP {what} "{name}"'
    elif kind == "schema":
        name = draw.choice(ledger.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL").fetchall())[0]
        ledger.execute("PRAGMA writable_schema = ON")
        statement = f"UPDATE sqlite_master SET sql = substr(sql, 1, length(sql) - 7) || 'x' WHERE name = '{name}'"
    else:
        table = draw.choice((*OF_A_RUN, "devices", *(() if kind == "inserted" else ("sources", "binaries"))))
        rows = [row for (row,) in ledger.execute(f'SELECT rowid FROM "{table}"')]
        columns = [(each[1], each[2]) for each in ledger.execute(f'PRAGMA table_info("{table}")')]
        row, (column, of) = draw.choice(rows), draw.choice(columns)
        if kind == "value":
            statement = f'UPDATE "{table}" SET "{column}" = \'{draw.randrange(10**6)}\' WHERE rowid = {row}'
        elif kind == "infinity":
            if "FLOAT" not in of.upper() and "DOUBLE" not in of.upper():
                return None
            statement = f'UPDATE "{table}" SET "{column}" = 9e999 WHERE rowid = {row}'
        elif kind == "deleted":
            statement = f'DELETE FROM "{table}" WHERE rowid = {row}'
        else:
            names = ", ".join(f'"{name}"' for name, _ in columns if name != "id")
            statement = f'INSERT INTO "{table}" ({names}) SELECT {names} FROM "{table}" WHERE rowid = {row}'
    ledger.execute(statement)
    return statement


def contents(path: Path) -> object:
    """All that a ledger says, as SQL; the message where it cannot be read."""
    try:
        with closing(sqlite3.connect(path)) as ledger:
            return sorted(ledger.iterdump())
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return str(error)


if __name__ == "__main__":
    measure()
