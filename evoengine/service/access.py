"""Who may ask: bearer tokens, and what a server on loopback does without."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from evoengine.service.errors import problem
from evoengine.service.settings import Settings
from evoengine.service.state import State
from evoengine.service.tokens import Token

NOBODY = 0
"""the submitter where no token was asked for"""
OPEN = frozenset({"/livez", "/readyz", "/style.css"})
"""paths that say no more than that the server is up"""
_bearer = HTTPBearer(auto_error=False, description="evo_…, as evoengine token new makes them")
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""headers of a proxy: what comes through one does not come from this machine"""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


class Authenticate:
    """Answers 401 to who has no valid token and needs one, before anything of the request is read."""

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
            return "this server asks for a token: Authorization: Bearer evo_…" if needed else None
        if token is None:
            return "the token is not one of this server's"
        return f"the token {token.name} has expired" if token.expired else None


def require(scope: str) -> Callable[..., Awaitable[int]]:
    """Return a dependency that gives the submitter's number; 403 if the token's scope is insufficient."""

    async def check(request: Request, _: Annotated[object, Depends(_bearer)]) -> int:
        token: Token | None = request.state.token
        if token is None:
            return NOBODY
        if not token.may(scope):
            raise HTTPException(
                HTTPStatus.FORBIDDEN, f"the token {token.name} is for {token.scope}, and this asks for {scope}"
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
        raise HTTPException(HTTPStatus.FORBIDDEN, f"job {number} is of another token; one for admin may cancel it")


def require_own_page(request: Request) -> None:
    """Answer 403 unless a page of this server sent the form, because a browser adds the token to requests from any
    site.

    Browsers state the origin by Sec-Fetch-Site over HTTPS and on loopback, and by Origin everywhere.
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
