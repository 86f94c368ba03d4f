"""Opens the database of a ledger: looks before it touches, refuses in one sentence, brings the schema up to date.

SQLite runs in WAL mode with synchronous=NORMAL: a killed process loses nothing that was committed; a power cut may
lose the last commits, never the file. PostgreSQL is used as it is. What a driver raises, and what a damaged value does
to who reads it, becomes one sentence with a remedy.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, QueuePool

from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError, hint, nearest_folder
from evoengine.ledger.check import READ_ERRORS, check_small, find_damage
from evoengine.ledger.integrity import Damaged
from evoengine.ledger.optuna import schema as optuna_schema
from evoengine.ledger.schema import LOCK_KEY, REVISIONS, upgrade
from evoengine.ledger.tables import VERSION_TABLE
from evoengine.paths import chosen_database, default_database
from evoengine.sandbox.machine import require_files
from evoengine.text import hide_passwords, without_passwords


class Unavailable(UsageError):
    """The database cannot be used for now."""


BUSY_SECONDS = 30.0
"""how long a writer waits for another's transaction to end"""
_SIGNS_OF_DAMAGE = ("not a database", "malformed", "disk I/O error", "unsupported file format", "no such table")
_SIGNS_OF_ABSENCE = (
    "OperationalError InterfaceError AdminShutdown CrashShutdown CannotConnectNow ConnectionTimeout"
    " IdleInTransactionSessionTimeout DeadlockDetected SerializationFailure"
).split()
"""psycopg's errors of a connection that is lost or not to be had, and of a transaction that another one broke"""
_RESTORE = "restore it from a copy, or name another with --db"


def display_url(url: URL) -> str:
    """Return the file, or the URL without its password."""
    return url.database or "" if url.drivername == "sqlite" else hide_passwords(url.render_as_string())


@contextmanager
def translate_errors(url: URL) -> Iterator[None]:
    """Turn what the database driver and damaged values raise into one sentence."""
    try:
        yield
    except DBAPIError as error:
        raise _explanation(url, error.orig or error) from error
    except sqlite3.Error as error:
        raise _explanation(url, error) from error
    except Damaged as damaged:
        raise _damage(url, damaged) from damaged
    except READ_ERRORS as error:
        if damage := _find_damage(url):
            raise damage from error
        if isinstance(error, OverflowError):  # of SQLite's driver; PostgreSQL's gives a DBAPIError
            raise UsageError("a number of more than 64 bits stands for nothing in a ledger") from error
        raise


def is_away(error: BaseException) -> bool:
    """Return whether a server ended the connection or takes none for now, by the error of its driver."""
    return type(error).__name__ in _SIGNS_OF_ABSENCE or isinstance(error, (ConnectionError, TimeoutError))


def _find_damage(url: URL) -> EvoengineError | None:
    if url.drivername != "sqlite":
        return None
    try:
        damaged = find_damage(Path(url.database or ""))
    except sqlite3.Error as error:
        return _explanation(url, error)
    return _damage(url, damaged) if damaged else None


def _damage(url: URL, damaged: Damaged | str) -> EvoengineError:
    return MachineError(f"{display_url(url)} is damaged: {damaged}; {_RESTORE}")


