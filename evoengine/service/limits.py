"""Limits on clients: concurrency by kind of request, connections and requests per address, sizes and times.

Few requests of a kind run at once, so that no kind takes all threads and database connections. Health checks and the
best kernel take no turn: they have threads and a database connection of their own (`State.quick`).

uvicorn itself waits for headers and bodies without limit, and accepts connections until files run out. Here headers
must arrive within HEADER_SECONDS and HEADER_BYTES. An address at its limit of connections loses the oldest idle one, so
that a client that opens many and sends nothing locks out nobody. Behind a trusted proxy the requests in progress of the
forwarded address are counted instead.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from evoengine.service.requests import RETRY_SECONDS, problem
from evoengine.service.settings import Settings

LANES = {"jobs": (4, 100), "results": (4, 60), "pages": (3, 40), "candidates": (1, 8)}
"""kind → requests that run at once, and that may wait; with POLLS at most SQLAlchemy's pool of connections"""
POLLS = 3
"""polls of the database by waiting requests, at once"""
QUICK = 8
"""requests on health and the best kernel, at once"""

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    def __init__(self, at_once: int, waiting: int) -> None:
        self._room = asyncio.Semaphore(at_once)
        self._most, self._waiting = waiting, 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn. Raises HTTPException, 503, if too many requests wait."""
        if self._waiting >= self._most:
            raise busy("too many requests of this kind are waiting")
        self._waiting += 1
        try:
            await self._room.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._room.release()


def busy(why: str) -> HTTPException:
    return HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, why, {"Retry-After": str(RETRY_SECONDS)})


def turn(kind: str) -> Callable[[Request], AsyncIterator[None]]:
    """Return a dependency that holds a turn in the lane until the answer is made."""

    async def take(request: Request) -> AsyncIterator[None]:
        lane: Lane = request.app.state.service.lanes[kind]
        async with lane.turn():
            yield

    return take


class Threads:
    """Run functions in at most `at_once` threads of their own."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._limiter: anyio.CapacityLimiter | None = None

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        if self._limiter is None:  # it belongs to an event loop
            self._limiter = anyio.CapacityLimiter(self._at_once)
        return anyio.to_thread.run_sync(partial(function, *args, **kwargs), limiter=self._limiter)


HEADER_SECONDS = 10.0
"""from the beginning of a connection, or of a later request on it, to the end of the request's headers"""
HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 15
"""for which an idle connection is kept"""
FILES_BESIDE = 256
"""files reserved for other uses than connections"""


class Connections:
    """The open connections by address. Used only in the server's event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._of: dict[str, dict[LimitedProtocol, None]] = {}
        """address → its connections, oldest first"""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_in_all = max(FILES_BESIDE, files - FILES_BESIDE)

    def protocol(self) -> Any:
        """Return the protocol that uvicorn uses for a connection."""
        return partial(LimitedProtocol, self)

    def enter(self, connection: LimitedProtocol) -> bool:
        """Return whether there is room for the connection, closing an idle one if necessary."""
        own = self._of.setdefault(connection.address, {})
        limited = not self._settings.trusts(connection.address)
        if limited and len(own) >= self._settings.max_connections and not self._drop_waiting(connection.address):
            return False
        if sum(map(len, self._of.values())) >= self._most_in_all and not any(map(self._drop_waiting, list(self._of))):
            return False
        self._of.setdefault(connection.address, {})[connection] = None
        return True

    def _drop_waiting(self, address: str) -> bool:
        """Close the oldest idle connection of the address; return whether there was one."""
        waiting = next((each for each in self._of.get(address, ()) if each.waits), None)
        if waiting is None:
            return False
        self.leave(waiting)
        waiting.transport.abort()
        return True

    def leave(self, connection: LimitedProtocol) -> None:
        own = self._of.get(connection.address, {})
        own.pop(connection, None)
        if not own:
            self._of.pop(connection.address, None)


class LimitedProtocol(HttpToolsProtocol):
    """A connection of uvicorn with limits on headers."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = connections
        self.address = ""
        self._late: asyncio.TimerHandle | None = None
        """set while headers are awaited"""
        self._header_bytes = 0

    @property
    def waits(self) -> bool:
        """Return whether no request is in progress: the first or the next one has not arrived completely."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self._open.enter(self):
            self._await_headers()
        else:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "this address has too many requests in progress")

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.leave(self)
        self._headers_are_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._late is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._late is not None and self._header_bytes > HEADER_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the headers have more than {HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._late is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._headers_are_there()
        super().on_headers_complete()

    def _await_headers(self) -> None:
        self._header_bytes = 0
        why = f"the headers of the request did not arrive within {HEADER_SECONDS:g} s"
        self._late = self.loop.call_later(HEADER_SECONDS, self._refuse, HTTPStatus.REQUEST_TIMEOUT, why)

    def _headers_are_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Send an error without calling the application, and close the connection."""
        self._headers_are_there()
        if self.transport.is_closing():
            return
        answer = problem(status, why, {"Connection": "close"})
        head = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        self.transport.write(f"HTTP/1.1 {status.value} {status.phrase}\r\n{head}\r\n".encode() + bytes(answer.body))
        self.transport.close()


class ForwardedLimit:
    """Refuse requests of a forwarded address that has `max_connections` requests in progress."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._in_flight: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = self._forwarded(scope)
        if address is None:
            await self._app(scope, receive, send)
            return
        if self._in_flight[address] >= self._settings.max_connections:
            why = "this address has too many requests in progress"
            await problem(HTTPStatus.SERVICE_UNAVAILABLE, why, {"Retry-After": str(RETRY_SECONDS)})(
                scope, receive, send
            )
            return
        self._in_flight[address] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight[address] -= 1
            if not self._in_flight[address]:
                del self._in_flight[address]

    def _forwarded(self, scope: Scope) -> str | None:
        """Return the last address before those of trusted proxies; None if the request did not come through one."""
        client = scope.get("client")
        if scope["type"] != "http" or client is None or not self._settings.trusts(client[0]):
            return None
        stated = ", ".join(Headers(scope=scope).getlist("x-forwarded-for"))
        named = [each.strip() for each in stated.split(",") if each.strip()]
        return next((each for each in reversed(named) if not self._settings.trusts(each)), None)


BODY_SECONDS = 20.0


class HeadAsGet:
    """Answer HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif message.get("more_body"):
                raise _HeadersSent  # end a stream, which would last as long as its job

        with suppress(_HeadersSent):
            scope["method"] = "GET"
            await self._app(scope, receive, head)


class _HeadersSent(Exception):
    """The answer to HEAD is complete."""


class BodyLimit:
    """Refuse a request whose body exceeds `most` bytes or does not arrive within BODY_SECONDS.

    Bodies are read completely before the application is called.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body, is_whole = await self._read(scope, receive)
        except TimeoutError:
            detail = f"the body of the request did not arrive within {BODY_SECONDS:g} s"
            await problem(HTTPStatus.REQUEST_TIMEOUT, detail, {"Connection": "close"})(scope, receive, send)
            return
        if not is_whole:
            detail = f"the body exceeds {self._most} bytes, the limit of this server"
            await problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)(scope, receive, send)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> tuple[bytes, bool]:
        """Return the body, and whether it is complete."""
        stated = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if stated.isdigit() and int(stated) > self._most:
            return b"", False
        body, more = b"", True
        while more and len(body) <= self._most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b"", True
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body, len(body) <= self._most
