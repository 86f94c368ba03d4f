"""`evoengine ARGUMENTS…` as a documented block calls it: with few trials, and with a ledger in the current folder where
none is named."""

from __future__ import annotations

import sys

import click

from evoengine.__main__ import main
from evoengine.cli.main import evoengine

TRIALS = 2


def adapted(arguments: list[str]) -> list[str]:
    """The arguments with at most TRIALS trials, and a `--db` where the command takes one."""
    command = evoengine.get_command(click.Context(evoengine), arguments[0]) if arguments else None
    options = {option for parameter in command.params for option in parameter.opts} if command else set()
    adapted = list(arguments)
    if "--trials" in adapted:
        adapted[adapted.index("--trials") + 1] = str(TRIALS)
    elif "--trials" in options:
        adapted += ["--trials", str(TRIALS)]
    if "--db" in options and "--db" not in adapted:
        adapted += ["--db", "ledger.db"]
    return adapted


if __name__ == "__main__":
    sys.argv = ["evoengine", *adapted(sys.argv[1:])]
    main()
