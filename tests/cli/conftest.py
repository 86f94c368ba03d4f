"""The real command line, as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = "b1,h2,s128,d32,fp16"


@pytest.fixture(scope="session")
def evoengine():
    """Calls `evoengine ARGUMENTS…` in a process of its own; gives the finished process."""

    def call(*arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None):
        command = [sys.executable, "-m", "evoengine", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=600, cwd=cwd, env={**os.environ, **(env or {})}
        )

    return call


@pytest.fixture(scope="session")
def searched(evoengine, tmp_path_factory):
    """A folder with the ledger of one small search, and that search's finished process."""
    folder = tmp_path_factory.mktemp("searched")
    arguments = ("--problem", SMALL, "--trials", 8, "--seed", 3, "--jobs", 2, "--db", folder / "evo.db")
    return folder, evoengine("search", *arguments, "--device", "emulator")
