"""Convert a kernel described for other auto-tuners (CUDA text with `#define` knobs, arguments, launch) to a folder."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, islice, product
from math import prod
from typing import Any

from evoengine.errors import UsageError
from evoengine.formats.folder import Knobs, NewFolder, Rule, space_text
from evoengine.space.expression import Expression
from evoengine.stages.render import without_own

# Parse values and conditions that other tuners store as Python text, by small grammars and without executing them.

MAX_VALUES = 4096
LARGEST = 2**53
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip # a table
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip # a table


class NotLiteral(ValueError):
    """A text that is not of this grammar; the message names the first part that does not fit."""


def values_of(text: str) -> list[Any]:
    """Return the values of `[16, 32]`, `range(1, 9)`, `[32 * i for i in range(1, 32) if i % 2 == 0]`, or of one number.

    Raises NotLiteral for anything else, for more than MAX_VALUES values, and for numbers beyond 2^53.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        found = _value(tree, {})
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError, TypeError, OverflowError) as error:
        reason = error if isinstance(error, NotLiteral) else f"{type(error).__name__}: {error}"
        raise NotLiteral(f"`{text[:80]}`: {reason}") from None
    values = [*found] if isinstance(found, list | range) else [found]
    if any(isinstance(value, list | range) for value in values):
        raise NotLiteral(f"`{text[:80]}`: a list of lists")
    return values


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return _bounded_number(value)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _bounded_number(-_value(operand, names))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _value(left, names), _value(right, names)
            if not isinstance(exponent, int) or not 0 <= exponent <= 64 or abs(base) > LARGEST:
                raise NotLiteral("a power with an exponent that is not an integer from 0 to 64")
            return _bounded_number(base**exponent)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _combined(_OPERATORS[type(op)], _value(left, names), _value(right, names))
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, names) for item in items]
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if 1 <= len(args) <= 3:
            return _bounded_list(range(*(_value(a, names) for a in args)))
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=[inner], keywords=[]):
            return list(_value(inner, names))
        case ast.ListComp(elt=element, generators=[ast.comprehension(target=ast.Name(id=name), iter=over, ifs=ifs)]):
            items = _bounded_list(_value(over, names))
            kept = [{**names, name: item} for item in items]
            return [_scalar(_value(element, own)) for own in kept if all(_holds(test, own) for test in ifs)]
    raise NotLiteral(f"holds {ast.unparse(node)[:40]}, which is not a number, list, range or comprehension over one")


def _scalar(value: Any) -> Any:
    if isinstance(value, list | range):
        raise NotLiteral("a list of lists")
    return value


def _combined(op: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if isinstance(left, list) and isinstance(right, list):
        return _bounded_list(op(left, right))
    if isinstance(left, list | str | range) or isinstance(right, list | str | range):
        raise NotLiteral("calculates with something that is not a number")
    return _bounded_number(op(left, right))


def _bounded_list(items: Any) -> Any:
    if not isinstance(items, list | range) or len(items) > MAX_VALUES:
        raise NotLiteral(f"something that is not a list of at most {MAX_VALUES} values")
    return items


def _bounded_number(value: Any) -> Any:
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise NotLiteral("a number beyond 2^53")
    return value


def _holds(node: ast.expr, names: Mapping[str, Any]) -> bool:
    match node:
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)(_holds(value, names) for value in values)
        case ast.Compare(left=left, ops=[comparison], comparators=[right]) if type(comparison) in _COMPARISONS:
            return bool(_COMPARISONS[type(comparison)](_value(left, names), _value(right, names)))
    raise NotLiteral(f"chooses by {ast.unparse(node)[:40]}, which is not a comparison")


def expression_of(text: str, names: Iterable[str]) -> str:
    """Translate a C condition or size over `names` to an expression of a space file; `&&`, `||` and `!` are converted.

    Raises NotLiteral that names the unsupported construct or the unknown name.
    """
    spelled = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or ")).strip()
    try:
        expression = Expression.parse(spelled, "it")
    except UsageError as error:
        raise NotLiteral(str(error).removeprefix("it: ")) from None
    if unknown := sorted(expression.names - set(names)):
        raise NotLiteral(f"`{text}` names {', '.join(unknown)}, which is not a knob or axis")
    return " ".join(expression.text.split())


