"""Import a KernelBench file, which has a class Model, `get_inputs` and `get_init_inputs`, as a folder.

The format has no kernel. Sizes that the module names become axes, the model is the reference, and its weights are
inputs. A naive kernel is written from its operations if all of them are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.formats.folder import NewFolder, read_text, run_script, space_text
from evoengine.formats.naive_graph import NoKernel, graph_kernel, multiplications
from evoengine.formats.naive_kernels import NaiveKernel, parameters, skeleton
from evoengine.space.expression import Expression

_RUN = '''

import torch.func as _func

_weights, _places, _follow, _models = {weights!r}, {places!r}, {follow!r}, {{}}


def _model_for(given):
    """The model at the sizes of the inputs, which are those of the module's own names."""
    sizes = {{name: given[i].shape[axis] for name, (i, axis) in _places.items()}}
    if (key := tuple(sizes.values())) not in _models:
        sizes |= {{name: sizes[leader] for name, leader in _follow.items()}}
        for name, value in [*globals().items()]:
            if name in sizes:
                globals()[name] = sizes[name]
            elif isinstance(value, tuple):
                globals()[name] = tuple(sizes.get(f"{{name}}_{{i}}", v) for i, v in enumerate(value))
        _models.clear()
        _models[key] = Model(*(get_init_inputs() if "get_init_inputs" in globals() else [])).eval()
    return _models[key]


def run(*given):
    """The model's outputs; its weights come behind its inputs, so that the kernel gets the same ones."""
    inputs, weights = given[:{count}], given[{count}:]
    return _func.functional_call(_model_for(given), dict(zip(_weights, weights)), tuple(inputs))
