"""The service as an ASGI application with metrics for Prometheus, and the server that runs it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from http import HTTPStatus
from types import FrameType
from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evoengine import __version__
from evoengine.devices.driver import find_driver
from evoengine.errors import EvoengineError, MachineError, UsageError
from evoengine.ledger.database import make_engine
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.service import api, page
from evoengine.service.access import Authenticate, State, Tokens, require, state_of
from evoengine.service.answers import Answers, Reports
from evoengine.service.executors import Dispatcher, Executors, slots_here
from evoengine.service.jobs import Jobs
from evoengine.service.limits import (
    KEEP_ALIVE_SECONDS,
    QUICK,
    BodyLimit,
    Connections,
    ForwardedLimit,
    HeadAsGet,
    Threads,
)
from evoengine.service.requests import RESPONSES, answer_errors, problem
from evoengine.service.settings import Settings
from evoengine.stages.toolchain import compiler_version
from evoengine.tuning.ray_cluster import connected, require_fit, survey
from evoengine.tuning.setup import register_kernel
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

    The caller closes the ledger after the application has ended.
    """
    apart, quick = Ledger(ledger.database.url, make_engine(ledger.database.url)), Threads(QUICK)
    jobs, reports = Jobs(ledger), Reports(apart)
    state = State(settings, ledger, jobs, Tokens(apart), Answers(apart), executors, dispatches, reports, quick)

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
    """Prometheus metrics of this server; job states are those of the whole database."""

    def __init__(self, state: State) -> None:
        self._state, self.registry = state, CollectorRegistry()
        labels = ("method", "route", "status")
        self._requests = Counter("evoengine_requests", "requests answered", labels, registry=self.registry)
        self._seconds = Histogram(
            "evoengine_request_seconds", "seconds until the response started", ("route",), registry=self.registry
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
        self._executors.set(sum(each["alive"] for each in self._state.executors.known()))
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
        except EvoengineError:  # anybody may ask this, so no detail is given
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "the database cannot be used")
        if not state.dispatches():
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "the dispatcher, which runs jobs, has stopped or is stuck")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics(request: Request, _: Annotated[int, Depends(require("read"))]) -> Response:
        """Return the metrics for Prometheus."""
        return Response(await state_of(request).quick.run(collector.text), media_type=CONTENT_TYPE_LATEST)


class MetricsMiddleware:
    """Count every request, and add HEADERS to responses that do not set them."""

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


# ── the server: the application on a port, and the dispatcher that runs jobs ─────────────────────────────────────────

LAST_ANSWERS_SECONDS = 3
"""for requests in progress at shutdown; event streams end at once, and clients reconnect"""

Say = Callable[[str], None]


class Server(uvicorn.Server):
    """Calls `on_exit` on a signal, before it waits for the requests in progress."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_exit()
        super().handle_exit(sig, frame)


def serve(settings: Settings, db: str | None, say: Say) -> None:
    """Serve until SIGTERM or Ctrl-C, then return running jobs. Raises UsageError, MachineError."""
    with ExitStack() as ending:
        ledger = ending.enter_context(open_ledger(db, create=True))
        listening = ending.enter_context(listen(settings))
        prepare(settings, ledger)
        dispatcher = Dispatcher(ledger, slots_here(settings), settings.takeover_seconds, say)
        app = make_app(settings, ledger, dispatcher.executors, lambda: dispatcher.works)
        config = configured(app, settings)

        def stop() -> None:
            app.state.service.stopping.set()
            dispatcher.begin_stop()

        say(f"evoengine serves {address(settings, listening)} · ledger {ledger.place}")
        dispatcher.start()
        ending.callback(dispatcher.stop)
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn raises the signal again when it has ended, while jobs are being returned
            signal.signal(number, lambda *_: None)
        Server(config, stop).run([listening])


def configured(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connections(settings).protocol(),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
    )


def listen(settings: Settings) -> socket.socket:
    """Return the listening socket. Raises UsageError if the address is unavailable."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host name is invalid
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number and number > 0 else error
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {why}; choose another with --host and --port"
        ) from error


def address(settings: Settings, listening: socket.socket) -> str:
    port = listening.getsockname()[1]
    return f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{port}"


def prepare(settings: Settings, ledger: Ledger) -> None:
    """Register the operator's kernels.

    Raises UsageError for an invalid one, and if tokens are required and there is none.
    """
    for folder in settings.kernel_folders.values():
        register_kernel(folder)
    _ = settings.recorded_files
    if settings.tokens_required and not Tokens(ledger).all():
        raise UsageError(
            "this server requires tokens, and there is none: evoengine token new NAME --scope submit creates one"
        )


def check(settings: Settings, db: str | None) -> Iterator[str]:
    """Yield a line for each check that passes. Raises UsageError or MachineError at the first that fails."""
    with open_ledger(db, create=True) as ledger:
        yield f"ledger    {ledger.place}"
        prepare(settings, ledger)
        needed = "every request" if settings.tokens_required else "requests through a proxy"
        yield f"tokens    {len(Tokens(ledger).all())}, required for {needed}"
    with listen(settings) as listening:
        yield f"address   {address(settings, listening)} is free"
    slots = slots_here(settings)
    if settings.cluster:
        yield f"cluster   {_nodes_of(settings.cluster)}, GPUs: {', '.join(settings.cluster_gpus) or 'none'}"
    for slot in slots:
        if slot.device:
            yield f"GPU       {slot.device.name}, for {', '.join(slot.gpus) or 'none that evoengine knows'}"
    if not settings.cluster and not any(slot.device for slot in slots):
        found = find_driver()
        yield f"GPU       none: {found}" if isinstance(found, str) else "GPU       none"
    yield f"{'jobs' if settings.cluster else 'CPU':<10}{settings.cpu_jobs} at once"
    for name, known in (("kernels", settings.kernel_folders), ("recorded", settings.recorded_files)):
        if known:
            yield f"{name:<10}{', '.join(known)}"
    if slots:
        yield f"compiler  {_compiler()}"


def _nodes_of(cluster: str) -> str:
    with connected(cluster):
        nodes = survey()
        require_fit(nodes)
    return f"{cluster}, {len(nodes)} nodes with {sum(node.cpus for node in nodes)} CPUs"


def _compiler() -> str:
    try:
        return compiler_version()
    except MachineError as error:
        return f"none: {error}"
