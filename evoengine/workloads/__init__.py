"""What can be tuned. A workload is two modules: NAME.py knows costs and gate cases of one kernel, NAME_torch.py its
tensors. Two more know its cases at full size: NAME_full.py and NAME_full_torch.py.

The engine asks for them by the name that a search space states as its `kernel`, and knows nothing else about it. They
are apart so that a search's own process need not import torch; only those that run candidates do.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from evoengine.errors import UsageError

NAMES = ("attention",)


def find_workload(name: str) -> ModuleType:
    if name not in NAMES:
        raise UsageError(f"the search space names the kernel {name!r}; known kernels are {', '.join(NAMES)}")
    return import_module(f"evoengine.workloads.{name}")


def find_tensors(name: str) -> ModuleType:
    """The tensor half of a workload; imports torch."""
    return import_module(f"{find_workload(name).__name__}_torch")


def find_full(name: str) -> ModuleType:
    """The cases at full size of a workload."""
    return import_module(f"{find_workload(name).__name__}_full")


def find_full_tensors(name: str) -> ModuleType:
    """The tensor half of those; imports torch."""
    return import_module(f"{find_workload(name).__name__}_full_torch")
