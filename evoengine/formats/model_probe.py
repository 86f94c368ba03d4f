"""Look at a KernelBench model: its sizes, tensors and operations, at small sizes and without its data.

Run by script_runner.py in the process of the script, without importing evoengine. Integers of the module on which the
shapes of inputs depend are its sizes. The model is traced twice, at unlike primes in their place: a number that differs
between the traces is an expression of the sizes, one that does not is a constant.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
import runpy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

PRIMES = (
    (53, 83, 127, 179, 241, 311, 389, 467, 557, 653, 757, 863),
    (61, 101, 163, 233, 317, 409, 509, 617, 739, 877, 1021, 1171),
)
"""the sizes of the two traces; larger than most kernels, strides and paddings, with distinct differences"""
SMALL = tuple(range(13, 25))
"""sizes of tensors with contents"""
PROBES = 36
"""consecutive values of a size at which a dimension is examined"""
MOST_SHIFT, MOST_STRIDE = 96, 16
POWERS = (-0.5, -0.25, -1.0, 0.5)
"""limit of a size that is a factor of a number of the trace"""
MOST_ELEMENTS = 1 << 22
"""limit of elements of tensors with contents"""

Sizes = dict[str, int]


class Unknown(Exception):
    """A number that depends on sizes in an unknown way."""


class Probe:
    def __init__(self, script: str) -> None:
        self.names = self._module(script)
        self.init = self.names.get("get_init_inputs", list)
        forward = inspect.signature(self.names["Model"].forward)
        self.inputs = [name for name in forward.parameters if name != "self"]
        self.own = dict(_integers_of(self.names))
        self.follow = dict(_named_in_tuples(script, self.own))
        """integers that always equal another one: entries of tuples, and sizes that a model accepts only if both are
        equal"""

    def _module(self, script: str) -> dict[str, Any]:
        """Return the module's own names, from which its functions read their sizes."""
        with torch.device("meta"):
            found = runpy.run_path(script)
        found["Model"]
        reads: dict[str, Any] = found["get_inputs"].__globals__
        return reads | found

    def at(self, sizes: Sizes, device: str = "meta") -> tuple[torch.nn.Module, list[Any]]:
        """Return model and inputs for some sizes."""
        reads = self.names["get_inputs"].__globals__
        before = {name: reads[name] for name in self.names if name in reads}
        own = self.own | sizes
        own |= {name: own[leader] for name, leader in self.follow.items()}
        reads.update(_module_values(self.names, own))
        try:
            with torch.device(device):
                return self.names["Model"](*self.init()), list(self.names["get_inputs"]())
        finally:
            reads.update(before)

    def shapes(self, sizes: Sizes) -> list[list[int]]:
        """Return the shapes of inputs, weights and outputs."""
        model, inputs = self.at(sizes)
        outputs = model.eval()(*inputs)
        outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
        return _shapes([*inputs, *_weights(model).values(), *outputs])

    def sizes(self) -> tuple[Sizes, Sizes]:
        """Return the module's integers that are sizes, with the primes of the two traces."""
        found: tuple[Sizes, Sizes] = ({}, {})
        for name, value in self.own.items():
            primes = [of[len(kept)] for of, kept in zip(PRIMES, found, strict=True)]
            equal = {other: name for other, v in self.own.items() if v == value and other not in (name, *found[0])}
            if name not in self.follow and (
                self._moves(name, found, primes) or self._moves(name, found, primes, equal)
            ):
                for kept, prime in zip(found, primes, strict=True):
                    kept[name] = prime
        return found

    def _moves(
        self, name: str, found: tuple[Sizes, Sizes], primes: Sequence[int], equal: dict[str, str] | None = None
    ) -> bool:
        """Return whether shapes depend on a size that the model accepts together with those found and its equals."""
        before = self.follow
        self.follow = before | (equal or {})
        try:
            if _shapes(self.at({})[1]) != _shapes(self.at({name: self.own[name] + 1})[1]):
                for kept, prime in zip(found, primes, strict=True):
                    self.shapes(kept | {name: prime})
                return True
        except Exception:  # any exception of a model: the size stays unchanged
            pass
        self.follow = before
        return False

    def least(self, sizes: Sizes) -> Sizes:
        """Return the smallest value that the model accepts for each size, the others unchanged, except those of 1."""
        found = {}
        for name in sizes:
            for value in range(1, PROBES):
                try:
                    is_empty = any(0 in shape for shape in self.shapes(sizes | {name: value}))
                except Exception:  # any exception of a model at an impossible size
                    continue
                if is_empty:
                    continue
                if value > 1:
                    found[name] = value
                break
        return found


