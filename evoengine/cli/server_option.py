"""`--server`: the same commands against a service, in place of this machine's ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from evoengine.errors import MachineError, UsageError

if TYPE_CHECKING:
    from evoengine.service.client import Client

server_option = click.option(
    "--server", metavar="URL",
    help="Send the request to this service (evoengine serve); EVOENGINE_TOKEN, or a file that "
    "EVOENGINE_TOKEN_FILE names, holds its token.",
)  # fmt: skip


def connect(url: str) -> Client:
    """Return a client of the service. Raises UsageError for an invalid URL, and MachineError if a package is
    missing."""
    try:
        from evoengine.service.client import Client
    except ModuleNotFoundError as error:
        raise MachineError(f"--server needs {error.name}: pip install evoengine[client]") from error
    return Client(url)


def refuse_beside(server: str, **options: object) -> None:
    """Raise UsageError for options that apply only to this machine."""
    for name, value in options.items():
        if value not in (None, False, ()):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is about this machine, and --server {server} asks another; leave one of them out")