def _explanation(url: URL, error: BaseException) -> EvoengineError:
    """Return what to raise; raise MachineError if no file can be opened any more."""
    reason = hide_passwords(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
    if "locked" in reason:
        return Unavailable(
            f"{display_url(url)} has been locked by another writer for {BUSY_SECONDS:g} s; "
            "let that program end, or name another file with --db"
        )
    if url.drivername != "sqlite":
        advice = "check the server and the URL of --db"
        kind = Unavailable if is_away(error) else UsageError
        return kind(f"the database {display_url(url)} cannot be used: {reason}; {advice}")
    if "UTF-8" in reason and (damage := _find_damage(url)):
        return damage
    if any(word in reason for word in _SIGNS_OF_DAMAGE):
        return MachineError(f"{display_url(url)} is damaged ({reason}); {_RESTORE}")
    if "unable to open" in reason:
        require_files()
    log = Path(f"{url.database}-wal")
    if ("readonly" in reason or "unable to open" in reason) and log.exists():
        return UsageError(
            f"{display_url(url)} cannot be read or written ({reason}) beside its write-ahead log {log.name}, which "
            "holds the last commits: make both and their folder writable, or copy both to a folder that is"
        )
    if "readonly" in reason or "unable to open" in reason:
        advice = "name a file in a folder that can with --db"
        return UsageError(f"{display_url(url)} cannot be written ({reason}); {advice}")
    return MachineError(f"the ledger {display_url(url)} cannot be used: {reason}")


_EXAMPLES = "sqlite:///db/evoengine.db or postgresql://user@host/database"
SQLITE_MAGIC = b"SQLite format 3\0"
TRY_AGAIN_SECONDS = 0.01
_PRIMARY = 0xFF
"""of SQLite's error codes: which kind of busy it is stands above"""


def parse_url(text_or_path: str) -> URL:
    """Parse a database URL or the path of an SQLite file; raise UsageError on what is neither."""
    if "://" not in text_or_path:
        return URL.create("sqlite", database=str(Path(text_or_path).expanduser()))
    try:
        url = make_url(text_or_path)
        if url.drivername != "sqlite" and text_or_path.partition("?")[0].count("@") > 1:
            raise ValueError("the first of two @ would end the password")
    except (ArgumentError, ValueError) as error:
        remedy = f"write a file name or {_EXAMPLES}, with %40 for an @ in a password, %3A for : and %2F for /"
        raise UsageError(f"{hide_passwords(text_or_path)!r} is not a database URL; {remedy}") from error
    if url.drivername in ("postgresql", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise UsageError(f"a ledger is an SQLite or PostgreSQL database, not {url.drivername}; write {_EXAMPLES}")
    if url.database in (None, "", ":memory:") or url.query:
        raise UsageError(
            f"{hide_passwords(text_or_path)!r} names no file, and a ledger must outlive its process; write {_EXAMPLES}"
        )
    return url.set(drivername="sqlite")


@dataclass(frozen=True, slots=True)
class Contents:
    """What was found in a database before anything was done to it."""

    tables: frozenset[str] = frozenset()
    revision: str | None = None
    """of our schema; None if there is none of ours"""
    optuna_revision: str | None = None
    has_studies: bool = False

    @property
    def studies_half_made(self) -> bool:
        """Return whether an evoengine was killed while Optuna created its tables, which it commits one by one."""
        return self.revision is not None and self.optuna_revision is None and not self.has_studies


def open_database(url: URL, *, create: bool) -> Engine:
    """Return an engine on a database whose schema is this evoengine's.

    Where there is no ledger yet, makes one with `create` and raises NothingFound without. Without `create`, a file that
    cannot be written is opened for reading alone. Raises UsageError on a database that cannot be used, MachineError on
    a damaged one or without a PostgreSQL driver; then nothing has been written.
    """
    _require_name(url)
    writable = url.drivername != "sqlite" or _check_file(url, create)
    contents = inspect_database(url)
    _refuse_foreign(url, contents)
    if contents.revision is None and not create:
        raise _no_ledger(url, _without_log(url, contents))
    if contents.revision is None:
        optuna_schema.require_schema(contents.tables, contents.optuna_revision, hide_passwords(url.render_as_string()))
    outdated = contents.revision != REVISIONS[-1]
    if outdated and not writable:
        raise UsageError(
            f"{display_url(url)} is of an older evoengine (schema {contents.revision}) and cannot be written here: "
            "copy it to where it can be, and it is upgraded when it is opened"
        )
    engine = make_engine(url) if writable else _reading_engine(url)
    with translate_errors(url):
        if outdated:
            upgrade(engine)
            mark(engine)
        else:
            with Session(engine.execution_options(reading=True)) as session:
                check_small(session)
    return engine


def make_engine(url: URL) -> Engine:
    """Return an engine; on SQLite with WAL, foreign keys, and transactions that take the write lock as they begin.

    With SQLite's own deferred locks, a transaction that reads and then writes fails at once, busy timeout or not, when
    another has written in between. Engines with the execution option `reading` keep the deferred ones.
    """
    engine = create_engine(url, **engine_options(url))
    if url.drivername != "sqlite":
        return engine
    set_pragmas(engine)
    _state_transactions(engine)
    return engine


def _reading_engine(url: URL) -> Engine:
    """Return an engine for an SQLite file that cannot be written, or whose folder takes none of SQLite's side files."""
    path = Path(url.database or "")
    uri = reading_uri(path, alone=not os.access(path.parent, os.W_OK | os.X_OK))

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    _state_transactions(engine)
    return engine


def _state_transactions(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        reading = connection.get_execution_options().get("reading", False)
        # past SQLAlchemy, which takes longer for it than SQLite does
        connection.connection.cursor().execute("BEGIN" if reading else "BEGIN IMMEDIATE")


def engine_options(url: URL) -> dict[str, Any]:
    return {"connect_args": {"timeout": BUSY_SECONDS}} if url.drivername == "sqlite" else {}


def set_pragmas(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, record: object) -> None:
        _use_log(connection)
        connection.execute("PRAGMA synchronous=NORMAL")


def _use_log(connection: sqlite3.Connection) -> None:
    """Switch to WAL mode, waiting for other connections, such as those of a second search that creates the ledger.

    SQLite's busy timeout does not cover a change of the journal mode while another connection writes or changes it.
    """
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                raise
        time.sleep(TRY_AGAIN_SECONDS)


@contextmanager
def setup_lock(url: URL) -> Iterator[None]:
    """Hold off other processes of evoengine that would set up the same database; raise UsageError if they stay."""
    if url.drivername == "sqlite":
        try:
            with FileLock(f"{url.database}.lock", timeout=BUSY_SECONDS):
                yield
        except Timeout as error:
            raise UsageError(
                f"{display_url(url)} has been held by another evoengine for {BUSY_SECONDS:g} s; let that one end"
            ) from error
        except OSError as error:
            require_files()
            raise UsageError(
                f"the folder of {display_url(url)} cannot be written ({error.strerror}), and the studies need that: "
                "copy the ledger to one that can"
            ) from error
        return
    with create_engine(url, poolclass=NullPool).connect() as connection:
        connection.execute(text(f"SELECT pg_advisory_lock({LOCK_KEY})"))
        yield


def number_for_a_file() -> int:
    """Draw what PRAGMA user_version says of a ledger's or a backup's file.

    By it a log of another file is known (`check_log`), and so is another file that was copied over this one (`Watch`).
    """
    return 1 + secrets.randbelow(2**31 - 1)


def mark(engine: Engine) -> None:
    """Give an SQLite file a number of its own."""
    if engine.dialect.name != "sqlite":
        return
    with engine.begin() as connection:
        if not connection.exec_driver_sql("PRAGMA user_version").scalar():
            connection.exec_driver_sql(f"PRAGMA user_version = {number_for_a_file()}")
    empty_log(engine)  # the number has to be in the file itself


# ── looking before touching ─────────────────────────────────────────────────────────────────────────────────────────


def _without_log(url: URL, contents: Contents) -> str:
    """Return a hint at a missing write-ahead log, where a file that is not empty holds no table."""
    path = Path(url.database or "")
    if url.drivername != "sqlite" or contents.tables or not path.stat().st_size:
        return ""
    return f"; if it was copied from a ledger, its write-ahead log {path.name}-wal has to be copied with it"


def inspect_database(url: URL) -> Contents:
    """Read what the database holds without changing a byte; an SQLite file need not be there."""
    return _look_into_file(Path(url.database or "")) if url.drivername == "sqlite" else _look_into_server(url)


def _require_name(url: URL) -> None:
    """Raise UsageError if the path is not text, which SQLAlchemy's URL needs, or too long for the file system."""
    try:
        (url.database or "").encode("utf-8")
        if url.drivername == "sqlite":
            os.lstat(url.database or "")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the ledger {url.database} has a name that is not text in this locale; name another file with --db"
        ) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"the ledger {url.database} has a name too long for a file; give --db another") from error


def db_of(url: URL) -> str | None:
    """Return what --db takes to lead to this ledger, without a password; None for the default ledger."""
    if url == parse_url(chosen_database(None)):
        return None
    if url.drivername == "sqlite":
        return url.database
    return without_passwords(url.render_as_string(hide_password=False))


def _no_ledger(url: URL, log: str) -> NothingFound:
    rule = " (the default, db/evoengine.db in the current folder; --db names another)" if _is_default(url) else ""
    return NothingFound(f"no ledger at {display_url(url)}{rule}: {hint('search', db=db_of(url))} makes one{log}")


def _is_default(url: URL) -> bool:
    return url == parse_url(default_database())


def _check_file(url: URL, create: bool) -> bool:
    """Return whether a ledger can be written there; of folders that are missing, makes that of the default one alone.

    Raises UsageError if it cannot be kept there, with `create`.
    """
    path = Path(url.database or "")
    for folder in reversed(path.parents):
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            raise UsageError(
                f"the folder {folder} may not be entered; change its permissions, or name another file with --db"
            )
    if path.is_dir():
        raise UsageError(f"{path} is a folder; --db names a file in it, such as {path / 'evoengine.db'}")
    if not path.parent.is_dir() and not _is_default(url):
        error = UsageError if create else NothingFound
        near = nearest_folder(path.parent)
        raise error(f"no ledger at {path}: there is no folder {path.parent}; make it, or name another with --db{near}")
    if not path.exists():
        if not create:
            log = Path(f"{path}-wal")
            is_of = f"; {log.name} beside it is the write-ahead log of a file that does not exist"
            raise _no_ledger(url, is_of if log.exists() else "")
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the folder {path.parent} cannot be made ({error.strerror}); name a file in another with --db"
            ) from error
    elif not os.access(path, os.R_OK):
        raise UsageError(f"{path} may not be read; change its permissions, or name another with --db")
    elif not os.access(path, os.W_OK):
        if create:
            raise UsageError(f"{path} may not be read and written; change its permissions, or name another with --db")
        return False
    if not os.access(path.parent, os.W_OK | os.X_OK):
        if create:
            raise UsageError(f"the folder {path.parent} is read-only; name a file in one that can be written with --db")
        return False
    return True