STUB = '''"""What the kernel must compute. The file it was imported from has no code for it."""


def run({names}):
    raise NotImplementedError("write in reference.py what the kernel computes, with torch or NumPy")
'''
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Argument:
    """An input or output. `size` counts elements; None if it is passed by value."""

    name: str
    dtype: str
    size: int | None
    value: float | int | None = None
    output: bool = False
    inout: bool = False
    """whether an output is also read"""
    draw: Mapping[str, Any] = field(default_factory=lambda: {"type": "random"})
    is_parameter: bool = True
    """whether it is a parameter of the kernel; otherwise it is only the contents of a variable in `constants`"""


class KernelText(str):
    """The text of a CUDA kernel that is a reference, in place of Python text."""


@dataclass
class TunedKernel:
    """A kernel of another tuner, as an importer read it.

    `problem_size` and `grid_div` are expressions along x, y and z; without `grid_div` the grid is `problem_size`
    itself.
    """

    name: str
    entry: str
    text: str
    knobs: Knobs
    arguments: Sequence[Argument]
    conditions: Sequence[str] = ()
    block: Sequence[str] = ("256", "1", "1")
    problem_size: Sequence[str] = ("1",)
    grid_div: Sequence[Sequence[str]] = ((), (), ())
    shared: str = "0"
    constants: Mapping[str, str] = field(default_factory=dict)
    """`__constant__` variable → the argument whose contents it has"""
    answered_by: TunedKernel | None = None
    """a kernel of one configuration that is the reference, with arguments named as in this one"""
    remarks: list[str] = field(default_factory=list)


def folder_of(kernel: TunedKernel, reference: str | None) -> NewFolder:
    """Return the folder, with remarks on everything that could not be imported.

    Raises UsageError if nothing can be imported.
    """
    sizes = kernel_sizes(kernel)
    axes = sizes.axes
    kernel.knobs = {knob: values for knob, values in kernel.knobs.items() if knob not in sizes.in_text}
    names = {*kernel.knobs, *axes}
    rules = _rules(kernel, names)
    grid = [_grid(kernel, axes, names, i) for i in range(3)]
    block = [_launch_size(kernel, text, names) for text in kernel.block]
    text = extern_c(kernel.text, kernel.entry)
    start = first_configuration(kernel.knobs, rules, axes)
    given: Any = reference
    if reference is None and kernel.answered_by is not None:
        given = _answering_reference(kernel.answered_by, sizes)
        kernel.remarks.append(
            f"the answer's values: candidates are compared with the kernel {kernel.answered_by.entry}, by which the "
            "script makes it, in reference.cu"
        )
    elif reference is None:
        kernel.remarks.append(
            "a reference: candidates are compared with the kernel itself at the space's start point, in reference.cu; "
            "say what is right in a reference.py, or give --reference FILE.py"
        )
        given = _own_reference(text, kernel, start, sizes, block, grid)
    elif isinstance(reference, KernelText):
        given = _naive_reference(reference, kernel, axes, names)
    problem = _problem(kernel, sizes, given, is_own=reference is None or isinstance(reference, KernelText))
    space = space_text(kernel.name, kernel.knobs, rules, block, grid, kernel.shared, [start] if start else ())
    return NewFolder(problem, space, text, is_template=False, remarks=tuple(kernel.remarks))


def _problem(kernel: TunedKernel, sizes: Sizes, reference: Any, *, is_own: bool) -> dict[str, Any]:
    """Return problem.json.

    With a kernel as reference (`is_own`) every output is updated in place; with any other reference, only those that
    the kernel reads.
    """
    axes, shapes = sizes.axes, sizes.shapes
    kept = {a.name for a in kernel.arguments if a.output and (is_own or a.inout)}
    inputs = [a for a in kernel.arguments if (not a.output or a.name in kept) and a.name not in axes]
    free = [name for name in axes if name not in sizes.tied]
    wide = {a.name for a in kernel.arguments if a.size is None and a.dtype == "int64"}
    problem = {
        "name": kernel.name,
        "entry": kernel.entry,
        "axes": {
            name: ({"type": "expr", "expression": sizes.tied[name]} if name in sizes.tied else {"type": "var"})
            | ({"dtype": "int64"} if name in wide else {})
            for name in axes
        },
        "inputs": {a.name: _item(a, shapes) for a in inputs},
        "inout": sorted(kept),
        "outputs": {a.name: _item(a, shapes) for a in kernel.arguments if a.output and a.name not in kept},
        "parameters": [a.name for a in kernel.arguments if a.is_parameter],
        "constants": dict(kernel.constants),
        "compile_time": [name for name in free if name in sizes.in_text],
        "reference": reference,
        "workloads": _workloads(kernel, sizes, free, {a.name: _draw(a, axes) for a in inputs}),
    }
    if not kept:
        del problem["inout"]
    return problem


