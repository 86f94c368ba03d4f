"""A server: the application on a port, and beside it the dispatcher that runs jobs."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import uvicorn
from fastapi import FastAPI

from evoengine.errors import UsageError
from evoengine.service.app import make_app
from evoengine.service.connections import KEEP_ALIVE_SECONDS, Connections
from evoengine.service.database import Database, open_service
from evoengine.service.dispatcher import Dispatcher
from evoengine.service.executors import slots_here
from evoengine.service.settings import Settings
from evoengine.service.tokens import Tokens
from evoengine.tuning.setup import register_kernel

LAST_ANSWERS_SECONDS = 3
"""for requests under way when it is told to stop; streams end at once, and clients ask again"""

Say = Callable[[str], None]


class Server(uvicorn.Server):
    """Calls `on_exit` when it is told to stop, before it waits for the requests under way."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_exit()
        super().handle_exit(sig, frame)


def serve(settings: Settings, db: str | None, say: Say) -> None:
    """Serve until SIGTERM or Ctrl-C, then return running jobs. Raises UsageError, MachineError."""
    with ExitStack() as ending:
        database = ending.enter_context(open_service(db, create=True))
        listening = ending.enter_context(listen(settings))
        prepare(settings, database)
        dispatcher = Dispatcher(database, slots_here(settings), settings.takeover_seconds, say)
        app = make_app(settings, database, dispatcher.executors, lambda: dispatcher.works)
        config = configured(app, settings)

        def stop() -> None:
            app.state.service.stopping.set()
            dispatcher.begin_stop()

        say(f"evoengine serves {address(settings, listening)} · ledger {database.place}")
        dispatcher.start()
        ending.callback(dispatcher.stop)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(
                number, lambda *_: None
            )  # uvicorn raises it again when it has ended, and jobs are given back then
        Server(config, stop).run([listening])


def configured(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=Connections(settings).protocol(), ws="none", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
    )  # fmt: skip


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


def prepare(settings: Settings, database: Database) -> None:
    """Register the operator's kernels. Raises UsageError for an invalid one, and if tokens are required and there is
    none."""
    for folder in settings.kernel_folders.values():
        register_kernel(folder)
    _ = settings.recorded_files
    if settings.tokens_required and not Tokens(database).all():
        raise UsageError(
            "requests need a token here, and there is none: evoengine token new NAME --scope submit makes one"
        )
