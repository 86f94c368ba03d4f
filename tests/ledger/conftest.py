"""Ledgers for the tests: one empty file is made once and copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evoengine.ledger.store import Ledger, open_ledger


@pytest.fixture(scope="session")
def empty_ledger_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "empty.db"
    open_ledger(str(path), create=True).close()
    return path


@pytest.fixture
def new_file(empty_ledger_file: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies an empty ledger to a file of that name."""
    return lambda name: Path(shutil.copyfile(empty_ledger_file, tmp_path / name))


@pytest.fixture
def ledger(new_file: Callable[[str], Path]) -> Iterator[Ledger]:
    with open_ledger(str(new_file("ledger.db")), create=False) as ledger:
        yield ledger
