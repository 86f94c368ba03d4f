"""evoengine finds the fastest correct CUDA kernel for a GPU and a problem.

    import evoengine

    result = evoengine.tune("gemm:m4096,n4096,k4096,fp16", gpu="h100", trials=40)
    evoengine.export("out")

These names are the interface for programs; the command line uses the same ones.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["EvoengineError", "Ledger", "Workload", "best", "export", "open_ledger", "register", "tune", "verify"]

_PLACES = {
    "EvoengineError": "evoengine.errors",
    "Ledger": "evoengine.ledger.store",
    "Workload": "evoengine.workloads.base",
    "best": "evoengine.tuning.best",
    "export": "evoengine.tuning.exporting",
    "open_ledger": "evoengine.ledger.store",
    "register": "evoengine.workloads",
    "tune": "evoengine.tuning.tune",
    "verify": "evoengine.tuning.verify",
}

if TYPE_CHECKING:
    from evoengine.errors import EvoengineError
    from evoengine.ledger.store import Ledger, open_ledger
    from evoengine.tuning.best import best
    from evoengine.tuning.exporting import export
    from evoengine.tuning.tune import tune
    from evoengine.tuning.verify import verify
    from evoengine.workloads import register
    from evoengine.workloads.base import Workload


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that `evoengine --help` starts at once."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
