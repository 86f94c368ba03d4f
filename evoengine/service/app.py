"""The service as an application: routes, limits, headers and figures for Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evoengine import __version__
from evoengine.errors import EvoengineError
from evoengine.ledger.database import make_engine
from evoengine.ledger.store import Ledger
from evoengine.service import api, page
from evoengine.service.access import Authenticate, Tokens, require
from evoengine.service.answers import Answers, Reports
from evoengine.service.errors import RESPONSES, answer_errors, problem
from evoengine.service.executors import Executors
from evoengine.service.jobs import Jobs
from evoengine.service.limits import QUICK, BodyLimit, ForwardedLimit, HeadAsGet, Threads
from evoengine.service.settings import Settings
from evoengine.service.state import State, state_of
from evoengine.views.service import HealthView

HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)


def make_app(
    settings: Settings, ledger: Ledger, executors: Executors, dispatches: Callable[[], bool] = lambda: True
) -> FastAPI:
    """Return an application that serves the ledger; it is ready while `dispatches` returns true.

    Close the ledger when it has ended.
    """
    apart, quick = Ledger(ledger.database.url, make_engine(ledger.database.url)), Threads(QUICK)
    state = State(
        settings,
        ledger,
        Jobs(ledger),
        Tokens(apart),
        Answers(apart),
        executors,
        dispatches,
        Reports(apart),
        quick,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        state.stopping.set()
        apart.close()

    app = FastAPI(
        title="evoengine",
        version=__version__,
        lifespan=lifespan,
        responses=RESPONSES,
        docs_url=None,
        redoc_url=None,
        description="Ask for a kernel, get the best one known; better ones follow.",
    )
    app.state.service = state
    answer_errors(app)
    for router in (*api.ROUTERS, page.router):
        app.include_router(router)
    metrics = Metrics(state)
    _add_health(app, metrics, Jobs(apart))
    app.add_middleware(BodyLimit, most=settings.max_body)
    app.add_middleware(Authenticate, state=state)
    app.add_middleware(HeadAsGet)
    app.add_middleware(ForwardedLimit, settings=settings)
    app.add_middleware(MetricsMiddleware, metrics=metrics)
    return app


class Metrics:
    """For Prometheus, of this server; the states of jobs are those of the whole database."""

    def __init__(self, state: State) -> None:
        self._state, self.registry = state, CollectorRegistry()
        labels = ("method", "route", "status")
        self._requests = Counter("evoengine_requests", "requests answered", labels, registry=self.registry)
        self._seconds = Histogram(
            "evoengine_request_seconds", "until an answer began", ("route",), registry=self.registry
        )
        self._jobs = Gauge("evoengine_jobs", "jobs by state", ("state",), registry=self.registry)
        self._executors = Gauge("evoengine_executors", "servers that run jobs and are up", registry=self.registry)
        self._streams = Gauge("evoengine_waiting_requests", "requests that wait for jobs", registry=self.registry)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        for name, number in self._state.jobs.counts().items():
            self._jobs.labels(name).set(number)
        self._executors.set(sum(each.alive for each in self._state.executors.known()))
        self._streams.set(self._state.streams)
        return generate_latest(self.registry)


def _add_health(app: FastAPI, collector: Metrics, jobs: Jobs) -> None:
    """Add the health endpoints. `jobs` uses database connections that nothing else can exhaust."""

    @app.get("/livez", tags=["health"])
    async def livez() -> HealthView:
        """Answer as long as the process is alive."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"], response_model=HealthView)
    async def readyz(request: Request) -> JSONResponse:
        """Answer whether the server can use its database and runs the jobs that it claims."""
        state = state_of(request)
        if state.stopping.is_set():
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "the server is being shut down")
        try:
            await state.quick.run(jobs.counts)
        except EvoengineError:  # whoever may ask this is told no more
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "the database cannot be used")
        if not state.dispatches():
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "the dispatcher, which runs jobs, has stopped or is stuck")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics(request: Request, _: Annotated[int, Depends(require("read"))]) -> Response:
        """Return the metrics for Prometheus."""
        return Response(await state_of(request).quick.run(collector.text), media_type=CONTENT_TYPE_LATEST)


class MetricsMiddleware:
    """Counts every request, and gives every answer the headers that browsers ask for, where it has none of its own."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.count(scope["method"], route, message["status"], time.perf_counter() - began)
                own = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(h for h in HEADERS if h[0] not in own)]
            await send(message)

        await self._app(scope, receive, watched)
