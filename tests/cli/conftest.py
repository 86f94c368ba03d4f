"""The real command line, as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evoengine.workloads import default_workload
from tests.support.command_server import SECONDS, CommandServer
from tests.support.made_once import made_once, shared_folder

SMALL = "b1,h2,s128,d32,fp16"
TRIALS = 4
"""of the search that many tests look at: a start point of each family"""


@pytest.fixture(scope="session")
def evoengine(tmp_path_factory):
    """Calls `evoengine ARGUMENTS…` in a process of its own; gives the finished process."""
    shared = shared_folder(tmp_path_factory) / "command-server"
    shared.mkdir(exist_ok=True)
    problems = (default_workload().example, SMALL)
    server = CommandServer(tmp_path_factory.mktemp("commands"), shared, problems)

    def call(*arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None):
        said, own = list(map(str, arguments)), {**os.environ, **(env or {})}
        if "PYTHONPATH" in (env or {}):  # other modules than those that the server has imported
            command = [sys.executable, "-m", "evoengine", *said]
            return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=cwd, env=own)
        return server.call(said, cwd or Path.cwd(), own)

    yield call
    server.close()


@pytest.fixture(scope="session")
def searched(evoengine, tmp_path_factory):
    """A folder with the ledger of one small search, and that search's finished process."""

    def search(folder: Path):
        arguments = ("--problem", SMALL, "--trials", TRIALS, "--seed", 3, "--jobs", 2, "--db", folder / "evo.db")
        return evoengine("search", *arguments, "--device", "emulator")

    return made_once(tmp_path_factory, "searched", search)
