"""Stand-ins of FlashAttention and FlashInfer, installed for a test."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent / "libraries"
NAMES = ("flash_attn", "flash_attn_interface", "flashinfer", "standing_in")


@contextmanager
def libraries(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    importlib.invalidate_caches()
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in NAMES]:
        del sys.modules[name]
