"""A workload that a user brings as a folder: `problem.json`, `space.toml`, and a kernel.

The kernel is `FAMILY.cu.j2`, or plain `.cu`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from evoengine.devices.base import (
    DTYPE_BYTES,
    ConstantParameter,
    Parameter,
    ScalarArgument,
    ScratchParameter,
    TensorParameter,
    viewed,
)
from evoengine.errors import UsageError, hint, nearest_folder
from evoengine.records import Config, Launch, Plan
from evoengine.sandbox.untrusted import parse_json, read_limited_text
from evoengine.space.symbol import Symbol, symbol
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Workload
from evoengine.workloads.coverage import Cell
from evoengine.workloads.folder_arguments import map_argument, struct_argument
from evoengine.workloads.folder_cases import FolderFullCase, Problems, cells, free_axes, full_plan, gate_cases, visited
from evoengine.workloads.folder_definition import (
    LARGEST_AXIS,
    SCALARS,
    FolderProblem,
    Item,
    require_launches,
    scope_of,
    scratch_parameter,
    shape_of,
    written_ranges,
)
from evoengine.workloads.folder_reader import parse_definition
from evoengine.workloads.problem_text import read_size

PROBLEM, SPACE = "problem.json", "space.toml"
_PAIR = re.compile(r"([A-Za-z_]\w*)=(\d{1,10})\Z", re.ASCII)
_MADE = ("indptr", "permutation", "made", "integers", "arange")
"""draws of values that a kernel uses as indices or branches on, which a prediction must have unchanged"""


class FolderWorkload(Workload[FolderProblem]):
    """A workload read from text, in which form it is sent to worker processes and, in a ledger, to other machines.

    `definition_text` is a problem.json that needs no other file: it contains the reference and the search space.
    Without `folder` the workload can be measured, ranked and exported; only rendering a kernel needs the folder.
    """

    baseline_label = "reference"
    definition_text: str

    def __init__(self, name: str, definition_text: str, folder: Path | None = None) -> None:
        """Parse the definition. Raises UsageError if it is invalid or names another kernel."""
        self.definition_text, self.folder = definition_text, folder
        self.definition = parse_definition(
            definition_text, str(folder / PROBLEM) if folder else f"the problem of {name}"
        )
        if self.definition.name != name:
            raise UsageError(f"the problem of {name} has the name {self.definition.name}; the two must be the same")
        require_launches(self.definition)
        self.name = name
        self.tolerance = self.definition.tolerance
        self.compile_time = self.definition.compile_time
        self.grammar = ",".join(f"{axis}=…" for axis in self.definition.var_axes)
        self.example = str(self._problem(self.definition.examples[0].axes))

    def __reduce__(self) -> tuple[type[FolderWorkload], tuple[str, str, Path | None]]:
        return FolderWorkload, (self.name, self.definition_text, self.folder)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FolderWorkload) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    @property
    def entry(self) -> str:
        return self.definition.entry

    def parse(self, text: str) -> FolderProblem:
        """Parse `NAME:n=4096,k=64`, one pair for every var axis.

        Raises UsageError naming the part that is wrong and what would be right.
        """
        given: dict[str, int] = {}
        var = self.definition.var_axes
        write = f"write it like {self.example}"
        for part in filter(None, (part.strip() for part in text.removeprefix(f"{self.name}:").split(","))):
            pair = _PAIR.match(part)
            if not pair or pair[1] not in var:
                raise UsageError(f"the problem {text!r} has a part {part!r} that is none of {self.grammar}; {write}")
            if pair[1] in given:
                raise UsageError(f"the problem {text!r} gives {pair[1]} twice; {write}")
            given[pair[1]] = read_size(pair[2])
            if not 1 <= given[pair[1]] <= LARGEST_AXIS:
                raise UsageError(f"the problem {text!r} has {part}; an axis is an integer from 1 to {LARGEST_AXIS}")
        if missing := [axis for axis in var if axis not in given]:
            raise UsageError(f"the problem {text!r} gives no {', '.join(missing)}; {write}")
        return self._problem(given)

    def _problem(self, given: Mapping[str, int], example: int | None = None) -> FolderProblem:
        """Return the problem with these values of the var axes, drawn as in the workload number `example`.

        Raises UsageError if the sizes violate a constraint or give no shape.
        """
        definition = self.definition
        number = definition.example_of(given) if example is None else example
        problem = FolderProblem(self.name, tuple(definition.sizes(given).items()), definition.var_axes, number)
        for constraint in definition.constraints:
            if not constraint.evaluate(problem.axes):
                raise UsageError(
                    f"the problem {problem} breaks the constraint `{constraint.text}` of {constraint.where}"
                )
        for item in (*definition.inputs, *definition.outputs):
            shape_of(item, problem)
        self._every_parameter(problem, {})
        return problem

    def problem_like(self, problem: FolderProblem) -> Problems:
        """Return a function that makes a problem from values of the var axes, with inputs drawn as for this one."""
        return lambda given: self._problem(given, problem.example)

    def at_run_time(self, problem: FolderProblem) -> FolderProblem:
        definition, sizes = self.definition, problem.axes
        free = free_axes(definition)
        given = {axis: symbol(axis) if axis in free else sizes[axis] for axis in definition.var_axes}
        return FolderProblem(self.name, tuple(definition.sizes(given).items()), definition.var_axes, problem.example)

    def size_rules(self, problem: FolderProblem) -> list[tuple[str, str]]:
        rules = [rule.evaluate(problem.axes) for rule in self.definition.constraints]
        return [(str(rule), "a constraint of problem.json") for rule in rules if isinstance(rule, Symbol)]

    def flops(self, problem: FolderProblem) -> float:
        """Return the FLOPs that the folder states, or else one for every element of inputs and outputs."""
        rule = self.definition.flops
        if rule:
            return float(rule.evaluate(problem.axes))
        return float(sum(prod(shape_of(i, problem)) for i in self._tensors()))

    def min_dram_bytes(self, problem: FolderProblem) -> float:
        """Return the bytes that the folder states, or else those of every tensor read or written once."""
        rule = self.definition.bytes
        if rule:
            return float(rule.evaluate(problem.axes))
        return float(sum(prod(shape_of(i, problem)) * DTYPE_BYTES[i.dtype] for i in self._tensors()))

    def _tensors(self) -> list[Item]:
        """Return inputs and outputs; a tensor that is both is read once and written once."""
        return [i for i in (*self.definition.inputs, *self.definition.outputs) if i.shape is not None]

    def cases(self, problem: FolderProblem, config: Config) -> tuple[Case[FolderProblem], ...]:
        return gate_cases(self.definition, problem, config, self.problem_like(problem))

    def parameters(self, problem: FolderProblem, config: Config) -> tuple[Parameter, ...]:
        definition = self.definition
        every = self._every_parameter(problem, config)
        named = list(definition.all_parameters)
        seen = {name for parameter in named for name in viewed(every[parameter])}
        named += [name for name in every if name in seen and name not in named]
        found = [every[name] for name in named]
        inputs = {item.name: item for item in definition.inputs}
        for variable, name in definition.constants.items():
            found.append(ConstantParameter(variable, shape_of(inputs[name], problem), inputs[name].dtype, name))
        return tuple(found)

    def _every_parameter(self, problem: FolderProblem, config: Config) -> dict[str, Parameter]:
        """Return everything that a kernel can take, or a struct can contain, by name."""
        definition = self.definition
        draws, scope = definition.draws_for(problem), scope_of(definition, problem, config)
        inputs, outputs = ({i.name: i for i in items} for items in (definition.inputs, definition.outputs))
        every: dict[str, Parameter] = {n: definition.size_argument(n, size) for n, size in problem.sizes}
        memory: dict[str, TensorParameter | ScratchParameter] = {}
        for name, item in {**inputs, **outputs}.items():
            if item.shape is None:
                every[name] = ScalarArgument(name, SCALARS[item.dtype](draws[name].value))
                continue
            inout, writes = name in definition.inout, written_ranges(item, problem)
            memory[name] = TensorParameter(name, shape_of(item, problem), item.dtype, name in outputs, inout, writes)
        memory |= {s.name: scratch_parameter(definition, s, problem, config) for s in definition.scratch}
        every |= memory
        every |= {m.name: map_argument(m, memory[m.tensor], scope, bool(config)) for m in definition.maps}
        every |= {s.name: struct_argument(s, every, scope, bool(config)) for s in definition.structs}
        return every

    def indices(self, problem: FolderProblem, config: Config, seed: int) -> Mapping[str, np.ndarray]:
        draws = self.definition.draws_for(problem)
        wanted = {name for name, draw in draws.items() if draw.kind in _MADE}
        tensors = {item.name for item in self.definition.inputs if item.shape is not None}
        if not wanted & tensors:
            return {}
        from evoengine.workloads.folder_reference import as_bytes
        from evoengine.workloads.folder_tensors import FolderTensors

        case = Case("prediction", problem, config=config)
        return {
            n: as_bytes(t) for n, t in FolderTensors(self.definition).draw_some(case, seed, tensors - wanted).items()
        }

    def kernel_parameters(self, entry: str) -> tuple[str, ...] | None:
        return self.definition.then.get(entry, self.definition.parameters)

    def tensors(self) -> Tensors[FolderProblem]:
        from evoengine.workloads.folder_tensors import FolderTensors

        return FolderTensors(self.definition)

    def cells(self, problem: FolderProblem, config: Config) -> frozenset[Cell]:
        return cells(self.definition, problem, config, self.problem_like(problem))

    def visited(self, case: Case[FolderProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        return visited(self.definition, case)

    def full_plan(self, problem: FolderProblem, config: Config, launch_of: LaunchOf) -> Plan:
        return full_plan(self.definition, problem, config, launch_of, self.problem_like(problem))

    def full_size(self) -> FullSize[FolderFullCase]:
        from evoengine.workloads.folder_full_size_tensors import FolderFullSize

        return FolderFullSize(self, self.definition)

    def space_file(self) -> Path | None:
        return self.folder / SPACE if self.folder else None

    def templates(self) -> Path | None:
        return self.folder


def load_folder(path: Path) -> FolderWorkload:
    """Read a kernel's folder. Raises UsageError naming the file that is missing or invalid."""
    if not path.is_dir():
        raise UsageError(
            f"there is no folder {path}; {hint('new', path)} writes one to start from{nearest_folder(path)}"
        )
    folder = path.resolve()
    text = _read(folder / PROBLEM)
    try:
        data = parse_json(text)
    except ValueError as error:
        raise UsageError(f"{folder / PROBLEM} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{folder / PROBLEM} must hold a JSON object, not a {type(data).__name__}")
    reference = data.get("reference")
    if isinstance(reference, str) and re.fullmatch(r"\w[\w.-]*\.py", reference):
        data["reference"] = _read(folder / reference)
    if isinstance(reference, dict) and re.fullmatch(r"\w[\w.-]*\.cuh?", str(reference.get("file"))):
        data["reference"] = {**reference, "text": _read(folder / reference["file"])}
    makers = data.get("makers")
    if isinstance(makers, str) and re.fullmatch(r"\w[\w.-]*\.py", makers):
        data["makers"] = _read(folder / makers)
    data["space"] = _read(folder / SPACE)
    return FolderWorkload(str(data.get("name")), json.dumps(data), folder)


def _read(path: Path) -> str:
    try:
        return read_limited_text(path)
    except FileNotFoundError:
        raise UsageError(
            f"there is no {path}; a kernel's folder holds {PROBLEM}, {SPACE} and NAME.cu.j2 or NAME.cu"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
