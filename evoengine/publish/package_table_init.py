"""Tuned CUDA kernels, one for each of several problems. README.md beside this file lists them with their times.

KERNELS has the function of each problem; help() of one lists its tensors. TABLE is the content of table.json, and
evoengine.torch.use(FOLDER) calls the kernels for sizes in between, too. The import fails if a file does not
match SHA256SUMS.
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


def _load(folder):
    described = json.loads((folder / "kernel.json").read_text("utf-8"))
    name = described["module"]
    spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, described["kernel"].replace("-", "_"))


_check()
TABLE = json.loads((FOLDER / "table.json").read_text("utf-8"))
KERNELS = {entry["problem"]: _load(FOLDER / entry["folder"]) for entry in TABLE["entries"]}
__all__ = ["FOLDER", "KERNELS", "TABLE"]
