"""A ledger is opened, made, joined to Optuna's file, or refused in one sentence with nothing written."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import optuna
import pytest

from evoengine.errors import MachineError, NothingFound, UsageError
from evoengine.ledger import database
from evoengine.ledger.optuna import schema as optuna_schema
from evoengine.ledger.store import open_ledger
from tests.ledger.frozen.freeze import FOLDER, thaw
from tests.support.ledger_examples import a_figure, add_ranked, start_run

NOBODY = 65534


@pytest.fixture(scope="session")
def optuna_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("optuna") / "study.db"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="theirs", storage=f"sqlite:///{path}")
    study.add_trial(optuna.trial.create_trial(value=1.0))
    study._storage._backend.engine.dispose()
    return path


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)


def picture(folder: Path) -> dict[str, str]:
    """Every file below the folder with its content's hash."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def refused(path: Path | str, folder: Path, *, create: bool = True, error: type[Exception] = UsageError) -> str:
    """The one sentence; the folder is the same before and after, byte by byte."""
    before = picture(folder)
    with pytest.raises(error) as caught:
        open_ledger(str(path), create=create)
    assert picture(folder) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def execute(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


# ── opened ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_ledger_is_made_by_path_or_url(tmp_path):
    for name in (str(tmp_path / "one.db"), f"sqlite:///{tmp_path}/two.db"):
        with open_ledger(name, create=True) as ledger:
            assert start_run(ledger) == 1
        with open_ledger(name, create=False) as ledger:
            assert len(ledger.runs()) == 1


def test_a_ledger_runs_in_wal_mode_with_foreign_keys(ledger):
    with ledger.database.engine.connect() as connection:
        pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        found = [connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() for pragma in pragmas]
    assert found == ["wal", 1, 1, 200]


def test_an_empty_file_becomes_a_ledger(tmp_path):
    (tmp_path / "empty.db").touch()
    with open_ledger(str(tmp_path / "empty.db"), create=True) as ledger:
        assert ledger.runs() == []


def test_a_file_that_holds_only_optuna_studies_is_joined(optuna_file, tmp_path):
    path = Path(shutil.copy(optuna_file, tmp_path))
    with open_ledger(str(path), create=True) as ledger:
        start_run(ledger)
    assert [t.value for t in optuna.load_study(study_name="theirs", storage=f"sqlite:///{path}").trials] == [1.0]


def test_the_tables_taken_for_optunas_are_exactly_those_it_makes(optuna_file):
    with closing(sqlite3.connect(optuna_file)) as connection:
        made = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert made == optuna_schema.TABLES


def test_the_installed_optuna_has_the_schema_that_trials_are_written_for(optuna_file):
    with closing(sqlite3.connect(optuna_file)) as connection:
        (made,) = connection.execute(f"SELECT version_num FROM {optuna_schema.VERSION_TABLE}").fetchone()
    assert made == optuna_schema.WRITTEN_REVISION


# ── nothing there ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_reading_where_there_is_no_file_finds_nothing_and_makes_nothing(tmp_path):
    file = tmp_path / "my none.db"
    said = refused(file, tmp_path, create=False, error=NothingFound)
    assert f"no ledger at {file}: evoengine search --db '{file}' makes one" in said
    assert not file.exists()


@pytest.mark.parametrize(("create", "error"), [(True, UsageError), (False, NothingFound)])
@pytest.mark.parametrize("name", ["rnus/x.db", "sqlite:///{}/rnus/x.db"])
def test_a_folder_that_is_missing_is_named_with_the_nearest_and_not_made(tmp_path, create, error, name):
    (tmp_path / "runs").mkdir()
    text = name.format(tmp_path) if "{" in name else str(tmp_path / name)
    said = refused(text, tmp_path, create=create, error=error)
    assert f"there is no folder {tmp_path}/rnus" in said and "did you mean runs?" in said


def test_the_default_ledger_is_in_the_current_folder_and_alone_has_its_folder_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NothingFound) as nothing:
        open_ledger(None, create=False)
    assert f"no ledger at {tmp_path}/db/evoengine.db (the default, db/evoengine.db in the current" in str(nothing.value)
    assert str(nothing.value).endswith("evoengine search makes one")
    with open_ledger(None, create=True) as ledger:
        assert (ledger.place, ledger.db) == (f"{tmp_path}/db/evoengine.db", None)


def test_reading_an_empty_or_an_optuna_only_file_finds_nothing_and_leaves_it(optuna_file, tmp_path):
    (tmp_path / "empty.db").touch()
    shutil.copy(optuna_file, tmp_path)
    for name in ("empty.db", "study.db"):
        assert "no ledger at" in refused(tmp_path / name, tmp_path, create=False, error=NothingFound)


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "notes.db").write_text("a text, and long enough to be taken for more than a header" * 50)
    assert "is not a database" in refused(tmp_path / "notes.db", tmp_path)