def _look_into_file(path: Path) -> Contents:
    log = Path(f"{path}-wal")
    uri = reading_uri(path, alone=False)
    # Where there is a log, this process may have the file open through SQLite. Closing it once more, opened in any
    # other way, would drop SQLite's locks (sqlite.org, How To Corrupt An SQLite Database File, 2.2): the next process
    # that is done reading would think itself the last and take the log away, with all that is still written into it.
    if not log.exists():
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            head = file.read(20)
        if not head:
            return Contents()
        if not head.startswith(SQLITE_MAGIC):
            raise UsageError(f"{path} is not a database; name an SQLite file or a new one with --db")
        # in WAL mode and open nowhere: read without the side files that opening it would make
        uri = reading_uri(path, alone=head[18] == 2)
    in_use = Path(f"{path}-shm").exists()
    translated = translate_errors(URL.create("sqlite", database=str(path)))
    with translated, closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        if log.exists() and log.stat().st_size:
            check_log(connection, path, log, in_use)
        tables = (name for (name,) in names if not name.startswith("sqlite_"))
        return _contents(tables, lambda query: (connection.execute(query).fetchone() or [None])[0])


def _look_into_server(url: URL) -> Contents:
    try:
        engine = create_engine(url, poolclass=NullPool)
    except ModuleNotFoundError as error:
        raise MachineError("a PostgreSQL ledger needs the driver psycopg: pip install evoengine[postgres]") from error
    with translate_errors(url), engine.connect() as connection:
        return _contents(inspect(connection).get_table_names(), lambda query: connection.scalar(text(query)))


