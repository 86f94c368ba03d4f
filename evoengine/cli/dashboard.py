"""evoengine dashboard"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIServer, make_server

import click

from evoengine.cli.options import db_option, reading
from evoengine.cli.output import say
from evoengine.errors import UsageError, hint
from evoengine.text import hide_passwords

HOST = "127.0.0.1"


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread per request, because a page's first request may be its slowest."""

    daemon_threads = True


class LogOnce(logging.Handler):
    """Print each warning of optuna-dashboard once and in one line; it logs a traceback at every request."""

    def __init__(self, say: Callable[[str], None], remedy: str) -> None:
        super().__init__(logging.WARNING)
        self._say, self._remedy = say, remedy
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        raised = record.exc_info[1] if record.exc_info else None
        line = str(raised or record.getMessage()).strip().partition("\n")[0]
        if record.levelno >= logging.ERROR:
            line = f"a study cannot be shown: {line.removeprefix('Exception: ')}; {self._remedy}"
        if line not in self._said:
            self._said.add(line)
            self._say(line)


@click.command()
@db_option
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True, help="Port to serve on.")
def dashboard(db: str | None, port: int) -> None:
    """Serve the trials in optuna-dashboard on this machine until Ctrl-C.

    The dashboard draws all trials of a study at once, so a run of more than 1,000 trials gets a second study, its
    summary: the fastest trials, their ancestors, and a sample of the others.
    """
    from optuna_dashboard import wsgi

    from evoengine.ledger.optuna.study import PROJECTING, artifact_store, optuna_storage, summarise_large_studies

    with reading(db) as ledger:
        _require_free(port)
        url = ledger.url
        storage, store = optuna_storage(url), artifact_store(url)
        try:
            for name in summarise_large_studies(storage, ledger):
                say(f"summary of a large study: {name}")
        except PROJECTING as error:
            say(f"large studies could not be summarised: {type(error).__name__}: {error}")
    say(f"http://{HOST}:{port}/dashboard   (the same as: optuna-dashboard {hide_passwords(url)})")
    remedy = f"{hint('db', 'rebuild-study', 'RUN', db=db)} rebuilds a run's study"
    logger = logging.getLogger("optuna_dashboard")
    logger.addHandler(LogOnce(say, remedy))
    logger.propagate = False
    with (
        make_server(HOST, port, wsgi(storage, artifact_store=store), server_class=_Server) as server,
        suppress(KeyboardInterrupt),
    ):
        server.serve_forever()


def _require_free(port: int) -> None:
    """Raise UsageError if the port is not available."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise UsageError(f"cannot listen on port {port}: {why}; choose another with --port") from error
