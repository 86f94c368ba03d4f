"""What is dear to make and the same for all tests is made by one of pytest's processes and copied by the others."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of all pytest's processes."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """A folder of this process that `make(folder)` has filled, here or in another process, and what it returned."""
    shared = shared_folder(factory) / f"shared-{name}"
    with FileLock(f"{shared}.lock"):
        answer = shared / "answer.pickle"
        if not answer.exists():
            shared.mkdir(exist_ok=True)
            answer.write_bytes(pickle.dumps(make(shared)))
        copy = shutil.copytree(shared, factory.mktemp(name) / name)
    return copy, pickle.loads(answer.read_bytes())
