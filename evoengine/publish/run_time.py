"""Which sizes an exported kernel serves beside the one it was tuned for, and what it is given for them.

Its parameters and its launch become expressions of the axes that it takes as it runs, which loaders evaluate. It serves
what the gate's cases of its configuration vouch for: up to its own size along each axis, the multiples that all cases
share, and the constraints of its space that no case breaks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evoengine.publish.export import parameter_json
from evoengine.records import Candidate, Launch
from evoengine.space.expression import Expression
from evoengine.space.space import SearchSpace
from evoengine.space.symbol import Symbol, Undecided, texts
from evoengine.workloads.base import Target

RunTime = Mapping[str, Any]
"""`axes`: name → largest size; `requires`: expressions that sizes must fulfil, with reasons; `parameters`: those of the
kernel with expressions in the place of numbers; `grids`: of its kernels, in order"""


def run_time(candidate: Candidate, target: Target, space: SearchSpace) -> RunTime | None:
    """Return what a loader needs to serve other sizes; None where the kernel is for one size alone."""
    workload, config = target.workload, candidate.config
    problem = workload.at_run_time(target.problem)
    if problem is None:
        return None
    largest = target.problem.variables()
    axes = {name: int(largest[name]) for name, value in problem.variables().items() if _is_axis(name, value)}
    try:
        parameters = texts([parameter_json(p) for p in workload.parameters(problem, config)])
        launch = space.sized_launch(config, problem)
    except Undecided:
        return None
    judged = [target.problem, *(case.problem for case in workload.cases(target.problem, config))]
    sizes = [{name: int(known.variables()[name]) for name in axes} for known in judged]
    requires = [*_multiples(sizes), *workload.size_rules(problem), *space.size_rules(config, problem, judged)]
    requires += _same_launch(launch, space.launch(config))
    rules = [{"expression": text, "why": why} for text, why in dict(requires).items()]
    found = {"axes": axes, "requires": rules, "parameters": parameters, "grids": _grids(launch)}
    for known, at in zip(judged, sizes, strict=True):
        expected = texts([parameter_json(p) for p in workload.parameters(known, config)])
        if _evaluated(parameters, at) != expected:
            return None
    return found if axes else None


def _is_axis(name: str, value: object) -> bool:
    return isinstance(value, Symbol) and str(value) == name


def _multiples(sizes: Sequence[Mapping[str, int]]) -> list[tuple[str, str]]:
    """Return what all sizes of the gate's cases are multiples of, as rules."""
    common = {name: math.gcd(*(at[name] for at in sizes)) for name in sizes[0]}
    return [
        (f"{name} % {unit} == 0", f"it was verified for multiples of {unit}")
        for name, unit in common.items()
        if unit > 1
    ]


def _same_launch(by_size: Launch, own: Launch) -> list[tuple[str, str]]:
    """Return as rules that what the kernel was compiled for remains: threads of a block and shared memory."""
    found = []
    for (_, rule), (_, launch) in zip(by_size.kernels(""), own.kernels(""), strict=True):
        pairs = [*zip(rule.block, launch.block, strict=True), (rule.shared_bytes, launch.shared_bytes)]
        why = f"it was compiled for {launch.threads} threads and {launch.shared_bytes} bytes of shared memory a block"
        found += [(f"{text} == {number}", why) for text, number in pairs if isinstance(text, Symbol)]
    return found


def _grids(launch: Launch) -> list[list[int | str]]:
    return [texts(rule.grid) for _, rule in launch.kernels("")]


_SIZES = frozenset({"shape", "value", "dims", "strides_bytes", "box", "swizzle", "offset", "scratch"})
"""names of numbers in kernel.json that may be expressions"""


def _evaluated(value: Any, at: Mapping[str, int], name: str = "") -> Any:
    """Return parameters with numbers in the place of expressions, as they are for one size."""
    if isinstance(value, Mapping):
        found = {key: _evaluated(part, at, key) for key, part in value.items()}
        if "at" in found and "scalar" in found:  # of a struct
            return {"at": found["at"], "hex": np.dtype(found["scalar"]).type(found["value"]).tobytes().hex()}
        return found
    if isinstance(value, list):
        return [_evaluated(part, at, name) for part in value]
    return Expression.parse(value, "kernel.json").evaluate(at) if name in _SIZES and isinstance(value, str) else value