def _integers_of(names: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the module's own integers by name, and those of tuples by name and position."""
    for name, value in names.items():
        if name.startswith("_") or not name.isidentifier():
            continue
        if type(value) is int and value > 1:
            yield name, value
        elif isinstance(value, tuple) and value and all(type(v) is int for v in value):
            yield from ((f"{name}_{i}", v) for i, v in enumerate(value) if v > 1)


def _named_in_tuples(script: str, own: Sizes) -> Iterator[tuple[str, str]]:
    """Yield each entry of the module's tuples that equals another integer of the module, with that integer."""
    with open(script, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Name):
            for i, entry in enumerate(node.value.elts):
                if isinstance(entry, ast.Name) and entry.id in own:
                    yield f"{node.targets[0].id}_{i}", entry.id


def _module_values(names: dict[str, Any], integers: Sizes) -> dict[str, Any]:
    """Return the values of the module's names for integers by `_integers_of`'s names."""
    found: dict[str, Any] = {name: value for name, value in integers.items() if name in names}
    for name, value in names.items():
        if isinstance(value, tuple):
            found[name] = tuple(integers.get(f"{name}_{i}", v) for i, v in enumerate(value))
    return found


def _shapes(values: Sequence[Any]) -> list[list[int]]:
    """Return the shapes of tensors; numbers have none."""
    return [list(t.shape) if isinstance(t, torch.Tensor) else [] for t in values]


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in [*model.named_parameters(), *model.named_buffers()]}


class Numbers:
    """The numbers of two traces as expressions of the sizes."""

    def __init__(self, probe: Probe, first: Sizes, second: Sizes) -> None:
        self.probe, self.first, self.second = probe, first, second
        self.known: dict[tuple[int, int], str] = {}
        for count in range(1, 5):
            for names in itertools.combinations(first, count):
                pair = math.prod(first[n] for n in names), math.prod(second[n] for n in names)
                self.known.setdefault(pair, " * ".join(names))

    def of(self, a: Any, b: Any) -> Any:
        """Return a number, {"size": EXPRESSION}, or {"size": EXPRESSION, "power": NUMBER}. Raises Unknown."""
        if type(a) is float and type(b) is float and a != b and a == a:
            return self._power(a, b)
        if type(a) is not int or type(b) is not int or a == b:
            if a != b and not (a != a and b != b):
                raise Unknown(f"{a} and {b}")
            return a
        if (a, b) not in self.known:
            self.known[a, b] = self._shifted(a, b)
        return {"size": self.known[a, b]}

    def _power(self, a: float, b: float) -> dict[str, Any]:
        """Return a number as a power of a size, such as the scale of an attention."""
        for (one, other), text in self.known.items():
            for power in POWERS:
                if math.isclose(one**power, a, rel_tol=1e-12) and math.isclose(other**power, b, rel_tol=1e-12):
                    return {"size": text, "power": power}
        raise Unknown(f"{a} and {b}")

    def _shifted(self, a: int, b: int) -> str:
        """Return a number as a size plus or minus a constant, as for a tensor without its first element."""
        for name, size in self.first.items():
            if a - size == b - self.second[name] and abs(a - size) <= MOST_SHIFT:
                return _plus(name, a - size)
        raise Unknown(f"{a} and {b}")

    def learn_shapes(self) -> None:
        """Find the expressions of all dimensions of inputs, weights and outputs."""
        shapes = [self.probe.shapes(sizes) for sizes in (self.first, self.second)]
        for i, (one, other) in enumerate(zip(*shapes, strict=True)):
            for j, pair in enumerate(zip(one, other, strict=True)):
                if pair[0] != pair[1] and pair not in self.known:
                    self.known[pair] = self._fitted(i, j, pair)

    def _fitted(self, i: int, j: int, pair: tuple[int, int]) -> str:
        """Return the dimension as (size + shift) // stride, or stride * size + shift."""
        for name in self.first:
            at = [self.first[name] + step for step in range(PROBES)]
            try:
                seen = [self.probe.shapes(self.first | {name: value})[i][j] for value in at]
            except Exception:  # a model may reject a size by any exception
                continue
            if len(set(seen)) == 1:
                continue
            for text, rule in _rules(name):
                if [rule(value) for value in at] == seen and rule(self.second[name]) == pair[1]:
                    return text
        raise Unknown(f"{pair[0]} and {pair[1]}")


