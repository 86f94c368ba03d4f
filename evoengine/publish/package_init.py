"""A tuned CUDA kernel. README.md beside this file says what it computes, for which GPU, and how it was verified.

The function has the name of the kernel (with _ for -), help() of it lists its tensors; KERNEL is the content of
kernel.json, with the verdicts of the gate and the figure. The import fails if a file does not match SHA256SUMS.
"""

import hashlib
import importlib.util
import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def _check():
    for line in (FOLDER / "SHA256SUMS").read_text("ascii").splitlines():
        digest, _, name = line.partition("  ")
        if hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() != digest:
            raise ImportError(f"{FOLDER / name} is not the file that was packaged; install the package again")


def _load():
    name = KERNEL["module"]
    spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, NAME)


_check()
KERNEL = json.loads((FOLDER / "kernel.json").read_text("utf-8"))
NAME = KERNEL["kernel"].replace("-", "_")
globals()[NAME] = _load()
__all__ = ["KERNEL", NAME]
