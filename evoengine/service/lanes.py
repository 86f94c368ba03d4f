"""Requests of a kind run a few at a time, so that no kind takes all threads and connections to the database.

What everybody needs at once, health and the best kernel, is in none of these lanes: it has threads and a connection of
its own (`State.quick`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from starlette.exceptions import HTTPException

from evoengine.service.errors import RETRY_SECONDS

LANES = {"jobs": (4, 100), "results": (4, 60), "pages": (3, 40)}
"""kind → how many run at once, and how many may wait; with POLLS no more than SQLAlchemy opens connections"""
POLLS = 3
"""of streams, at once"""
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
            raise busy("too many requests of this kind wait")
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
    """Runs functions in at most so many threads, which nothing else uses."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._limiter: anyio.CapacityLimiter | None = None

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        if self._limiter is None:  # it belongs to an event loop
            self._limiter = anyio.CapacityLimiter(self._at_once)
        return anyio.to_thread.run_sync(partial(function, *args, **kwargs), limiter=self._limiter)