'''
ROUNDINGS = 8192
"""spacings of float32: a thousandth of the largest value, as KernelBench allows for products in TF32"""
MOST_ELEMENTS, MOST_STEPS, MOST_OF_THREAD = 1 << 20, 1 << 22, 1 << 12
"""limits: elements of all tensors of the example, steps of all loops of its naive kernel, and steps of one thread"""
LEAST_SIZES = (32, 8, 2)
"""sizes to which axes are halved; a smaller one is used only after all axes have reached the previous one"""
_POSITIVE = {"type": "uniform", "low": 0.0625, "high": 1.0}


def import_model(script: Path, name: str) -> NewFolder:
    """Return the folder of a KernelBench problem. Raises UsageError if the file defines no usable model."""
    (found,) = run_script("kernelbench", script)
    sizes, given, weights = (found[key] for key in ("sizes", "inputs", "weights"))
    if not any("shape" in item for item in given):
        raise UsageError(f"{script}: get_inputs gives no tensor")
    named = {_unlike(key, sizes): item for key, item in zip(found["names"], given, strict=True)}
    named |= {_unlike(key.replace(".", "_"), sizes): item for key, item in weights.items()}
    inputs = {key: _item(item) for key, item in named.items()}
    outputs = {f"out_{i}" if i else "out": _item(item) for i, item in enumerate(found["outputs"])}
    problem: dict[str, Any] = {
        "name": name,
        "description": f"imported from {script.name}",
        "axes": {size: {"type": "var"} for size in sizes},
        "inputs": inputs,
        "outputs": outputs,
        "reference": read_text(script, "the script").rstrip()
        + _RUN.format(weights=tuple(weights), count=len(given), places=_places(sizes, inputs), follow=found["follow"]),
        "tolerance": {"roundings": ROUNDINGS},
    }
    kernel, steps, why = _kernel(problem, found, named)
    problem |= {"constraints": [f"{size} >= {least}" for size, least in found["least"].items()]}
    if kernel.flops:
        problem["flops"] = kernel.flops
    shapes = [item["shape"] for item in (*found["outputs"], *named.values()) if "shape" in item]
    example = _affordable(sizes, found["least"], shapes, steps)
    draws = {key: draw for key, draw in zip(inputs, found["draws"], strict=False) if draw}
    draws |= {key: {"type": "scalar", "value": item["value"]} for key, item in named.items() if "value" in item}
    # statistics of a normalisation, one of which is a variance
    draws |= {_unlike(key.replace(".", "_"), sizes): _POSITIVE for key in weights if "running_" in key}
    if sizes or draws:
        problem["workloads"] = [{"axes": example, "inputs": draws}]
    remarks = (
        *((f"a kernel: {name}.cu is a skeleton to write, which the gate refuses as it is, as {why}",) * bool(why)),
        *(("sizes that can vary: no name of the module is one",) * (not sizes)),
        *(
            (f"the file's own sizes as the example, which the gate could not afford: {_problem(name, sizes)}",)
            * (example != sizes)
        ),
        "the baseline ModelNew is compared with: the model itself, eager, is timed beside candidates",
    )
    return NewFolder(problem, kernel.space, kernel.text, is_template=False, remarks=remarks)


def _problem(name: str, sizes: Mapping[str, int]) -> str:
    return f"--problem {name}:" + ",".join(f"{size}={value}" for size, value in sizes.items())


def _affordable(
    sizes: Mapping[str, int], least: Mapping[str, int], shapes: Sequence[Sequence[Any]], steps: str
) -> dict[str, int]:
    """Return the sizes with the largest halved until tensors have few elements and loops few steps.

    The first of the shapes is that of the output, each element of which takes so many steps.
    """
    found = dict(sizes)
    parsed = [[Expression.parse(_size(size), "the trace") for size in shape] for shape in shapes]
    of_thread = Expression.parse(steps, "the trace")

    def is_small() -> bool:
        elements = [prod(int(size.evaluate(found)) for size in shape) for shape in parsed]
        each = int(of_thread.evaluate(found))
        return sum(elements) <= MOST_ELEMENTS and each <= MOST_OF_THREAD and elements[0] * each <= MOST_STEPS

    for floor in LEAST_SIZES:
        while not is_small():
            left = {name: size for name, size in found.items() if size // 2 >= max(floor, least.get(name, 1))}
            if not left:
                break
            found[max(left, key=lambda name: left[name])] //= 2
    return found


def _unlike(name: str, sizes: Mapping[str, int]) -> str:
    """Return a variant of the name that is not one of the sizes'."""
    return f"{name}_in" if name in sizes or name.startswith("out") else name


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    if "value" in item:
        return {"shape": None, "dtype": "float32"}
    return {"shape": [_size(size) for size in item["shape"]], "dtype": item["dtype"]}


def _size(size: Any) -> str:
    return str(size["size"] if isinstance(size, dict) else size)


def _places(sizes: Mapping[str, int], inputs: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return for each size an input or a weight, by number, and the dimension of that size."""
    found: dict[str, tuple[int, int]] = {}
    for i, item in enumerate(inputs.values()):
        for axis, size in enumerate(item["shape"] or ()):
            if size in sizes:
                found.setdefault(size, (i, axis))
    return found


def _kernel(problem: Mapping[str, Any], found: Any, named: Mapping[str, Any]) -> tuple[NaiveKernel, str, str]:
    """Return a naive kernel with the steps of a thread's loops, or a skeleton with the reason."""
    if len(problem["outputs"]) > 1:
        return skeleton(problem), "1", "the model has several outputs"
    if "graph" not in found:
        return skeleton(problem), "1", "the model could not be traced"
    tensors = {key: key if "shape" in item else f"(&{key})" for key, item in named.items()}
    try:
        text, steps = graph_kernel(found["graph"], tensors, problem["name"], parameters(problem))
        products = multiplications(found["graph"])
    except NoKernel as reason:
        return skeleton(problem), "1", f"{reason} has no naive form here"
    except (UsageError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return skeleton(problem), "1", "its trace cannot be read"
    elements = " * ".join(f"({size})" for size in problem["outputs"]["out"]["shape"]) or "1"
    grid = (f"ceil_div({elements}, block_size_x)", "1", "1")
    knobs = {"block_size_x": [32, 64, 128, 256]}
    space = space_text(problem["name"], knobs, [], "block_size_x", grid, starts=[{"block_size_x": 128}])
    return NaiveKernel(text, space, f"2 * ({products})" if products else None), steps, ""