def test_a_damaged_database_is_refused(new_file, tmp_path):
    path = new_file("damaged.db")
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 4000)
    assert "is damaged" in refused(path, tmp_path, error=MachineError)


def test_a_folder_is_refused(tmp_path):
    assert "is a folder" in refused(tmp_path, tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "db").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="cannot be made"):
        open_ledger(None, create=True)


@pytest.mark.parametrize(
    "script", ["CREATE TABLE invoices (id)", "CREATE TABLE runs (id); CREATE TABLE candidates (id)"]
)
@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_another_programs_database_is_refused_even_where_its_tables_are_called_like_ours(tmp_path, script, mode):
    execute(tmp_path / "theirs.db", f"PRAGMA journal_mode={mode}; {script};")
    said = refused(tmp_path / "theirs.db", tmp_path)
    assert "another program's database" in said
    assert "invoices" in said or "candidates, runs" in said


def test_optunas_tables_among_others_are_another_programs_database(optuna_file, tmp_path):
    path = Path(shutil.copy(optuna_file, tmp_path))
    execute(path, "CREATE TABLE invoices (id)")
    assert "it holds invoices" in refused(path, tmp_path)


def test_a_part_of_optunas_tables_is_another_programs_database(tmp_path):
    execute(tmp_path / "theirs.db", "CREATE TABLE alembic_version (version_num); CREATE TABLE trials (id)")
    assert "another program's database" in refused(tmp_path / "theirs.db", tmp_path)


def test_a_ledger_of_a_newer_evoengine_is_refused(new_file, tmp_path):
    path = new_file("newer.db")
    execute(path, "UPDATE evoengine_alembic_version SET version_num = '9999'")
    for create in (True, False):
        said = refused(path, tmp_path, create=create)
        assert "newer evoengine (schema 9999)" in said
        assert "upgrade evoengine" in said


@pytest.mark.parametrize(
    ("script", "remedy"),
    [
        ("UPDATE alembic_version SET version_num = 'v2.6.0.a'", "optuna storage upgrade --storage sqlite:///"),
        ("DROP TABLE alembic_version", "optuna storage upgrade --storage sqlite:///"),
        ("UPDATE alembic_version SET version_num = 'v99.0.0.a'", "pip install --upgrade optuna"),
    ],
)
def test_an_optuna_file_of_another_schema_is_refused_with_the_remedy(optuna_file, tmp_path, script, remedy):
    path = Path(shutil.copy(optuna_file, tmp_path))
    execute(path, script)
    assert remedy in refused(path, tmp_path)


def test_a_file_locked_by_another_writer_is_refused_after_the_wait(optuna_file, tmp_path):
    path = Path(shutil.copy(optuna_file, tmp_path))
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UsageError, match="locked by another writer for 0.2 s"):
            open_ledger(str(path), create=True)
        other.rollback()
    open_ledger(str(path), create=True).close()


def test_a_file_locked_for_writing_alone_is_refused_when_it_has_to_be_written(optuna_file, new_file, tmp_path):
    """WAL lets us read, so an existing ledger opens; a file that is yet to become one, or a write, is refused."""
    ours, optunas = new_file("ours.db"), Path(shutil.copy(optuna_file, tmp_path))
    for path in (ours, optunas):
        with closing(sqlite3.connect(path)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(UsageError, match="locked by another writer"):
                start_run(open_ledger(str(path), create=True))
            other.rollback()
    with open_ledger(str(ours), create=False) as ledger:
        assert ledger.runs() == []


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_ends_within_the_wait_is_no_error(new_file, tmp_path, monkeypatch, there):
    """Where there is no ledger yet, SQLite itself would not wait."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 20.0)
    path = new_file("busy.db") if there else tmp_path / "new.db"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN IMMEDIATE');"
            "print('held', flush=True); import time; time.sleep(0.5); c.rollback()",
            str(path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    with open_ledger(str(path), create=not there) as ledger:
        assert start_run(ledger) == 1
    assert holder.wait() == 0


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _say_what_opening_says(path: str, pipe: Connection) -> None:
    become_nobody()
    try:
        open_ledger(path, create=True)
        pipe.send("opened")
    except UsageError as error:
        pipe.send(str(error))


def unprivileged(says: Callable[[str, Connection], None], path: Path, answers: int = 1) -> list[str]:
    """What is said to a user whom permissions bind: they do not bind root.

    All that opening imports must be there before: that user may not be able to read where Python is installed.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=says, args=(str(path), theirs))
    process.start()
    theirs.close()
    process.join()
    return [ours.recv() for _ in range(answers)]


