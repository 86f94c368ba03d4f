"""A server: the application on a port, with the dispatcher that runs jobs, and whether one could start here."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType

import uvicorn
from fastapi import FastAPI

from evoengine.devices.driver import find_driver
from evoengine.errors import MachineError, UsageError
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.service.access import Tokens
from evoengine.service.app import make_app
from evoengine.service.executors import Dispatcher, slots_here
from evoengine.service.limits import KEEP_ALIVE_SECONDS, Connections
from evoengine.service.settings import Settings
from evoengine.stages.toolchain import compiler_version
from evoengine.tuning.ray_cluster import connected, require_fit, survey
from evoengine.tuning.setup import register_kernel

LAST_ANSWERS_SECONDS = 3
"""for requests in progress when it is told to stop; streams end at once, and clients ask again"""

Say = Callable[[str], None]


class Server(uvicorn.Server):
    """Calls `on_exit` when it is told to stop, before it waits for the requests in progress."""

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
            signal.signal(
                number, lambda *_: None
            )  # uvicorn raises it again when it has ended, and jobs are given back then
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
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number and number > 0 else error
        raise UsageError(
            f"{settings.host} port {settings.port} cannot be listened on: {why}; --host and --port name another"
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
            "requests need a token here, and there is none: evoengine token new NAME --scope submit makes one"
        )


def check(settings: Settings, db: str | None) -> Iterator[str]:
    """Yield a line for each thing that is in order. Raises UsageError or MachineError at the first that is not."""
    with open_ledger(db, create=True) as ledger:
        yield f"ledger    {ledger.place}"
        prepare(settings, ledger)
        asked = "every request" if settings.tokens_required else "requests that come through a proxy"
        yield f"tokens    {len(Tokens(ledger).all())}, asked for of {asked}"
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
