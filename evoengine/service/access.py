"""Tokens, authentication and scopes, and the state that the parts of a server share.

A token is shown once, when it is created; the database stores its SHA-256.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from sqlalchemy import delete, select
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from evoengine.errors import UsageError, did_you_mean
from evoengine.ledger.runs import database_time
from evoengine.ledger.store import Ledger
from evoengine.service.answers import Answers, Reports
from evoengine.service.executors import Executors
from evoengine.service.jobs import Jobs
from evoengine.service.limits import LANES, POLLS, Lane, Threads
from evoengine.service.requests import problem
from evoengine.service.settings import Settings
from evoengine.service.tables import TokenRow

PREFIX = "evo_"
_EACH = ("read", "submit", "work", "admin")
GRANTS = {scope: frozenset(_EACH[: n + 1]) for n, scope in enumerate(_EACH)} | {
    "propose": frozenset({"read", "propose"}),
    "admin": frozenset({*_EACH, "propose"}),
}
"""scope of a token → what it may do: read results; submit jobs and cancel one's own; write into the caches of other
tuners; propose texts of kernels, which are compiled and run; cancel everybody's jobs"""
SCOPES = tuple(GRANTS)
SECRET_BYTES = 32
KNOWN_SECONDS = 2.0
"""for which a token is cached, and so for which a revoked one is still accepted"""
NOTED_SECONDS = 60.0
"""minimum between two updates of a token's last use"""
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
        return not self.expired and scope in GRANTS[self.scope]


class Tokens:
    """The tokens of a ledger. Thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self._db = ledger.database
        self._known: dict[str, tuple[float, Token | None]] = {}
        """sha256 → when it was read, and what was found"""
        self._noted: dict[int, float] = {}

    def new(self, name: str, scope: str, days: float | None) -> str:
        """Return a new token, which cannot be read again later. Raises UsageError."""
        if scope not in SCOPES:
            near = did_you_mean(scope, SCOPES)
            raise UsageError(f"unknown scope {scope!r}; scopes are {', '.join(SCOPES)}{near}")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"the token name {name!a} is invalid; use 1 to 64 letters, digits and the characters _ . @ : + -"
            )
        if days is not None and not 0 < days <= 36_500:
            raise UsageError(f"a token cannot expire after {days:g} days; give a number above 0, up to 36,500")
        token = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        with self._db.writing() as session:
            if session.scalar(select(TokenRow.id).where(TokenRow.name == name)):
                raise UsageError(f"there already is a token {name}; revoke it first, or choose another name")
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
        """Return whether the token is cached, and its record, without asking the database."""
        at, found = self._known.get(digest(token), (float("-inf"), None))
        return time.monotonic() - at < KNOWN_SECONDS, found

    def find(self, token: str) -> Token | None:
        """Return the token's record, or None; it may have expired.

        It is looked up by its SHA-256, so that the duration reveals nothing about existing tokens.
        """
        sha256 = digest(token)
        found = self._read(sha256)
        if len(self._known) >= MOST_KNOWN:  # a client that guesses tokens must not fill the memory
            self._known.clear()
        self._known[sha256] = (time.monotonic(), found)
        if found is not None and not found.expired:
            self._note_use(found)
        return found

    def _read(self, sha256: str) -> Token | None:
        with self._db.reading() as session:
            row = session.scalar(select(TokenRow).where(TokenRow.sha256 == sha256))
            return None if row is None else _to_token(row, database_time(session))

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


NOBODY = 0
"""submitter of a request without a token"""
OPEN = frozenset({"/livez", "/readyz", "/style.css"})
"""paths that need no token: they reveal only that the server is up"""
_bearer = HTTPBearer(auto_error=False, description="evo_…, as evoengine token new makes them")
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""headers that a proxy sets: such a request does not come from this machine"""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


