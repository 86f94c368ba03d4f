"""`evoengine ARGUMENTS…` as a documented block calls it: with few trials, and with a ledger in the current folder where
none is named."""

from __future__ import annotations

import sys

import click

from evoengine.__main__ import main
from evoengine.cli.main import evoengine

TRIALS = 2


def called(words: list[str]) -> click.Command | None:
    """The command, or the one below it that the second word names; None where there is none of that name."""
    context = click.Context(evoengine)
    command = evoengine.get_command(context, words[0]) if words else None
    if isinstance(command, click.Group) and len(words) > 1:
        return command.get_command(context, words[1]) or command
    return command


def adapted(arguments: list[str]) -> list[str]:
    """Return the arguments with at most TRIALS trials, and with a `--db` if the command takes one."""
    command = called(arguments)
    options = {option for parameter in command.params for option in parameter.opts} if command else set()
    adapted = list(arguments)
    if "--trials" in adapted:
        adapted[adapted.index("--trials") + 1] = str(TRIALS)
    elif "--trials" in options:
        adapted += ["--trials", str(TRIALS)]
    if "--db" in options and not {"--db", "--record"} & set(adapted):
        adapted += ["--db", "ledger.db"]
    return adapted


if __name__ == "__main__":
    sys.argv = ["evoengine", *adapted(sys.argv[1:])]
    main()