def _rules(name: str) -> Iterator[tuple[str, Callable[[int], int]]]:
    shifts = sorted(range(-MOST_SHIFT, MOST_SHIFT + 1), key=abs)
    for stride in range(1, MOST_STRIDE + 1):
        for shift in shifts:
            text = name if stride == 1 else f"{stride} * {name}"
            yield _plus(text, shift), partial(_line, stride, shift)
    for stride in range(2, MOST_STRIDE + 1):
        for shift in shifts:
            yield f"({_plus(name, shift)}) // {stride}", partial(_steps, stride, shift)


def _line(stride: int, shift: int, size: int) -> int:
    return stride * size + shift


def _steps(stride: int, shift: int, size: int) -> int:
    return (size + shift) // stride


def _plus(text: str, shift: int) -> str:
    return f"{text} {'-' if shift < 0 else '+'} {abs(shift)}" if shift else text


def _trace(probe: Probe, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the operations of the model, inputs and weights first; each number is a tensor of no dimension."""
    model, inputs = probe.at(sizes)
    inputs = [torch.tensor(value) if isinstance(value, float) else value for value in inputs]
    weights = _weights(model)

    def run(*given: Any) -> Any:
        own = dict(zip(weights, given[len(inputs) :], strict=True))
        return torch.func.functional_call(model.eval(), own, given[: len(inputs)])

    def of_tensors(*tensors: Any) -> Any:
        left = iter(tensors)
        given = [next(left) if isinstance(t, torch.Tensor) else t for t in inputs]
        return run(*given, *left)

    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    of_values = (*tensors, *weights.values())
    traced = make_fx(of_tensors, dict(core_aten_decompositions()), "fake")(*of_values)
    if any(
        re.fullmatch(r"aten\.\w+_\.\w+", str(node.target)) for node in traced.graph.nodes
    ):  # decompositions replace in-place operations
        traced = make_fx(torch.func.functionalize(traced), tracing_mode="fake")(*of_values)
    graph = traced.graph
    found = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shaped = value if isinstance(value, torch.Tensor) else value[0] if isinstance(value, tuple | list) else None
        found.append(
            {
                "name": node.name,
                "op": node.op if node.op != "call_function" else str(node.target),
                "args": [_argument(a) for a in node.args],
                "named": {key: _argument(a) for key, a in node.kwargs.items()},
                "shape": None if shaped is None else list(shaped.shape),
                "dtype": None if shaped is None else str(shaped.dtype).removeprefix("torch."),
            }
        )
    return found


def _argument(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple | list):
        return [_argument(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _joined(a: Any, b: Any, numbers: Numbers) -> Any:
    """Return two traces as one, with expressions where they differ. Raises Unknown."""
    if isinstance(a, dict):
        return {key: _joined(a[key], b[key], numbers) for key in a}
    if isinstance(a, list):
        if len(a) != len(b):
            raise Unknown("other operations")
        return [_joined(x, y, numbers) for x, y in zip(a, b, strict=True)]
    return numbers.of(a, b)


def _item(value: Any, other: Any, numbers: Numbers) -> dict[str, Any]:
    if isinstance(value, float):
        return {"value": value}
    if not isinstance(value, torch.Tensor):
        raise Unknown(f"get_inputs gives {type(value).__name__}, which is not a tensor")
    sizes = [numbers.of(a, b) for a, b in zip(value.shape, other.shape, strict=True)]
    return {"shape": sizes, "dtype": str(value.dtype).removeprefix("torch.")}


def look(script: str) -> dict[str, Any]:
    """Return the model's `sizes` (name → the module's own value), `inputs`, `weights`, `outputs`, `draws` and `graph`.

    `least` are the smallest values of sizes that the model accepts, `follow` the names that equal another size.
    `no_graph` is the reason if there is no graph. Raises any exception of the model.
    """
    probe = Probe(script)
    found = _looked(probe, *probe.sizes())
    for name in found["sizes"] if "no_graph" in found else ():  # a size on which other numbers depend stays unchanged
        fewer = [{n: p for n, p in zip(found["sizes"], of, strict=False) if n != name} for of in PRIMES]
        other = _looked(probe, fewer[0], fewer[1])
        if "graph" in other:
            return other
    return found


def _looked(probe: Probe, first: Sizes, second: Sizes) -> dict[str, Any]:
    while True:
        numbers = Numbers(probe, first, second)
        try:
            numbers.learn_shapes()
            break
        except Unknown:  # the size that was found last stays unchanged
            for kept in (first, second):
                kept.popitem()
    (model, inputs), (other, others) = probe.at(first), probe.at(second)
    outputs, out_others = (_outputs(m.eval()(*i)) for m, i in ((model, inputs), (other, others)))
    weights = _weights(model)
    found: dict[str, Any] = {
        "sizes": {name: probe.own[name] for name in first},
        "least": probe.least(first),
        "follow": {name: leader for name, leader in probe.follow.items() if leader in first},
        "names": probe.inputs[: len(inputs)],
        "inputs": [_item(a, b, numbers) for a, b in zip(inputs, others, strict=True)],
        "weights": {n: _item(t, _weights(other)[n], numbers) for n, t in weights.items()},
        "outputs": [_item(a, b, numbers) for a, b in zip(outputs, out_others, strict=True)],
    }
    found["draws"] = _draws(probe, numbers)
    try:
        found["graph"] = _joined(_trace(probe, first), _trace(probe, second), numbers)
    except Exception as error:
        found["no_graph"] = f"{type(error).__name__}: {error}"[:200]
    return found


def _outputs(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _draws(probe: Probe, numbers: Numbers) -> list[dict[str, Any]]:
    """Return how inputs are drawn; an empty draw is the default one.

    Integers lie within the bounds of `randint`, and floats between 0 and 1 if others give NaN.
    """
    bounds = [_bounds(probe, sizes) for sizes in (numbers.first, numbers.second)]
    try:
        _, inputs = probe.at(numbers.first)
        left = iter([(low, numbers.of(high, other)) for (low, high), (_, other) in zip(*bounds, strict=True)])
        integers = [t.dtype in (torch.int32, torch.int64) if isinstance(t, torch.Tensor) else False for t in inputs]
        drawn = [_integers(*next(left, (0, 2))) if is_integer else {} for is_integer in integers]
        few = dict(zip(numbers.first, SMALL, strict=False))
        if max(math.prod(shape) for shape in probe.shapes(few)) > MOST_ELEMENTS:
            return drawn
        model, small = probe.at(few, "cpu")
        normal = [torch.randn(t.shape) if _is_float(t) else t for t in small]
        with torch.no_grad():
            outputs = _outputs(model.eval()(*normal))
    except Exception:  # a model that does not run at small sizes
        return [{} for _ in probe.inputs]
    if all(bool(t.isfinite().all()) for t in outputs if t.is_floating_point()):
        return drawn
    positive = {"type": "uniform", "low": 0.0625, "high": 1.0}
    return [positive if _is_float(t) else d for t, d in zip(small, drawn, strict=True)]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _integers(low: int, high: Any) -> dict[str, Any]:
    return {"type": "integers", "low": low, "high": high["size"] if isinstance(high, dict) else high}


def _bounds(probe: Probe, sizes: Sizes) -> list[tuple[int, int]]:
    """Return the bounds of the calls of `randint` that make inputs."""
    found: list[tuple[int, int]] = []
    own = torch.randint

    def noted(*given: Any, **named: Any) -> Any:
        ends = [value for value in given if isinstance(value, int)]
        found.append((ends[0], ends[1]) if len(ends) > 1 else (0, ends[0]))
        return own(*given, **named)

    torch.randint = noted
    try:
        probe.at(sizes)
    finally:
        torch.randint = own
    return found