def _contents(names: Iterable[str], scalar: Callable[[str], str | None]) -> Contents:
    tables = frozenset(names)
    own, of_optuna = (
        scalar(f"SELECT version_num FROM {table}") if table in tables else None
        for table in (VERSION_TABLE, optuna_schema.VERSION_TABLE)
    )
    has_studies = "studies" in tables and scalar("SELECT 1 FROM studies LIMIT 1") is not None
    return Contents(tables, own, of_optuna, has_studies)


def _refuse_foreign(url: URL, contents: Contents) -> None:
    tables, revision = contents.tables, contents.revision
    if revision is not None:
        if revision not in REVISIONS:
            raise UsageError(
                f"{display_url(url)} was made by a newer evoengine (schema {revision}); "
                "upgrade evoengine, or name another file with --db"
            )
        return
    strange = tables - optuna_schema.TABLES
    if strange or (tables and not optuna_schema.holds_studies(tables)):
        named = ", ".join(sorted(strange or tables)[:3])
        raise UsageError(f"{display_url(url)} is another program's database (it holds {named}); name another with --db")


# ── the write-ahead log ───────────────────────────────────────────────────────────────────────────────────────────────


USER_VERSION_OFFSET = 60
"""where an SQLite file has what PRAGMA user_version says (sqlite.org/fileformat2.html, 1.3)"""
LOG_IN_USE_SECONDS = 60.0
"""a log that was written since then belongs to a search that is running"""


