from __future__ import annotations

import pytest

from evoengine.stages import compile as stage


@pytest.fixture(autouse=True)
def undisassembled(monkeypatch):
    """Most tests here compile and look at no instruction; taking the binary apart costs more than the compiler."""
    monkeypatch.setattr(stage, "disassembler", lambda: None)
