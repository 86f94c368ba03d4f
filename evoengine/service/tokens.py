"""Who may ask the service for what. A token is shown once, when it is made; the database keeps its SHA-256."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, select

from evoengine.errors import UsageError
from evoengine.hints import did_you_mean
from evoengine.ledger.heartbeat import database_time
from evoengine.ledger.service_tables import TokenRow
from evoengine.service.database import Database

PREFIX = "evo_"
SCOPES = ("read", "submit", "work", "admin")
"""each may do what those before it may: read results; submit jobs and cancel one's own; write into the caches of other
tuners; cancel everybody's jobs"""
SECRET_BYTES = 32
KNOWN_SECONDS = 2.0
"""how long a server goes on by what it read of a token: one that was revoked is refused after these"""
NOTED_SECONDS = 60.0
"""between two notes of a token's last use"""
MOST_KNOWN = 10_000
_NAME = re.compile(r"[\w.@:+-]{1,64}")


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    name: str
    scope: str
    created_at: datetime
    expires_at: datetime | None
    used_at: datetime | None
    expired: bool = False

    def may(self, scope: str) -> bool:
        return not self.expired and SCOPES.index(self.scope) >= SCOPES.index(scope)


class Tokens:
    """Any thread may use it."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._known: dict[str, tuple[float, Token | None]] = {}
        """sha256 → when it was read, and what was found"""
        self._noted: dict[int, float] = {}

    def new(self, name: str, scope: str, days: float | None) -> str:
        """Return a new token, which cannot be read again later. Raises UsageError."""
        if scope not in SCOPES:
            near = did_you_mean(scope, SCOPES)
            raise UsageError(f"there is no scope {scope!r}; known ones are {', '.join(SCOPES)}{near}")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"the name {name!a} has to be of 1 to 64 letters, digits and the signs _ . @ : + -, to be told in lists"
            )
        if days is not None and not 0 < days <= 36_500:
            raise UsageError(f"a token expires after {days:g} days; give a number above 0, up to 36,500")
        token = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        with self._db.writing() as session:
            if session.scalar(select(TokenRow.id).where(TokenRow.name == name)):
                raise UsageError(f"there is a token {name} already; revoke it first, or give this one another name")
            now = database_time(session)
            expires = None if days is None else now + timedelta(days=days)
            session.add(TokenRow(sha256=digest(token), name=name, scope=scope, created_at=now, expires_at=expires))
        return token

    def revoke(self, name: str) -> None:
        """Revoke a token. Raises UsageError if there is none of that name."""
        with self._db.writing() as session:
            names = list(session.scalars(select(TokenRow.name)))
            if name not in names:
                listed = f"; there are {', '.join(names)}" if names else "; there are none"
                raise UsageError(f"there is no token {name!a}{listed}{did_you_mean(name, names)}")
            session.execute(delete(TokenRow).where(TokenRow.name == name))

    def all(self) -> list[Token]:
        """Return all tokens, oldest first."""
        with self._db.reading() as session:
            now = database_time(session)
            return [_to_token(row, now) for row in session.scalars(select(TokenRow).order_by(TokenRow.id))]

    def kept(self, token: str) -> tuple[bool, Token | None]:
        """Return whether the token was read recently, and its owner, without asking the database."""
        at, found = self._known.get(digest(token), (float("-inf"), None))
        return time.monotonic() - at < KNOWN_SECONDS, found

    def find(self, token: str) -> Token | None:
        """Return the token's record, or None; it may have expired.

        It is looked up by its SHA-256, so that the duration reveals nothing about existing tokens.
        """
        sha256 = digest(token)
        found = self._read(sha256)
        if len(self._known) >= MOST_KNOWN:  # of somebody who tries many
            self._known.clear()
        self._known[sha256] = (time.monotonic(), found)
        if found is not None and not found.expired:
            self._note_use(found)
        return found

    def _read(self, sha256: str) -> Token | None:
        with self._db.reading() as session:
            row = session.scalar(select(TokenRow).where(TokenRow.sha256 == sha256))
            if row is None or not secrets.compare_digest(row.sha256, sha256):
                return None
            return _to_token(row, database_time(session))

    def _note_use(self, token: Token) -> None:
        if time.monotonic() - self._noted.get(token.id, float("-inf")) < NOTED_SECONDS:
            return
        self._noted[token.id] = time.monotonic()
        with self._db.writing() as session:
            if row := session.get(TokenRow, token.id):
                row.used_at = database_time(session)


def digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def _to_token(row: TokenRow, now: datetime) -> Token:
    expired = row.expires_at is not None and row.expires_at <= now
    return Token(row.id, row.name, row.scope, row.created_at, row.expires_at, row.used_at, expired)
