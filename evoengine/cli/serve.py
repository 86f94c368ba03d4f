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
    help="Proxies whose X-Forwarded-For header names the client, as in 127.0.0.1,10.0.0.0/8.",
)  # fmt: skip
@click.option(
    "--check", is_flag=True, help="Check whether the server can start and where it would run jobs, then exit."
)
@db_option
def serve(host: str | None, port: int | None, trusted_proxy: str | None, check: bool, db: str | None) -> None:
    """Serve the ledger over HTTP and run the searches that clients submit, until SIGTERM or Ctrl-C.

    On the loopback address no token is needed; on any other address every client needs one (evoengine token). Servers
    that share a PostgreSQL database share the jobs. docs/service.md describes the settings.
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
