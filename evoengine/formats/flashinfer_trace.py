"""Import FlashInfer-Trace's Definitions and Workloads into a folder.

The schema is flashinfer-bench's (its package `flashinfer_bench.data`); SOL-ExecBench's dialect adds `expr` axes and
`custom` inputs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.formats.folder import NewFolder, read_json, read_text
from evoengine.formats.naive_kernels import naive_kernel
from evoengine.formats.tuned_kernel import STUB, NotLiteral, expression_of
from evoengine.sandbox.untrusted import parse_json
from evoengine.space.expression import Expression

_TAKEN = ("name", "op_type", "type", "description", "tags", "axes", "constraints", "inputs", "outputs", "reference")
MAX_WORKLOADS = 64
MOST_CONSTANT = 1 << 17
"""limit of the product of a GEMM's constant sizes, up to which the gate can run it"""
SIZE = 256
"""default of a var axis without a workload"""
FEW = 24
"""default if there are offsets, because such references loop over segments and heads"""
SCALE = 0.125
"""default of a scalar tensor that scales a softmax"""
EPSILON = 1e-6
"""default of a value named eps without a workload"""


def import_trace(definition: Path, workloads: Path | None, name: str, reference: str | None) -> NewFolder:
    """Return the folder of a Definition, with a kernel for the operations that `naive_kernels` supports.

    Raises UsageError if the file is not a Definition.
    """
    data = read_json(definition, "the definition")
    if not isinstance(data, dict) or not isinstance(data.get("axes"), dict):
        raise UsageError(
            f"{definition} is no FlashInfer-Trace definition: it needs name, axes, inputs, outputs and reference"
        )
    for key in ("inputs", "outputs"):
        entries = data.get(key)
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise UsageError(f"{definition}: {key} must be an object of tensors, each with shape and dtype")
    remarks = [f"the key {key} of the definition" for key in data if key not in _TAKEN]
    totals = _totals(data)
    axes = {axis: _without(entry, "description", "parent") for axis, entry in data["axes"].items()}
    problem: dict[str, Any] = {
        "name": name,
        "op_type": str(data.get("op_type", data.get("type", ""))),
        "description": str(data.get("description") or data.get("name") or ""),
        "axes": axes,
        "constraints": _constraints(data, axes, remarks) + _shortest(totals, data),
        "inputs": _required(data["inputs"], remarks),
        "outputs": data["outputs"],
        "reference": reference or _reference(data, remarks),
        "workloads": [
            {**workload, "inputs": {**_index_draws(data, totals), **workload["inputs"]}}
            for workload in _workloads(data, axes, workloads, remarks)
        ],
    }
    _free_sizes(problem, remarks)
    kernel = naive_kernel(problem)
    if kernel.flops:
        problem["flops"] = kernel.flops
    if kernel.is_skeleton:
        remarks.append(
            f"a kernel: the format has none, and {name}.cu is a skeleton to write, which the gate refuses as it is"
        )
    return NewFolder(problem, kernel.space, kernel.text, is_template=False, remarks=tuple(remarks))


def _free_sizes(problem: dict[str, Any], remarks: list[str]) -> None:
    """Make the large constants of a GEMM variable axes with the constants as example, unless the reference names them.

    The gate runs whole problems on a CPU, which takes minutes for products of thousands by thousands.
    """
    if problem["op_type"].lower() != "gemm":
        return
    axes = problem["axes"].items()
    constants = {a: e.get("value") for a, e in axes if isinstance(e, dict) and e.get("type") == "const"}
    named = {int(number) for number in re.findall(r"\b\d{1,18}\b", str(problem["reference"]))}
    free = {axis: value for axis, value in constants.items() if type(value) is int and value not in named}
    if prod(free.values()) <= MOST_CONSTANT:
        return
    problem["axes"] |= {axis: {"type": "var"} for axis in free}
    problem["workloads"] = [{**one, "axes": {**one["axes"], **free}} for one in problem["workloads"]]
    listed = ", ".join(f"{axis}={value}" for axis, value in free.items())
    remarks.append(f"that {listed} are constants: the kernel takes them as it runs, so that the gate can choose others")


def _required(inputs: dict[str, dict[str, Any]], remarks: list[str]) -> dict[str, Any]:
    """Return the inputs without the field that marks them as optional."""
    names = [name for name, item in inputs.items() if item.get("optional")]
    if names:
        remarks.append(f"that {', '.join(names)} may be left out: a kernel always gets its inputs")
    return {name: _without(item, "optional") for name, item in inputs.items()}


def _without(entry: Any, *keys: str) -> Any:
    return {k: v for k, v in entry.items() if k not in keys} if isinstance(entry, dict) else entry


