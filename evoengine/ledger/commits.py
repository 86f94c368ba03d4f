"""Whether a server made a transaction whose connection was lost while it was committed.

Each transaction writes its number into its writer's row of `commits`: the row tells which was the last that was made. A
server's own number of a transaction does not tell: after a crash it gives numbers again that were lost with their
transactions.
"""

from __future__ import annotations

import threading
import uuid
from itertools import count

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

Mark = tuple[str, int]
"""writer and number of a transaction"""

LOCK_SECONDS = 5
"""how long the server may take to notice that a connection is lost, before it counts as away"""
_NOTE = text(
    "INSERT INTO commits (writer, number, at) VALUES (:writer, :number, CURRENT_TIMESTAMP) "
    "ON CONFLICT (writer) DO UPDATE SET number = excluded.number, at = excluded.at"
)
# It writes the row, or it would not wait for a transaction that still may.
_LAST = text(
    "INSERT INTO commits (writer, number, at) VALUES (:writer, 0, CURRENT_TIMESTAMP) "
    "ON CONFLICT (writer) DO UPDATE SET number = commits.number RETURNING number"
)
_FORGET = text("DELETE FROM commits WHERE at < CURRENT_TIMESTAMP - INTERVAL '7 days'")
_WAIT = text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
_STILL_LOCKED = "55P03"


class Commits:
    """Of a process. Each of its threads is a writer: they commit at one time."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def note(self, connection: Connection) -> Mark:
        """Has the transaction leave its mark."""
        own = self._of_thread
        if not hasattr(own, "writer"):
            own.writer, own.numbers = uuid.uuid4().hex, count(1)
            connection.execute(_FORGET)
        mark = own.writer, next(own.numbers)
        connection.execute(_NOTE, {"writer": mark[0], "number": mark[1]})
        return mark


def was_made(connection: Connection, mark: Mark) -> bool | None:
    """Whether the last transaction of its writer is that one; None while the server has not ended it."""
    writer, number = mark
    connection.execute(_WAIT)
    try:
        return bool(connection.scalars(_LAST, {"writer": writer}).one() == number)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _STILL_LOCKED:
            return None
        raise