def _workloads(
    kernel: TunedKernel, sizes: Sizes, free: Sequence[str], draws: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the kernel's own size as the example, preceded by a smaller one that the gate can afford."""
    own = {name: sizes.axes[name] for name in free}
    small = {name: _affordable(size) if name in sizes.in_text else size for name, size in own.items()}
    if small == own:
        return [{"axes": own, "inputs": draws}]
    named = ", ".join(f"{name}={size}" for name, size in own.items())
    kernel.remarks.append(
        f"its own size as the example: the text holds it, and the gate runs the whole problem; tune {named} by "
        "--problem"
    )
    return [{"axes": each, "inputs": draws} for each in (small, own)]


def _item(argument: Argument, shapes: Mapping[str, list[str]]) -> dict[str, Any]:
    return {"shape": None if argument.size is None else shapes[argument.name], "dtype": argument.dtype}


def _draw(argument: Argument, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the draw, with offsets that end at an axis and indices below one if the script's arrays have such."""
    if argument.size is None:
        return {"type": "scalar", "value": argument.value}
    draw, named = dict(argument.draw), {axes[name]: name for name in reversed([*axes])}
    if draw["type"] == "indptr":
        if draw["total"] in named:
            return draw | {"total": named[draw["total"]]}
        return {"type": "integers", "low": 0, "high": draw["total"] + 1}
    if draw["type"] == "integers" and draw["low"] == 0 and draw["high"] > LEAST_SIZE:
        above = [size for size in named if draw["high"] <= size <= 1.25 * draw["high"]]
        return draw | {"high": named[min(above)]} if above else draw
    return draw


LEAST_SIZE = 64
"""smallest number in the text that may be a size of the problem"""
LARGE = 512
"""smallest size in the text that is too large for the gate"""
_DEFINE = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(\d{2,9})[uUlL]*[ \t]*(?://[^\n]*|/\*[^\n]*)?$", re.MULTILINE
)
_FACTORS = (2, 3, 4, 6, 8, 16)
_MOST_BORDER = 1024


@dataclass(frozen=True)
class Sizes:
    """The sizes of a kernel's problem.

    `axes` has their values, `in_text` those that the text defines as macros, and `tied` those that always equal an
    earlier one. `shapes` has every tensor's shape in terms of them.
    """

    axes: dict[str, int]
    in_text: frozenset[str]
    tied: dict[str, str]
    shapes: dict[str, list[str]]


def kernel_sizes(kernel: TunedKernel) -> Sizes:
    """Return the integer arguments and the numbers of the text that are sizes of a tensor or of the problem.

    Sizes of equal value are tied to one another, since it is unknown which of them is meant where.
    """
    values = {a.name: int(a.value or 0) for a in kernel.arguments if a.size is None and a.dtype in ("int32", "int64")}
    values |= _ends(kernel, values)
    macros = {name: int(number) for name, number in _DEFINE.findall(kernel.text) if name not in kernel.knobs}
    macros |= {k: v[0] for k, v in kernel.knobs.items() if len(v) == 1 and type(v[0]) is int and k not in kernel.block}
    known = {**macros, **values}
    usable = {n: v for n, v in known.items() if v > 1 and (n in values or v >= LEAST_SIZE)}
    first = {value: name for name, value in reversed(usable.items())}
    shapes = {a.name: _shape(a.size, {n: v for v, n in first.items()}) for a in kernel.arguments if a.size is not None}
    used = {name for shape in shapes.values() for size in shape for name in re.findall(r"[A-Za-z_]\w*", size)}
    used |= {first[int(size)] for size in kernel.problem_size if size.strip().isdigit() and int(size) in first}
    if not used and kernel.arguments:
        kernel.remarks.append(
            "sizes that can vary: the gate runs at the file's own sizes; name axes in problem.json where the "
            "kernel takes others"
        )
    equal = {name: first[value] for name, value in usable.items() if first[value] in used}
    axes = {name: usable[name] for name in (*sorted(used, key=list(usable).index), *equal) if name in equal}
    tied = {name: other for name, other in equal.items() if other != name}
    in_text = frozenset(n for n in axes if n in macros or any(o == n and m in macros for m, o in tied.items()))
    return Sizes(axes, in_text, tied, shapes)


def _ends(kernel: TunedKernel, values: Mapping[str, int]) -> dict[str, int]:
    """Return a size for each last offset that is the size of some array, such as the entries of a sparse matrix."""
    sizes = {a.size for a in kernel.arguments}
    ends = {a.name: a.draw["total"] for a in kernel.arguments if a.draw.get("type") == "indptr"}
    return {f"{n}_end": end for n, end in ends.items() if end in sizes and end not in values.values()}


def _shape(size: int, named: Mapping[str, int]) -> list[str]:
    """Return a tensor's shape in terms of sizes: [n], [m, k], [2 * n], [n + 1], [m + 16, k + 16], or a number."""
    for count in (1, 2):
        for pair in combinations_with_replacement(named, count):
            if _product(named, pair) == size:
                return [*pair]
    for count in (1, 2):
        for pair in combinations_with_replacement(named, count):
            for factor in _FACTORS:
                if factor * _product(named, pair) == size:
                    return [f"{factor} * {pair[0]}", *pair[1:]]
    for name, value in named.items():
        if value + 1 == size:
            return [f"{name} + 1"]
    for m, k in combinations_with_replacement([n for n in named if named[n] >= LEAST_SIZE], 2):
        for border in range(1, _MOST_BORDER):
            if (named[m] + border) * (named[k] + border) == size:
                return [f"{m} + {border}", f"{k} + {border}"]
    return [str(size)]


def _product(values: Mapping[str, int], names: Sequence[str]) -> int:
    return prod(values[name] for name in names)


def _affordable(size: int) -> int:
    """Return a smaller size with the same remainder modulo 256 if the size is large."""
    return size if size < LARGE else 256 + size % 256


MOST_TRIED = 200_000


def first_configuration(knobs: Knobs, rules: Sequence[Rule], axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the first combination of values, in order, that all rules allow; {} if none is found."""
    conditions = [Expression.parse(rule.expr, "it") for rule in rules]
    for values in islice(product(*knobs.values()), MOST_TRIED):
        chosen = dict(zip(knobs, values, strict=True))
        try:
            if all(condition.evaluate({**axes, **chosen}) for condition in conditions):
                return chosen
        except UsageError:
            continue
    return {}


def _naive_reference(text: KernelText, kernel: TunedKernel, axes: Mapping[str, int], names: set[str]) -> dict[str, Any]:
    """Return a naive kernel as a reference, with the tuned kernel's parameters and a thread for each element.

    Raises UsageError unless the text has exactly one kernel.
    """
    entries = re.findall(r"__global__[^;{}()]*?(?:\([^()]*\)[^;{}()]*?)?\b(\w+)\s*\(", _COMMENT.sub(" ", text))
    if len(entries) != 1:
        found = f"it has {', '.join(entries)}" if entries else "it has none"
        raise UsageError(f"the reference must have one __global__ function, which is run as it is; {found}")
    x, y, z = (_problem_extent(kernel, axes, names, i) for i in range(3))
    grid = [f"ceil_div({x}, {NAIVE_THREADS})", y, z]
    return {"file": "reference.cu", "text": str(text), "entry": entries[0], "threads": NAIVE_THREADS, "grid": grid}


NAIVE_THREADS = 128
"""threads of a naive kernel's blocks, along x"""


def _problem_extent(kernel: TunedKernel, axes: Mapping[str, int], names: set[str], i: int) -> str:
    size = kernel.problem_size[i] if i < len(kernel.problem_size) else "1"
    by_value = {str(value): name for name, value in axes.items()}
    return _launch_size(kernel, by_value.get(size.strip(), size), names)


def _own_reference(
    text: str, kernel: TunedKernel, start: Mapping[str, Any], sizes: Sizes, block: Sequence[str], grid: Sequence[str]
) -> dict[str, Any]:
    """Return the kernel at its start point as a reference of problem.json."""
    macros = "".join(f"#define {knob} {int(v) if isinstance(v, bool) else v}\n" for knob, v in start.items())
    plain = without_own(text, [*start, *sizes.axes])

    def chosen(size: str) -> str:
        return re.sub(r"[A-Za-z_]\w*", lambda name: str(start.get(name[0], name[0])), size)

    return {
        "file": "reference.cu",
        "text": f"// The kernel at the start point of its space: what candidates are compared with.\n{macros}{plain}",
        "entry": kernel.entry,
        "threads": [chosen(size) for size in block],
        "grid": [chosen(size) for size in grid],
        "shared": chosen(str(kernel.shared)),
    }


def _answering_reference(kernel: TunedKernel, sizes: Sizes) -> dict[str, Any]:
    """Return the kernel of one configuration as a reference of problem.json."""
    start, names = {knob: values[0] for knob, values in kernel.knobs.items()}, {*kernel.knobs, *sizes.axes}
    grid = [_grid(kernel, sizes.axes, names, i) for i in range(3)]
    block = [_launch_size(kernel, text, names) for text in kernel.block]
    made = _own_reference(extern_c(kernel.text, kernel.entry), kernel, start, sizes, block, grid)
    first_line = "// What candidates are compared with.\n"
    text = first_line + made["text"].partition("\n")[2]
    return {**made, "text": text, "parameters": [a.name for a in kernel.arguments]}


def _rules(kernel: TunedKernel, names: set[str]) -> list[Rule]:
    rules = []
    for condition in kernel.conditions:
        try:
            rules.append(Rule(expression_of(condition, names), "the file that it was imported from says so"))
        except NotLiteral as error:
            kernel.remarks.append(f"the condition {error}")
    return rules


def _grid(kernel: TunedKernel, axes: Mapping[str, int], names: set[str], i: int) -> str:
    """Return the number of blocks along a direction: the problem's size divided by each of the grid's divisors."""
    spelled = _problem_extent(kernel, axes, names, i)
    divisors = [d for d in kernel.grid_div[i] if d.strip() != "1"]
    return f"ceil_div({spelled}, {' * '.join(f'({d})' for d in divisors)})" if divisors else spelled


def _launch_size(kernel: TunedKernel, text: str, names: set[str]) -> str:
    try:
        return expression_of(text, names)
    except NotLiteral as error:
        kernel.remarks.append(f"a size of the launch, {error}; space.toml has 1 there")
        return "1"


def require_divisors(kernel: TunedKernel) -> None:
    """Remove divisors of the grid that are not expressions of knobs, with a remark."""
    kept = []
    for divisors in kernel.grid_div:
        good = []
        for divisor in divisors:
            try:
                good.append(expression_of(divisor, kernel.knobs))
            except NotLiteral as error:
                kernel.remarks.append(f"a divisor of the grid, {error}")
        kept.append(good)
    kernel.grid_div = kept


def extern_c(text: str, entry: str) -> str:
    """Return the text with its entry declared `extern "C"`, unless it is already, or is within `extern "C" {`.

    The driver finds the entry by that name.
    """
    if re.search(rf'extern\s*"C"\s*(?:\{{|[^;{{}}]*\b{re.escape(entry)}\s*\()', text):
        return text
    return re.sub(rf"\b__global__\b(?=[^;{{}}]*\b{re.escape(entry)}\s*\()", 'extern "C" __global__', text, count=1)


@dataclass(frozen=True)
class Parameter:
    """A parameter as the kernel's own text declares it."""

    name: str
    is_const: bool


def parameters_of(text: str, entry: str) -> list[Parameter]:
    """Return the kernel's parameters from its text. Raises UsageError if the text has no kernel of that name."""
    found = re.search(rf"__global__[^;{{}}]*?\b{re.escape(entry)}\s*\(([^)]*)\)", _COMMENT.sub(" ", text))
    if not found:
        raise UsageError(f"the kernel's text has no __global__ function {entry}")
    parts = [part.strip() for part in found[1].split(",") if part.strip()]
    names = [re.search(r"(\w+)\s*(?:\[\s*\])?$", part) for part in parts]
    return [
        Parameter(name[1] if name else f"argument_{i}", "const" in part)
        for i, (part, name) in enumerate(zip(parts, names, strict=False))
    ]


def knob_values(name: str, text: str, remarks: list[str]) -> list[Any]:
    """Return a knob's values with one type; an empty list, with a remark, if they cannot be read."""
    try:
        values = values_of(text)
    except NotLiteral as error:
        remarks.append(f"the knob {name}, whose values are not a list: {error}")
        return []
    return one_type(list(dict.fromkeys(values)))


def one_type(values: list[Any]) -> list[Any]:
    """Convert integers to decimals if one of the values is a decimal, because a knob's values have one type."""
    return [float(v) for v in values] if {type(v) for v in values} == {int, float} else values
