"""`--server`: the same commands against a service, in place of this machine's ledger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoengine.errors import MachineError, UsageError

if TYPE_CHECKING:
    from evoengine.service.client import Client

TOKEN_VARIABLE, FILE_VARIABLE = "EVOENGINE_TOKEN", "EVOENGINE_TOKEN_FILE"
_LONGEST = 4096

server_option = click.option(
    "--server", metavar="URL",
    help="Ask a service (evoengine serve) in place of this machine; EVOENGINE_TOKEN, or a file that "
    "EVOENGINE_TOKEN_FILE names, holds its token.",
)  # fmt: skip


def connect(url: str) -> Client:
    """Raises UsageError, and MachineError where the client's library is missing."""
    try:
        from evoengine.service.client import Client
    except ModuleNotFoundError as error:
        raise MachineError(f"--server needs {error.name}: pip install evoengine[client]") from error
    return Client(url, stated_token())


def stated_token() -> str | None:
    """Raises UsageError where the environment names two, or a file without one."""
    token, file = os.environ.get(TOKEN_VARIABLE), os.environ.get(FILE_VARIABLE)
    if token and file:
        raise UsageError(f"both {TOKEN_VARIABLE} and {FILE_VARIABLE} are set; keep one")
    if file:
        try:
            token = Path(file).read_text("utf-8")[:_LONGEST].strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"{FILE_VARIABLE} names {file}, which cannot be read: {why}") from error
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise UsageError("the token holds characters that no token has; evoengine token new prints one line, evo_…")
    return token or None


def refuse_beside(server: str, **options: object) -> None:
    """Raises UsageError for options that mean something on this machine alone."""
    for name, value in options.items():
        if value not in (None, False, ()):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is about this machine, and --server {server} asks another; leave one of them out")
