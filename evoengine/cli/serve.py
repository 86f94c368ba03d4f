"""evoengine serve"""

from __future__ import annotations

import click

from evoengine.cli.options import db_option
from evoengine.errors import MachineError


@click.command()
@click.option("--host", metavar="ADDRESS", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on.  [default: 8765]")
@click.option(
    "--trusted-proxy", metavar="ADDRESSES",
    help="Proxies that say who asks, as in 127.0.0.1,10.0.0.0/8: connections are counted by X-Forwarded-For.",
)  # fmt: skip
@click.option("--check", is_flag=True, help="Say whether the server could start, and what it would run jobs on.")
@db_option
def serve(host: str | None, port: int | None, trusted_proxy: str | None, check: bool, db: str | None) -> None:
    """Serve the ledger over HTTP, and run the searches that are asked for, until SIGTERM or Ctrl-C.

    Without a token only programs of this machine may ask; on any other address than loopback everybody needs one
    (evoengine token). Several servers on one PostgreSQL share the jobs. docs/service.md has the settings.
    """
    from evoengine.cli.display import say

    try:
        from evoengine.service.server import serve as run
        from evoengine.service.settings import load_settings
    except ModuleNotFoundError as error:
        raise MachineError(f"the service needs {error.name}: pip install evoengine[service]") from error

    settings = load_settings(host=host, port=port, trusted_proxy=trusted_proxy)
    if check:
        from evoengine.service.check import check as checked

        for line in checked(settings, db):
            say(line)
        return
    run(settings, db, say)
