"""A naive kernel from the operations of a traced model: one thread for each element of the output.

An element is computed from the elements that it needs, operation by operation back to the inputs; sums and maxima are
loops. Values that do not depend on the variable of a loop are computed before it. The trace comes from an untrusted
process: names and expressions are checked, and an unknown operation gives no kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evoengine.space.expression import Expression

Index = tuple[str, ...]
"""expression of each index of an element"""
_NAME = re.compile(r"[A-Za-z_]\w{0,100}\Z", re.ASCII)
_TYPES = {"float32": "float", "int64": "long long", "int32": "int", "bool": "bool"}
_BINARY = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "maximum": "fmaxf({}, {})",
    "minimum": "fminf({}, {})", "ge": "{} >= {}", "gt": "{} > {}", "le": "{} <= {}", "lt": "{} < {}", "eq": "{} == {}",
    "ne": "{} != {}", "logical_and": "{} && {}", "logical_or": "{} || {}",
}  # fmt: skip # a table
_UNARY = {
    "neg": "-{}", "abs": "fabsf({})", "exp": "expf({})", "log": "logf({})", "log1p": "log1pf({})", "erf": "erff({})",
    "sqrt": "sqrtf({})", "rsqrt": "rsqrtf({})", "tanh": "tanhf({})", "relu": "fmaxf({}, 0.0f)", "isnan": "isnan({})",
    "logical_not": "!{}", "sigmoid": "1.0f / (1.0f + expf(-{}))", "clone": "{}", "alias": "{}",
    "detach": "{}", "_to_copy": "{}",
}  # fmt: skip # a table
_KINDS = {
    "ge": "bool",
    "gt": "bool",
    "le": "bool",
    "lt": "bool",
    "eq": "bool",
    "ne": "bool",
    "isnan": "bool",
    "logical_not": "bool",
}


class NoKernel(Exception):
    """An operation without a naive form."""


def graph_kernel(graph: Any, tensors: Mapping[str, str], entry: str, parameters: str) -> tuple[str, str]:
    """Return the text of a kernel for the placeholders' pointers in C, and the number of steps of a thread's loops.

    The number is an expression of the sizes. Raises NoKernel.
    """
    writer = _Writer(graph, tensors)
    text = writer.kernel(entry, parameters)
    return text, " + ".join(writer.steps).replace("/", "//") or "1"


def multiplications(graph: Any) -> str:
    """Return the number of multiplications in the model's products and convolutions as an expression of the sizes.

    The text is empty if there are none.
    """
    writer, found = _Writer(graph, {}), list[str]()
    for name, node in writer.nodes.items():
        base = str(node["op"]).removeprefix("aten.").split(".")[0]
        if base in ("mm", "bmm", "addmm"):
            shapes = [writer.shape(name), writer.shape(node["args"][-2]["node"])[-1:]]
        elif base == "convolution":
            source, weight, transposed = node["args"][0]["node"], node["args"][1]["node"], node["args"][6]
            shapes = [writer.shape(source if transposed else name), writer.shape(weight)[1:]]
        else:
            continue
        found.append(" * ".join(size for shape in shapes for size in shape))
    return " + ".join(found).replace("/", "//")


def _equal(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of leading sizes that are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class _Writer:
    def __init__(self, graph: Any, tensors: Mapping[str, str]) -> None:
        self.nodes: dict[str, Mapping[str, Any]] = {str(node["name"]): node for node in graph}
        placeholders = [name for name, node in self.nodes.items() if node["op"] == "placeholder"]
        self.pointers = dict(zip(placeholders, tensors.values(), strict=False))
        self.scopes: list[list[str]] = [[]]
        self.repeats: list[str] = ["1"]
        """number of executions of each scope's statements relative to the surrounding scope"""
        self.steps: list[str] = []
        self.depth: dict[str, int] = {}
        self.known: dict[tuple[str, Index], str] = {}
        self.count = 0

    def kernel(self, entry: str, parameters: str) -> str:
        ends = [node["args"] for node in self.nodes.values() if node["op"] == "output"]
        returned: Any = ends[-1]
        while isinstance(returned, list):
            (returned,) = returned
        shape = self.shape(returned["node"])
        total = " * ".join(["1LL", *shape])
        index = self.split("i_", shape)
        value = self.value(returned["node"], index)
        body = "\n".join(f"    {line}" for line in self.scopes[0])
        return _KERNEL.format(entry=entry, parameters=parameters, total=total, body=body, value=value)

    # ── names, shapes, scopes ───────────────────────────────────────────────────────────────────────────────────────

    def number(self, value: Any) -> str:
        """Return a number of the trace as C."""
        if isinstance(value, Mapping) and "size" in value:
            text = str(value["size"])
            Expression.parse(text, "the trace")
            if "power" in value:
                return f"powf(1.0f * {self.number({'size': text})}, {self.number(float(value['power']))})"
            return f"({text.replace('//', '/')})" if not _NAME.match(text) else text
        if isinstance(value, bool) or value is None:
            return str(bool(value)).lower()
        if isinstance(value, int):
            return str(value) if value >= 0 else f"({value})"
        if str(value) in ("inf", "-inf", "nan"):
            return {"inf": "INFINITY", "-inf": "(-INFINITY)", "nan": "NAN"}[str(value)]
        if isinstance(value, float):
            return f"({value!r}f)"
        raise NoKernel(f"the argument {str(value)[:40]!r}")

    def shape(self, name: str) -> list[str]:
        return [self.number(size) for size in self.nodes[name]["shape"] or ()]

    def fresh(self, prefix: str, depth: int) -> str:
        self.count += 1
        name = f"{prefix}{self.count}_"
        self.depth[name] = depth
        return name

    def depth_of(self, *texts: str) -> int:
        return max((self.depth.get(name, 0) for text in texts for name in re.findall(r"\w+", text)), default=0)

    def emit(self, expression: str, kind: str = "float") -> str:
        """Return a variable with a value, defined in the outermost scope that has everything it needs."""
        depth = self.depth_of(expression)
        name = self.fresh("v", depth)
        self.scopes[depth].append(f"const {kind} {name} = {expression};")
        return name

    def loop(
        self, outer: Sequence[str], extents: Sequence[str], starts: Sequence[tuple[str, str]],
        body: Callable[[Index, list[str]], list[str]], most: Sequence[str] | None = None,
    ) -> list[str]:  # fmt: skip # the body last
        """Return variables after a loop over all extents; `starts` are their types and initial values.

        `body` receives the loop's variables and these, and returns statements. The loop is placed where `outer` is
        known. `most` are the extents as sizes if they are not sizes themselves.
        """
        depth = self.depth_of(*outer, *(first for _, first in starts))
        saved, repeated = self.scopes[depth + 1 :], self.repeats[depth + 1 :]
        del self.scopes[depth + 1 :], self.repeats[depth + 1 :]
        held = []
        for kind, first in starts:
            held.append(self.fresh("s", depth))
            self.scopes[depth].append(f"{kind} {held[-1]} = {first};")
        variables = []
        for extent in most or extents:
            self.scopes.append([])
            self.repeats.append(extent)
            variables.append(self.fresh("k", len(self.scopes) - 1))
        self.steps.append(" * ".join(self.repeats))
        statements = body(tuple(variables), held)
        self.scopes[-1] += statements
        for variable, extent in zip(reversed(variables), reversed(extents), strict=True):
            inside = self.scopes.pop()
            self.repeats.pop()
            lines = [f"for (int {variable} = 0; {variable} < {extent}; ++{variable}) {{", *(f"    {x}" for x in inside)]
            self.scopes[-1] += [*lines, "}"]
        self.scopes += saved
        self.repeats += repeated
        return held

    def split(self, linear: str, shape: Sequence[str]) -> Index:
        """Return the index of an element from its number."""
        found, stride = list[str](), "1LL"
        for size in reversed(shape):
            found.append("0" if size == "1" else self.emit(f"(int)({linear} / ({stride}) % {size})", "int"))
            stride = f"{stride} * {size}"
        return tuple(reversed(found))

    def linear(self, index: Sequence[str], shape: Sequence[str]) -> str:
        text = "0LL"
        for at, size in zip(index, shape, strict=True):
            text = f"({text} * {size} + {at})"
        return text

    # ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def value(self, operand: Any, index: Index) -> str:
        """Return an element of a node's result, or a number."""
        name = operand["node"] if isinstance(operand, Mapping) and "node" in operand else operand
        if not isinstance(name, str) or name not in self.nodes:
            return self.number(operand)
        key = name, index
        if key not in self.known:
            self.known[key] = self.computed(name, index)
        return self.known[key]

    def spread(self, operand: Any, index: Index) -> str:
        """Return the element of an operand that is broadcast to an index."""
        if not isinstance(operand, Mapping) or "node" not in operand:
            return self.value(operand, ())
        shape = self.shape(operand["node"])
        own = index[len(index) - len(shape) :]
        at = tuple("0" if size == "1" else i for i, size in zip(own, shape, strict=True))
        return self.value(operand, at)

    def computed(self, name: str, index: Index) -> str:
        node = self.nodes[name]
        if node["op"] == "placeholder":
            kind = _TYPES.get(str(node["dtype"]))
            if kind is None:
                raise NoKernel(f"a tensor of {node['dtype']}")
            return self.emit(f"{self.pointers[name]}[{self.linear(index, self.shape(name))}]", kind)
        operation = re.sub(r"^aten\.", "", str(node["op"]))
        if operation == "<built-in function getitem>":
            source, which = node["args"]
            return self.several(self.nodes[source["node"]], index, which)
        base = operation.split(".")[0]
        args = [*node["args"]]
        if base in _BINARY:
            a, b = (self.spread(operand, index) for operand in args[:2])
            if (alpha := node["named"].get("alpha")) is not None:
                b = f"{self.number(alpha)} * {b}"
            return self.emit(_BINARY[base].format(a, b), _KINDS.get(base, self.kind(node)))
        if base in _UNARY:
            return self.emit(_UNARY[base].format(self.spread(args[0], index)), _KINDS.get(base, self.kind(node)))
        method = getattr(self, f"_{base.strip('_')}", None)
        if method is None:
            raise NoKernel(f"the operator {operation}")
        found: str = method(node, args, index)
        return found

    def kind(self, node: Mapping[str, Any]) -> str:
        return _TYPES.get(str(node["dtype"]), "float")

    def several(self, node: Mapping[str, Any], index: Index, which: Any) -> str:
        """Return an element of one of several results."""
        base = str(node["op"]).removeprefix("aten.").split(".")[0]
        if base in ("max", "min"):
            dim, keep = node["args"][1], len(node["args"]) > 2 and bool(node["args"][2])
            return self.extreme(node["args"][0], [dim], keep, index, base)[int(which)]
        if which == 0 and base in ("native_batch_norm", "native_layer_norm", "native_group_norm"):
            found: str = getattr(self, f"_{base}")(node, node["args"], index)
            return found
        if which == 0 and base in ("max_pool2d_with_indices", "max_pool3d_with_indices"):
            return self.pooled(node["args"], index, is_max=True)
        if base in ("split", "split_with_sizes", "unbind"):
            return self.part(node, base, index, int(which))
        raise NoKernel(f"the operator {base}")

    def part(self, node: Mapping[str, Any], base: str, index: Index, which: int) -> str:
        """Return an element of a part that a tensor is split into."""
        source, *more = node["args"]
        rank = len(self.shape(source["node"]))
        if base == "unbind":
            axis = int(more[0] if more else node["named"].get("dim", 0)) % rank
            return self.value(source, (*index[:axis], str(which), *index[axis:]))
        axis = int(more[1] if len(more) > 1 else node["named"].get("dim", 0)) % rank
        sizes = more[0] if isinstance(more[0], list) else [more[0]] * (which + 1)
        begin = " + ".join([f"({self.number(size)})" for size in sizes[:which]] or ["0"])
        return self.value(source, (*index[:axis], f"({index[axis]} + {begin})", *index[axis + 1 :]))

    # elementwise with arguments

    def _bitwise_not(self, node: Any, args: list[Any], index: Index) -> str:
        return self.emit(f"{'!' if node['dtype'] == 'bool' else '~'}{self.value(args[0], index)}", self.kind(node))

    def _bitwise_and(self, node: Any, args: list[Any], index: Index) -> str:
        a, b = (self.spread(operand, index) for operand in args[:2])
        return self.emit(f"{a} & {b}", self.kind(node))

    def _bitwise_or(self, node: Any, args: list[Any], index: Index) -> str:
        a, b = (self.spread(operand, index) for operand in args[:2])
        return self.emit(f"{a} | {b}", self.kind(node))

    def _leaky_relu(self, node: Any, args: list[Any], index: Index) -> str:
        x, slope = self.value(args[0], index), self.number(args[1] if len(args) > 1 else 0.01)
        return self.emit(f"{x} > 0.0f ? {x} : {slope} * {x}")

    def _elu(self, node: Any, args: list[Any], index: Index) -> str:
        x = self.value(args[0], index)
        alpha, scale, inner = (self.number(float(a)) for a in [*args[1:], *[1.0] * 3][:3])
        return self.emit(f"{scale} * ({x} > 0.0f ? {x} : {alpha} * (expf({x} * {inner}) - 1.0f))")

    def _hardtanh(self, node: Any, args: list[Any], index: Index) -> str:
        low, high = (self.number(float(a)) for a in (args[1:] or [-1.0, 1.0]))
        return self.emit(f"fminf(fmaxf({self.value(args[0], index)}, {low}), {high})")

    def _clamp(self, node: Any, args: list[Any], index: Index) -> str:
        x, (low, high) = self.value(args[0], index), [*args[1:], None, None][:2]
        x = x if low is None else f"fmaxf({x}, {self.number(float(low))})"
        return self.emit(x if high is None else f"fminf({x}, {self.number(float(high))})")

    def _gelu(self, node: Any, args: list[Any], index: Index) -> str:
        x = self.value(args[0], index)
        if node["named"].get("approximate", "none") == "tanh":
            inner = f"0.7978845608028654f * ({x} + 0.044715f * {x} * {x} * {x})"
            return self.emit(f"0.5f * {x} * (1.0f + tanhf({inner}))")
        return self.emit(f"0.5f * {x} * (1.0f + erff({x} * 0.7071067811865476f))")

    def _pow(self, node: Any, args: list[Any], index: Index) -> str:
        x, power = self.spread(args[0], index), args[1]
        if power in (2, 3):
            return self.emit(" * ".join([x] * int(power)))
        return self.emit(f"powf({x}, {self.spread(power, index)})")

    def _where(self, node: Any, args: list[Any], index: Index) -> str:
        condition, a, b = (self.spread(operand, index) for operand in args)
        return self.emit(f"{condition} ? {a} : {b}", self.kind(node))

    def _scalar_tensor(self, node: Any, args: list[Any], index: Index) -> str:
        return self.number(args[0])

    def _full_like(self, node: Any, args: list[Any], index: Index) -> str:
        return self.number(args[1])

    def _full(self, node: Any, args: list[Any], index: Index) -> str:
        return self.number(args[1])

    def _arange(self, node: Any, args: list[Any], index: Index) -> str:
        start, step = (args[0], args[2]) if len(args) > 2 else (0, 1)
        return self.emit(f"{self.number(start)} + {self.number(step)} * {index[0]}", self.kind(node))

    # other positions of the same elements

    def _view(self, node: Any, args: list[Any], index: Index) -> str:
        own, source = [self.number(s) for s in node["shape"]], self.shape(args[0]["node"])
        first, last = _equal(own, source), 0
        if first < len(own) or first < len(source):
            last = _equal(own[:first:-1], source[:first:-1])
        at, sizes = index[first : len(own) - last], own[first : len(own) - last]
        between = source[first : len(source) - last]
        if between and sizes:
            number = at[0] if len(at) == 1 else self.emit(self.linear(at, sizes), "long long")
            at = self.split(number, between) if len(between) > 1 else (number,)
        else:  # reshapes, which change only sizes
            at = ("0",) * len(between)
        return self.value(args[0], (*index[:first], *at, *index[len(own) - last :]))

    _reshape = _unsafe_view = _view

    def _permute(self, node: Any, args: list[Any], index: Index) -> str:
        rank, at = len(index), {}
        for i, axis in zip(index, args[1], strict=True):
            at[axis % rank] = i
        return self.value(args[0], tuple(at[axis] for axis in range(rank)))

    def _unsqueeze(self, node: Any, args: list[Any], index: Index) -> str:
        axis = args[1] % len(index)
        return self.value(args[0], index[:axis] + index[axis + 1 :])

    def _squeeze(self, node: Any, args: list[Any], index: Index) -> str:
        rank = len(self.shape(args[0]["node"]))
        dims = args[1] if isinstance(args[1], list) else [args[1]]
        left = iter(index)
        return self.value(
            args[0], tuple("0" if axis in {d % rank for d in dims} else next(left) for axis in range(rank))
        )

    def _expand(self, node: Any, args: list[Any], index: Index) -> str:
        return self.spread(args[0], index)

    def _flip(self, node: Any, args: list[Any], index: Index) -> str:
        shape, dims = self.shape(args[0]["node"]), {d % len(index) for d in args[1]}
        at = (f"({s} - 1 - {i})" if axis in dims else i for axis, (i, s) in enumerate(zip(index, shape, strict=True)))
        return self.value(args[0], tuple(at))

    def _slice(self, node: Any, args: list[Any], index: Index) -> str:
        axis, start, step = args[1] if len(args) > 1 else 0, args[2] if len(args) > 2 else 0, [*args, 1][4:5]
        first = self.number(start or 0)
        if first.startswith("(-"):
            raise NoKernel("a slice from the end")
        axis %= len(index)
        i = f"({first} + {self.number(step[0] if step else 1)} * {index[axis]})"
        return self.value(args[0], (*index[:axis], i, *index[axis + 1 :]))

    def _select(self, node: Any, args: list[Any], index: Index) -> str:
        axis, at = args[1] % (len(index) + 1), self.number(args[2])
        return self.value(args[0], (*index[:axis], at, *index[axis:]))

    def _cat(self, node: Any, args: list[Any], index: Index) -> str:
        axis = (args[1] if len(args) > 1 else 0) % len(index)
        found, begin = "", "0"
        for number, part in enumerate(args[0]):
            size = self.shape(part["node"])[axis]
            at = f"min(max({index[axis]} - ({begin}), 0), {size} - 1)"
            value = self.value(part, (*index[:axis], at, *index[axis + 1 :]))
            begin = f"{begin} + {size}"
            found += value if number == len(args[0]) - 1 else f"{index[axis]} < ({begin}) ? {value} : "
        return self.emit(found, self.kind(node))

    def _gather(self, node: Any, args: list[Any], index: Index) -> str:
        axis = args[1] % len(index)
        return self.value(args[0], (*index[:axis], f"(int){self.value(args[2], index)}", *index[axis + 1 :]))

    def _embedding(self, node: Any, args: list[Any], index: Index) -> str:
        rank = len(self.shape(args[1]["node"]))
        return self.value(args[0], (f"(int){self.value(args[1], index[:rank])}", *index[rank:]))

    # loops

    def reduced(
        self, operand: Any, dims: Sequence[int] | None, keep: bool, index: Index, starts: Sequence[tuple[str, str]],
        body: Callable[[str, list[str], Index], list[str]],
    ) -> tuple[list[str], str]:  # fmt: skip # the body last
        """Return the variables of a loop over dimensions of an operand, and the number of its elements."""
        shape = self.shape(operand["node"])
        over = sorted({d % len(shape) for d in dims}) if dims else [*range(len(shape))]
        left = iter([i for d, i in enumerate(index) if not keep or d not in over])
        outer = {d: next(left) for d in range(len(shape)) if d not in over}

        def inside(variables: Index, held: list[str]) -> list[str]:
            at = dict(zip(over, variables, strict=True)) | outer
            return body(self.value(operand, tuple(at[d] for d in range(len(shape)))), held, variables)

        extents = [shape[d] for d in over]
        return self.loop([*outer.values()], extents, starts, inside), " * ".join([f"({e})" for e in extents] or ["1"])

    def total(self, operand: Any, dims: Any, keep: bool, index: Index, of: str = "{}") -> tuple[str, str]:
        def add(x: str, held: list[str], _: Index) -> list[str]:
            return [f"{held[0]} += {of.format(x, x)};"]

        (held, *_), count = self.reduced(operand, dims, keep, index, [("float", "0.0f")], add)
        return held, f"(1.0f * {count})"

    def _sum(self, node: Any, args: list[Any], index: Index) -> str:
        return self.total(args[0], *self.over(args), index)[0]

    def _any(self, node: Any, args: list[Any], index: Index) -> str:
        def found(x: str, held: list[str], _: Index) -> list[str]:
            return [f"{held[0]} = {held[0]} || {x};"]

        return self.reduced(args[0], *self.over(args), index, [("bool", "false")], found)[0][0]

    def _mean(self, node: Any, args: list[Any], index: Index) -> str:
        held, count = self.total(args[0], *self.over(args), index)
        return self.emit(f"{held} / {count}")

    def over(self, args: list[Any]) -> tuple[Any, bool]:
        """Return the dimensions of a reduction, None for all, and whether they are kept."""
        dims = args[1] if len(args) > 1 else None
        return dims if dims is None or isinstance(dims, list) else [dims], len(args) > 2 and bool(args[2])

    def _linalg_vector_norm(self, node: Any, args: list[Any], index: Index) -> str:
        order, (dims, keep) = args[1] if len(args) > 1 else 2, self.over([args[0], *args[2:]])
        if order not in (1, 2):
            raise NoKernel(f"a norm of order {order}")
        held, _ = self.total(args[0], dims, keep, index, "fabsf({})" if order == 1 else "{} * {}")
        return held if order == 1 else self.emit(f"sqrtf({held})")

    def extreme(self, operand: Any, dims: Any, keep: bool, index: Index, which: str) -> list[str]:
        """Return the largest or the smallest element and its index along the one dimension; the first among equals."""
        sign = ">" if "max" in which else "<"

        def better(x: str, held: list[str], variables: Index) -> list[str]:
            return [f"if ({x} {sign} {held[0]}) {{ {held[0]} = {x}; {held[1]} = {variables[-1]}; }}"]

        first = "-INFINITY" if sign == ">" else "INFINITY"
        return self.reduced(operand, dims, keep, index, [("float", first), ("int", "0")], better)[0]

    def _argmax(self, node: Any, args: list[Any], index: Index) -> str:
        dims, keep = self.over(args)
        if dims is None:
            raise NoKernel("an index over all dimensions")
        return self.extreme(args[0], dims, keep, index, str(node["op"]))[1]

    _argmin = _argmax

    def _amax(self, node: Any, args: list[Any], index: Index) -> str:
        return self.extreme(args[0], *self.over(args), index, str(node["op"]))[0]

    _amin = _amax

    def _softmax(self, node: Any, args: list[Any], index: Index) -> str:
        largest, added = self.exponentials(args, index)
        return self.emit(f"expf({self.value(args[0], index)} - {largest}) / {added}")

    def _log_softmax(self, node: Any, args: list[Any], index: Index) -> str:
        largest, added = self.exponentials(args, index)
        return self.emit(f"{self.value(args[0], index)} - {largest} - logf({added})")

    def exponentials(self, args: list[Any], index: Index) -> tuple[str, str]:
        """Return the maximum of a row, and the sum of the exponentials of its elements minus the maximum."""
        largest = self.extreme(args[0], [args[1]], True, index, "max")[0]

        def add(x: str, held: list[str], _: Index) -> list[str]:
            return [f"{held[0]} += expf({x} - {largest});"]

        return largest, self.reduced(args[0], [args[1]], True, index, [("float", "0.0f")], add)[0][0]

    def _cumsum(self, node: Any, args: list[Any], index: Index, sign: str = "+", first: str = "0.0f") -> str:
        axis = args[1] % len(index)

        def body(variables: Index, held: list[str]) -> list[str]:
            return [f"{held[0]} {sign}= {self.value(args[0], (*index[:axis], variables[0], *index[axis + 1 :]))};"]

        size = self.shape(args[0]["node"])[axis]
        return self.loop(index, [f"{index[axis]} + 1"], [("float", first)], body, [size])[0]

    def _cumprod(self, node: Any, args: list[Any], index: Index) -> str:
        return self._cumsum(node, args, index, "*", "1.0f")

    # normalisation

    def normalised(
        self, x: str, operand: Any, dims: Sequence[int], index: Index, eps: Any, scale: str, shift: str
    ) -> str:
        """Return an element minus the mean over these dimensions of an operand, over the root of their variance."""
        added, count = self.total(operand, dims, True, index)
        mean = self.emit(f"{added} / {count}")
        squares, _ = self.total(operand, dims, True, index, f"({{}} - {mean}) * ({{}} - {mean})")
        return self.emit(f"({x} - {mean}) / sqrtf({squares} / {count} + {self.number(float(eps))}) * {scale} + {shift}")

    def channel(self, operand: Any, at: Index, otherwise: str) -> str:
        return otherwise if operand is None else self.value(operand, at)

    def _native_layer_norm(self, node: Any, args: list[Any], index: Index) -> str:
        rank, within = len(index), len(args[1])
        own = index[rank - within :]
        scale, shift = self.channel(args[2], own, "1.0f"), self.channel(args[3], own, "0.0f")
        dims = range(rank - within, rank)
        return self.normalised(self.value(args[0], index), args[0], dims, index, args[4], scale, shift)

    def _native_batch_norm(self, node: Any, args: list[Any], index: Index) -> str:
        x, at = self.value(args[0], index), (index[1],)
        scale, shift = self.channel(args[1], at, "1.0f"), self.channel(args[2], at, "0.0f")
        if not args[5]:
            mean, variance = self.value(args[3], at), self.value(args[4], at)
            return self.emit(f"({x} - {mean}) / sqrtf({variance} + {self.number(float(args[7]))}) * {scale} + {shift}")
        dims = [d for d in range(len(index)) if d != 1]
        return self.normalised(x, args[0], dims, index, args[7], scale, shift)

    def _native_group_norm(self, node: Any, args: list[Any], index: Index) -> str:
        channels, groups = self.shape(args[0]["node"])[1], self.number(args[6])
        each = f"({channels} / {groups})"
        first = self.emit(f"{index[1]} / {each} * {each}", "int")
        shape = self.shape(args[0]["node"])

        def sums(of: str) -> str:
            def body(variables: Index, held: list[str]) -> list[str]:
                x = self.value(args[0], (index[0], f"({first} + {variables[0]})", *variables[1:]))
                return [f"{held[0]} += {of.format(x, x)};"]

            return self.loop([index[0], first], [each, *shape[2:]], [("float", "0.0f")], body)[0]

        count = " * ".join(["1.0f", each, *shape[2:]])
        mean = self.emit(f"{sums('{}')} / ({count})")
        squares = sums(f"({{}} - {mean}) * ({{}} - {mean})")
        scale, shift = self.channel(args[1], (index[1],), "1.0f"), self.channel(args[2], (index[1],), "0.0f")
        x, eps = self.value(args[0], index), self.number(float(args[7]))
        return self.emit(f"({x} - {mean}) / sqrtf({squares} / ({count}) + {eps}) * {scale} + {shift}")

    # products

    def _mm(self, node: Any, args: list[Any], index: Index) -> str:
        *batch, i, j = index

        def body(variables: Index, held: list[str]) -> list[str]:
            a, b = self.value(args[0], (*batch, i, *variables)), self.value(args[1], (*batch, *variables, j))
            return [f"{held[0]} += {a} * {b};"]

        return self.loop(index, [self.shape(args[0]["node"])[-1]], [("float", "0.0f")], body)[0]

    _bmm = _mm

    def _addmm(self, node: Any, args: list[Any], index: Index) -> str:
        return self.emit(f"{self.spread(args[0], index)} + {self._mm(node, args[1:], index)}")

    def _convolution(self, node: Any, args: list[Any], index: Index) -> str:
        x, weight, bias, strides, padding, dilation, transposed, _, groups = args
        of_x, of_w = self.shape(x["node"]), self.shape(weight["node"])
        rank, groups = len(of_x) - 2, self.number(groups)
        strides, padding, dilation = (
            [*map(self.number, v * rank if len(v) == 1 else v)] for v in (strides, padding, dilation)
        )
        out_each = of_w[1] if transposed else f"({of_w[0]} / {groups})"
        in_each = f"({of_x[1]} / {groups})"
        group = self.emit(f"{index[1]} / {out_each}", "int") if groups != "1" else "0"

        def body(variables: Index, held: list[str]) -> list[str]:
            channel, *taps = variables
            places, conditions = [], []
            for d, tap in enumerate(taps):
                at, size = index[2 + d], of_x[2 + d]
                if transposed:
                    place = self.emit(f"{at} + {padding[d]} - {tap} * {dilation[d]}", "int")
                    conditions += [f"{place} >= 0", f"{place} % {strides[d]} == 0", f"{place} / {strides[d]} < {size}"]
                    place = f"{place} / {strides[d]}"
                else:
                    place = self.emit(f"{at} * {strides[d]} - {padding[d]} + {tap} * {dilation[d]}", "int")
                    conditions += [f"{place} >= 0", f"{place} < {size}"] if padding[d] != "0" else []
                places.append(f"min(max({place}, 0), {size} - 1)" if conditions else place)
            source = channel if group == "0" else f"({group} * {in_each} + {channel})"
            value = self.value(x, (index[0], source, *places))
            at_weight = (source, f"({index[1]} % {out_each})", *taps) if transposed else (index[1], channel, *taps)
            product = f"{held[0]} += {value} * {self.value(weight, at_weight)};"
            return [f"if ({' && '.join(conditions)}) {product}" if conditions else product]

        first = "0.0f" if bias is None else self.value(bias, (index[1],))
        return self.loop(index, [in_each, *of_w[2:]], [("float", first)], body)[0]

    def pooled(self, args: list[Any], index: Index, is_max: bool) -> str:
        shape = self.shape(args[0]["node"])
        taps = [self.number(k) for k in args[1]]
        rank, plain = len(taps), len(shape) - len(taps)
        given = [*args[2:], *[None] * 4]
        strides = [self.number(s) for s in given[0]] if given[0] else taps
        padding = [self.number(p) for p in given[1]] if given[1] else ["0"] * rank
        dilation = [self.number(d) for d in given[2]] if is_max and given[2] else ["1"] * rank
        ceil, include = bool(given[3 if is_max else 2]), is_max or len(args) < 6 or bool(args[5])
        if ceil:
            raise NoKernel("pooling with ceil_mode")

        def body(variables: Index, held: list[str]) -> list[str]:
            conditions, places = [], []
            for d, tap in enumerate(variables):
                at = index[plain + d]
                place = self.emit(f"{at} * {strides[d]} - {padding[d]} + {tap} * {dilation[d]}", "int")
                size = shape[plain + d]
                conditions += [f"{place} >= 0", f"{place} < {size}"] if padding[d] != "0" else []
                places.append(f"min(max({place}, 0), {size} - 1)" if conditions else place)
            x = self.value(args[0], (*index[:plain], *places))
            took = f"{held[0]} = fmaxf({held[0]}, {x});" if is_max else f"{held[0]} += {x}; ++{held[1]};"
            return [f"if ({' && '.join(conditions)}) {{ {took} }}" if conditions else took]

        starts = [("float", "-INFINITY" if is_max else "0.0f"), *([] if is_max else [("int", "0")])]
        held = self.loop(index, taps, starts, body)
        if is_max:
            return held[0]
        count = f"({' * '.join(taps)})" if include else held[1]
        return self.emit(f"{held[0]} / {count}")

    def _avg_pool2d(self, node: Any, args: list[Any], index: Index) -> str:
        return self.pooled(args, index, is_max=False)

    _avg_pool1d = _avg_pool3d = _avg_pool2d


_KERNEL = """#include <math.h>
// Each thread computes one element of the output from all that it needs: correct, and a place to start from.
#ifndef block_size_x
#define block_size_x 128
#endif

extern "C" __global__ void __launch_bounds__(block_size_x) {entry}({parameters}) {{
    const long long i_ = (long long)blockIdx.x * block_size_x + threadIdx.x;
    if (i_ >= {total}) return;
{body}
    out[i_] = {value};
}}
"""
