"""evoengine dashboard"""

from __future__ import annotations

import os
import socket

import click

from evoengine.cli.options import db_option
from evoengine.errors import UsageError

HOST = "127.0.0.1"


@click.command()
@db_option
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True, help="Port to serve on.")
def dashboard(db: str | None, port: int) -> None:
    """Open the trials in optuna-dashboard, on this machine, until Ctrl-C."""
    from optuna_dashboard import run_server

    from evoengine.cli.display import say
    from evoengine.cli.ledger import reading
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
    run_server(optuna_storage(url, DashboardStorage), host=HOST, port=port, artifact_store=artifact_store(url))