def _constraint_list(data: dict[str, Any]) -> list[Any]:
    given = data.get("constraints")
    return given if isinstance(given, list) else []


def _constraints(data: dict[str, Any], axes: Mapping[str, Any], remarks: list[str]) -> list[str]:
    found = []
    for constraint in _constraint_list(data):
        if _TOTAL.fullmatch(str(constraint).strip()):
            continue
        try:
            found.append(expression_of(str(constraint), axes))
        except NotLiteral as error:
            remarks.append(f"the constraint {error}")
    return found


_TOTAL = re.compile(r"(\w+)\s*==\s*(\w+)\s*\[\s*-1\s*\](?:\.item\(\))?")


def _totals(data: dict[str, Any]) -> dict[str, str]:
    """Return the offsets among the inputs, each with the axis that it ends at: `total_q == qo_indptr[-1].item()`."""
    found = (_TOTAL.fullmatch(str(constraint).strip()) for constraint in _constraint_list(data))
    return {match[2]: match[1] for match in found if match and match[2] in data["inputs"]}


def _shape(item: Any) -> list[str]:
    """Return a tensor's shape; [] if it has none."""
    shape = item.get("shape") if isinstance(item, dict) else None
    return [str(size) for size in shape] if isinstance(shape, list) else []


def _shortest(totals: Mapping[str, str], data: dict[str, Any]) -> list[str]:
    """Return constraints by which offsets have at least one segment, and no query precedes the keys of its sequence."""
    if _sees_before(data, totals):
        return [f"{totals['kv_indptr']} >= {totals['qo_indptr']}", *_one_segment(totals, data)]
    return _one_segment(totals, data)


def _sees_before(data: dict[str, Any], totals: Mapping[str, str]) -> bool:
    """Return whether queries are the last tokens of their keys, as in causal prefill."""
    inputs = data["inputs"]
    same = (
        "qo_indptr" in totals and "kv_indptr" in totals and _shape(inputs["qo_indptr"]) == _shape(inputs["kv_indptr"])
    )
    before = same and [*inputs].index("qo_indptr") < [*inputs].index("kv_indptr")
    return before and "causal" in f"{data.get('name')} {data.get('description')} {data.get('reference')}".lower()


def _one_segment(totals: Mapping[str, str], data: dict[str, Any]) -> list[str]:
    """Return a constraint by which every offset but the last begins a segment, also with lengths of pages for each."""
    sizes = {shape[0] for name in totals if len(shape := _shape(data["inputs"][name])) == 1}
    named = [set(re.findall(r"\w+", str(constraint))) for constraint in _constraint_list(data)]
    lengths = {s[0] for name, item in data["inputs"].items() if name.endswith("last_page_len") and (s := _shape(item))}
    pairs = [(size, n) for size in sorted(sizes) for n in sorted(lengths - sizes) if {size, n} <= data["axes"].keys()]
    tied = [f"{size} == {n} + 1" for size, n in pairs if not any({size, n} <= names for names in named)]
    return tied + [f"{size} >= 2" for size in sorted(sizes) if size in data["axes"]]


