"""KernelBench: a file with a class Model, `get_inputs` and `get_init_inputs` as a folder.

It has no kernel: the user writes one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.formats.folder import NewFolder, read_text
from evoengine.formats.naive_kernels import naive_kernel
from evoengine.formats.scripts import run_script

_RUN = '''

import torch.func as _func

_model = Model(*(get_init_inputs() if "get_init_inputs" in globals() else [])).eval()
_weights = {weights!r}


def run(*given):
    """The model's outputs; its weights come behind its inputs, so that the kernel gets the same ones."""
    inputs, weights = given[:{count}], given[{count}:]
    return _func.functional_call(_model, dict(zip(_weights, weights)), tuple(inputs))
'''


def import_model(script: Path, name: str) -> NewFolder:
    """Return the folder of a KernelBench problem. Raises UsageError if the file defines no usable model."""
    (found,) = run_script("kernelbench", script)
    tensors = [item for item in found["inputs"] if isinstance(item, dict) and "shape" in item]
    if len(tensors) < len(found["inputs"]) or not tensors:
        raise UsageError(f"{script}: get_inputs gives something that is no tensor; a kernel's inputs here are tensors")
    weights = {key.replace(".", "_"): item for key, item in found["weights"].items()}
    named = dict(zip(found["names"], tensors, strict=False))
    inputs = {key: _item(item) for key, item in {**named, **weights}.items()}
    outputs = {f"out_{i}" if i else "out": _item(item) for i, item in enumerate(found["outputs"])}
    problem: dict[str, Any] = {
        "name": name,
        "description": f"imported from {script.name}",
        "axes": {},
        "inputs": inputs,
        "outputs": outputs,
        "reference": read_text(script, "the script").rstrip()
        + _RUN.format(weights=tuple(found["weights"]), count=len(named)),
        "tolerance": {"rtol": 1e-2, "atol": 1e-2},
    }
    kernel = naive_kernel(problem)
    remarks = (
        f"a kernel: the format has none, and {name}.cu is a skeleton to write, which the gate refuses as it is",
        "sizes that can vary: the gate runs at the file's own sizes, which may take long in the emulator; name axes in "
        "problem.json",
        "the baseline ModelNew is compared with: the model itself, eager, is timed beside candidates",
    )
    return NewFolder(problem, kernel.space, kernel.text, is_template=False, remarks=remarks)


def _item(item: dict[str, Any]) -> dict[str, Any]:
    return {"shape": [str(size) for size in item["shape"]], "dtype": item["dtype"]}