class Authenticate:
    """Answer 401 to a request that lacks a valid token and needs one, before its body is read."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            asking = HTTPConnection(scope)
            given = _given(asking)
            token = None if given is None else await self._find(given)
            if why := self._why_not(asking, given, token):
                scheme = 'Basic realm="evoengine: a token as the password"' if _is_browser(asking) else "Bearer"
                await problem(HTTPStatus.UNAUTHORIZED, why, {"WWW-Authenticate": scheme})(scope, receive, send)
                return
            scope.setdefault("state", {})["token"] = token
        await self._app(scope, receive, send)

    async def _find(self, given: str) -> Token | None:
        known, token = self._state.tokens.kept(given)
        return token if known else await self._state.quick.run(self._state.tokens.find, given)

    def _why_not(self, asking: HTTPConnection, given: str | None, token: Token | None) -> str | None:
        settings = self._state.settings
        if given is None:
            needed = settings.tokens_required or not _is_local(asking, settings)
            return "this server requires a token: Authorization: Bearer evo_…" if needed else None
        if token is None:
            return "this server does not know the token"
        return f"the token {token.name} has expired" if token.expired else None


def require(scope: str) -> Callable[..., Awaitable[int]]:
    """Return a dependency that gives the submitter's number; 403 if the token's scope is insufficient."""

    async def check(request: Request, _: Annotated[object, Depends(_bearer)]) -> int:
        token: Token | None = request.state.token
        if token is None:
            return NOBODY
        if not token.may(scope):
            raise HTTPException(
                HTTPStatus.FORBIDDEN, f"the token {token.name} has scope {token.scope}; this request needs {scope}"
            )
        return token.id

    return check


def may_submit(request: Request) -> bool:
    asking: Token | None = request.state.token
    return asking is None or asking.may("submit")


def may_cancel(request: Request, submitter: int) -> bool:
    """Return whether the request may cancel a job of that submitter: its own, or with admin everybody's."""
    asking: Token | None = request.state.token
    return asking is None or asking.may("admin") or (asking.id == submitter and asking.may("submit"))


def require_own(request: Request, number: int, submitter: int) -> None:
    """Answer 403 if the job belongs to another token and the request's token lacks the scope admin."""
    if not may_cancel(request, submitter):
        raise HTTPException(
            HTTPStatus.FORBIDDEN, f"job {number} belongs to another token; one of scope admin may cancel it"
        )


def require_own_page(request: Request) -> None:
    """Answer 403 unless a page of this server sent the form.

    A browser adds the token to requests from any site. Browsers state the origin by Sec-Fetch-Site over HTTPS and on
    loopback, and by Origin everywhere.
    """
    origin, site = request.headers.get("origin", ""), request.headers.get("sec-fetch-site")
    same = site == "same-origin" if site else origin.partition("://")[2] == request.headers.get("host")
    if not same:
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            "the form was not sent by a page of this server; programs use POST and DELETE /v1/jobs",
        )


def _given(asking: HTTPConnection) -> str | None:
    """Return the token of the request: Bearer for programs, the password of Basic for browsers."""
    scheme, _, value = asking.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return None if not scheme else ""


def _is_local(asking: HTTPConnection, settings: Settings) -> bool:
    """Return whether a request without a token comes from a program on this machine, and not from a page in a browser.

    A page of another site can reach this address by a name of its own; Host is then that name.
    """
    if any(name in asking.headers for name in _FORWARDED):
        return False
    host = asking.headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name in _LOCAL_NAMES or name == settings.host


def _is_browser(asking: HTTPConnection) -> bool:
    return "text/html" in asking.headers.get("accept", "")


# ── shared state ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class State:
    settings: Settings
    ledger: Ledger
    jobs: Jobs
    tokens: Tokens
    answers: Answers
    executors: Executors
    dispatches: Callable[[], bool]
    """whether this server's dispatcher runs"""
    reports: Reports
    quick: Threads
    """for requests that must never queue: health, tokens, the best kernel; they use connections of their own"""
    polls: Threads = field(default_factory=lambda: Threads(POLLS))
    """for requests that wait for jobs"""
    lanes: Mapping[str, Lane] = field(default_factory=lambda: {name: Lane(*sizes) for name, sizes in LANES.items()})
    stopping: threading.Event = field(default_factory=threading.Event)
    streams: int = 0
    """requests that are waiting for events"""


def state_of(request: Request) -> State:
    found: State = request.app.state.service
    return found