def open_unprivileged(path: Path) -> str:
    return unprivileged(_say_what_opening_says, path)[0]


@pytest.fixture
def public():
    """Return a folder that others may read, not below tmp_path: pytest closes its parents whenever it starts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        for each in folder.glob("**/"):
            each.chmod(0o755)


def test_a_read_only_folder_and_a_read_only_file_are_refused(new_file, public):
    folder, file, secret = public / "closed", public / "closed.db", public / "secret.db"
    folder.mkdir(mode=0o555)
    for path, mode in ((file, 0o444), (secret, 0o000)):
        shutil.copyfile(new_file("empty.db"), path)
        path.chmod(mode)
    open_ledger(str(public / "imports.db"), create=True).close()
    before = picture(public)
    assert "is read-only; name a file in one that can be written" in open_unprivileged(folder / "x.db")
    assert "may not be read and written" in open_unprivileged(file)
    assert "may not be read" in open_unprivileged(secret)
    assert "there is no folder" in open_unprivileged(folder / "below" / "x.db")
    assert picture(public) == before


@pytest.mark.parametrize("name", ["ledger.db", "none.db", "below/none.db"])
def test_a_folder_that_may_not_be_entered_is_named(new_file, public, name):
    open_ledger(str(public / "imports.db"), create=True).close()
    (public / "closed" / "in").mkdir(parents=True)
    shutil.copyfile(new_file("empty.db"), public / "closed" / "in" / "ledger.db")
    (public / "closed").chmod(0o700 if os.geteuid() == 0 else 0o000)
    said = open_unprivileged(public / "closed" / "in" / name)
    assert said.startswith(
        f"the folder {public / 'closed'} may not be entered; change its permissions, or name another"
    )


def _say_what_reading_says(path: str, pipe: Connection) -> None:
    become_nobody()
    try:
        with open_ledger(path, create=False) as ledger:
            pipe.send(f"{len(ledger.candidates())} candidates")
            start_run(ledger)
    except UsageError as error:
        pipe.send(str(error))


@pytest.fixture
def archived(new_file, public):
    """A ledger with one candidate in a folder of its own."""
    folder = public / "archive"
    folder.mkdir()
    path = Path(shutil.copyfile(new_file("ledger.db"), folder / "ledger.db"))
    with open_ledger(str(path), create=False) as ledger:
        add_ranked(ledger, start_run(ledger), a_figure(1.0))
    return path


@pytest.mark.parametrize(("file", "folder"), [(0o444, 0o755), (0o444, 0o555), (0o644, 0o555)])
def test_a_ledger_that_cannot_be_written_is_read(archived, file, folder):
    archived.chmod(file)
    archived.parent.chmod(folder)
    before = picture(archived.parent)
    read, refused_to_write = unprivileged(_say_what_reading_says, archived, answers=2)
    assert read == "1 candidates"
    assert "cannot be written" in refused_to_write
    assert picture(archived.parent) == before


def test_a_ledger_of_an_older_schema_that_cannot_be_written_says_where_it_is_upgraded(archived):
    thaw(FOLDER / "0007.sql.gz", archived.with_name("old.db"))
    archived.parent.chmod(0o555)
    [said] = unprivileged(_say_what_reading_says, archived.with_name("old.db"))
    assert "is of an older evoengine (schema 0007) and cannot be written here: copy it to where it can be" in said


def test_a_log_in_a_folder_that_cannot_be_written_is_read_or_explained(archived):
    """SQLite reads a log there only where the file that indexes it was left as well."""
    with open_ledger(str(archived), create=False) as ledger:
        add_ranked(ledger, 1, a_figure(2.0), name="second")
        for name in ("ledger.db", "ledger.db-wal"):
            (archived.parent / "left").mkdir(exist_ok=True)
            shutil.copy(archived.with_name(name), archived.parent / "left")
    (archived.parent / "left").chmod(0o555)
    [said] = unprivileged(_say_what_reading_says, archived.parent / "left" / "ledger.db")
    assert "beside its write-ahead log ledger.db-wal, which holds the last commits: make both and their folder" in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mysql://somewhere/db", "SQLite or PostgreSQL database, not mysql"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("://", "not a database URL"),
    ],
)
def test_an_impossible_url_is_refused(tmp_path, name, says):
    assert says in refused(name, tmp_path)


def test_postgresql_without_its_driver_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    said = refused("postgresql://u:secret@127.0.0.1:9/db", tmp_path, error=MachineError)
    assert "pip install evoengine[postgres]" in said


def test_a_postgresql_server_that_is_not_there_is_refused_without_the_password(tmp_path):
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    said = refused("postgresql://u:secret@127.0.0.1:9/db", tmp_path)
    assert "cannot be used" in said
    assert "secret" not in said
