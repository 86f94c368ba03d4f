"""evoengine dashboard"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIServer, make_server

import click

from evoengine.cli.options import db_option
from evoengine.errors import UsageError

HOST = "127.0.0.1"


class _Server(ThreadingMixIn, WSGIServer):
    """A page asks for several things at once, and the one that takes longest may be the first."""

    daemon_threads = True


@click.command()
@db_option
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True, help="Port to serve on.")
def dashboard(db: str | None, port: int) -> None:
    """Serve the trials in optuna-dashboard on this machine until Ctrl-C."""
    from evoengine.cli.display import say
    from evoengine.cli.ledger import reading
    from evoengine.hints import hint
    from evoengine.ledger.dashboard_app import Complaints, dashboard_app
    from evoengine.ledger.dashboard_storage import DashboardStorage
    from evoengine.ledger.study import artifact_store, optuna_storage
    from evoengine.passwords import hide_passwords

    with reading(db) as ledger:
        url = ledger.url
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise UsageError(f"--port {port} cannot be listened on: {why}; give one that is free") from error
    say(f"http://{HOST}:{port}/dashboard   (the same as: optuna-dashboard {hide_passwords(url)})")
    remedy = f"{hint('db', 'rebuild-study', 'RUN', db=db)} makes a run's study again"
    logger = logging.getLogger("optuna_dashboard")
    logger.addHandler(Complaints(say, remedy))
    logger.propagate = False
    app = dashboard_app(optuna_storage(url, DashboardStorage), artifact_store(url))
    with make_server(HOST, port, app, server_class=_Server) as server, suppress(KeyboardInterrupt):
        server.serve_forever()