def reading_uri(path: Path, *, alone: bool) -> str:
    """Return the URI that opens a file for reading; `alone`, when nobody writes it, without creating side files."""
    log = Path(f"{path}-wal")
    immutable = alone and not (log.exists() and log.stat().st_size)
    return f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"


def check_log(connection: sqlite3.Connection, path: Path, log: Path, in_use: bool) -> None:
    """Raise MachineError if a log that nobody is writing does not fit the file; `in_use`: somebody may be.

    SQLite takes whatever log it finds for the file's own, and would write it into the file when that is closed.
    """
    if in_use and log.stat().st_mtime > time.time() - LOG_IN_USE_SECONDS:
        return
    try:
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        (number,) = connection.execute("PRAGMA user_version").fetchone()
        if found == "ok" and connection.execute("PRAGMA foreign_key_check").fetchone():
            found = "rows name others that are not there"
    except sqlite3.DatabaseError as error:
        found, number = str(error), 0
    if not in_use:  # else closing the file would drop the locks of who has it open, as above
        with path.open("rb") as file:
            file.seek(USER_VERSION_OFFSET)
            own = int.from_bytes(file.read(4), "big")
        if own and own != number:
            found = "they are of two ledgers"
    if found != "ok":
        if not in_use:
            Path(f"{path}-shm").unlink(missing_ok=True)  # made by this very look
        raise MachineError(
            f"{path} and its write-ahead log {log.name} do not fit together ({' '.join(found.split())}): the log "
            "may be another file's; move it away to read the file without it, or restore both from the same copy"
        )


def empty_log(engine: Engine) -> None:
    """Move what the write-ahead log holds into the file that is open, wherever that is now.

    The log keeps its path when the file goes, and would be taken for that of the file that comes in its place. A
    connection that is open already is used; where there is none, there is nothing to move.
    """
    with suppress(Exception):
        raw = engine.raw_connection()
        try:
            raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            raw.close()


def discard_log(path: Path) -> None:
    """Empty and remove the log of a file that was overwritten: SQLite would move it into what is there now.

    What it holds is of no use without the pages that are gone. Removed it is not taken for that of the new file,
    emptied it gives nothing to connections that still have it open.
    """
    with suppress(OSError):
        os.truncate(f"{path}-wal", 0)
    for name in (f"{path}-wal", f"{path}-shm"):
        Path(name).unlink(missing_ok=True)


# ── the file as a whole ───────────────────────────────────────────────────────────────────────────────────────────────


def schema_of(url: URL) -> str:
    """Return the revision of a ledger. Raises NothingFound if there is none."""
    revision = inspect_database(url).revision
    if revision is None:
        raise NothingFound(f"no ledger at {display_url(url)}: {hint('search', db=db_of(url))} makes one")
    return revision


def back_up(database: str | None, file: Path) -> int:
    """Write a copy by SQLite's own means, with what is written meanwhile; return its bytes.

    It has a number of its own: a search that uses the ledger knows it where it is put in the ledger's place.

    Raises UsageError if the file is there already or cannot be written, and for PostgreSQL.
    """
    url = parse_url(chosen_database(database))
    if url.drivername != "sqlite":
        raise UsageError(
            "PostgreSQL has a program for it: pg_dump --format=custom --file=FILE DATABASE copies the ledger"
        )
    if file.exists():
        raise UsageError(f"{file} is there already; name a new file")
    schema_of(url)
    part = file.with_name(f"{file.name}.part")
    source = reading_uri(Path(url.database or ""), alone=False)
    try:
        part.touch()
        with (
            translate_errors(url),
            closing(sqlite3.connect(source, uri=True)) as connection,
            closing(sqlite3.connect(part)) as copy,
        ):
            connection.backup(copy)
            copy.execute(f"PRAGMA user_version = {number_for_a_file()}")
        os.replace(part, file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; name a file in another folder") from error
    finally:
        part.unlink(missing_ok=True)
    return file.stat().st_size


def vacuum(url: URL, engine: Engine) -> bool:
    """Make an SQLite file as small as it can be; return whether nobody stood in the way."""
    if url.drivername != "sqlite":
        return True
    with translate_errors(url), closing(engine.raw_connection()) as connection:
        try:
            connection.cursor().execute("VACUUM")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                return False
            raise
    empty_log(engine)
    return True