def _index_draws(data: dict[str, Any], totals: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return valid draws of offsets, page tables and lengths, recognized by the names that the format uses."""
    inputs = data["inputs"]
    caches = [_shape(item) for name, item in inputs.items() if name.endswith("_cache") and len(_shape(item)) > 2]
    draws: dict[str, dict[str, Any]] = {
        name: {"type": "indptr", "total": axis}
        for name, axis in totals.items()
        if len(_shape(inputs[name])) == 1 and inputs[name].get("dtype") in ("int32", "int64")
    }
    for name, item in inputs.items():
        if name.endswith("indices") and caches and "int" in str(item.get("dtype")):
            draws[name] = {"type": "integers", "low": 0, "high": caches[0][0]}
        elif name.endswith("last_page_len") and caches and "int" in str(item.get("dtype")):
            draws[name] = {"type": "integers", "low": 1, "high": f"{caches[0][1]} + 1"}
        elif name.endswith("scale") and item.get("shape") == []:
            draws[name] = {"type": "constant", "value": SCALE}
    if _sees_before(data, totals) and {"qo_indptr", "kv_indptr"} <= draws.keys():
        draws["kv_indptr"]["over"] = "qo_indptr"
    return draws


def _reference(data: dict[str, Any], remarks: list[str]) -> str:
    """Return the reference with a function `run`.

    If it defines another function, as FlashInfer's own dumps do, `run` calls that.
    """
    text = data.get("reference")
    names = ", ".join(data.get("inputs") or {})
    if not isinstance(text, str) or not text.strip():
        remarks.append(
            "a reference: the definition has none; write run(*inputs) in reference.py, or give --reference FILE.py"
        )
        return STUB.format(names=names)
    try:
        functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError):
        return text
    if "run" in functions:
        return _with_own_inputs(text, list(data.get("inputs") or {}))
    if not functions:
        return text
    public = [name for name in functions if not name.startswith("_")] or functions
    remarks.append(f"that the reference has no run: its function {public[-1]} is called")
    return f"{text.rstrip()}\n\n\ndef run(*inputs):\n    return {public[-1]}(*inputs)\n"


def _with_own_inputs(text: str, inputs: list[str]) -> str:
    """Return the text with a `run` that takes all inputs, if its own takes only some of them by name."""
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "run")
    own = [argument.arg for argument in function.args.args]
    if own == inputs or function.args.vararg or not set(own) < set(inputs):
        return text
    given = ", ".join(f"{name}={name}" for name in own)
    return f"{text.rstrip()}\n\n\n_run = run\n\n\ndef run({', '.join(inputs)}):\n    return _run({given})\n"


def _workloads(
    data: dict[str, Any], axes: Mapping[str, Any], file: Path | None, remarks: list[str]
) -> list[dict[str, Any]]:
    """Return the axes and inputs of each line.

    Tensor files are not imported, and inputs without a description get a default.
    """
    var = [axis for axis, entry in axes.items() if isinstance(entry, dict) and entry.get("type") == "var"]
    scalars = [n for n, i in (data.get("inputs") or {}).items() if isinstance(i, dict) and i.get("shape", ()) is None]
    found = [_workload(entry, scalars, remarks) for entry in _lines(file, data.get("name"), remarks)]
    if found:
        return found
    totals = _totals(data)
    sizes = _chosen_sizes(var, [*_constraint_list(data), *_shortest(totals, data)], FEW if totals else SIZE)
    if sizes:
        chosen = ", ".join(f"{axis}={value}" for axis, value in sizes.items())
        remarks.append(f"sizes: no workload gives any; problem.json has {chosen}")
    return [_workload({"axes": sizes}, scalars, remarks)]


def _chosen_sizes(var: list[str], constraints: list[Any], size: int) -> dict[str, int]:
    """Return `size` for every var axis except those that a constraint `axis == …` determines."""
    sizes = dict.fromkeys(var, size)
    for constraint in map(str, constraints):
        axis, equals, right = constraint.partition("==")
        if not equals or axis.strip() not in sizes:
            continue
        try:
            value = Expression.parse(expression_of(right, var), "it").evaluate(sizes)
        except (NotLiteral, UsageError):
            continue
        if type(value) is int and value > 0:
            sizes[axis.strip()] = value
    return sizes


def _lines(file: Path | None, name: Any, remarks: list[str]) -> list[dict[str, Any]]:
    """Return the workloads of a JSONL file that belong to this definition. A line may be a Trace that contains one."""
    if file is None:
        return []
    found = []
    for number, line in enumerate(filter(str.strip, read_text(file, "the workloads").splitlines()), 1):
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise UsageError(f"{file}, line {number}, is not valid JSON: {error}") from None
        if isinstance(entry, dict) and entry.get("definition", name) == name:
            found.append(entry.get("workload", entry))
    usable = [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("axes"), dict)]
    if not usable:
        raise UsageError(f"{file} has no workload of {name} with axes")
    if len(usable) > MAX_WORKLOADS:
        remarks.append(f"all but the first {MAX_WORKLOADS} of {len(usable)} workloads")
    return usable[:MAX_WORKLOADS]


def _workload(entry: dict[str, Any], scalars: list[str], remarks: list[str]) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    given = entry.get("inputs")
    for name, spec in given.items() if isinstance(given, dict) else ():
        kind = spec.get("type") if isinstance(spec, dict) else None
        if kind == "scalar" and name in scalars:
            inputs[name] = {"type": "scalar", "value": spec.get("value")}
        elif kind not in ("random", "scalar"):
            _once(
                remarks,
                f"the contents of {name} by {kind}: they are drawn at random; say in problem.json what they must be",
            )
    for name in scalars:
        if name not in inputs:
            value = EPSILON if "eps" in name.lower() else 1.0
            inputs[name] = {"type": "scalar", "value": value}
            _once(remarks, f"a value of {name}: no workload gives one; it is {value} in problem.json")
    return {"axes": entry["axes"], "inputs": inputs}


def _once(remarks: list[str], remark: str) -> None:
    if remark not in remarks:
        remarks.append(remark)
