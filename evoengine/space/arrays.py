"""Evaluate expressions over whole columns at once: `Expression.evaluate`, vectorised.

A column evaluates to what Python's own arithmetic gives row by row. Where NumPy could differ (integers beyond 2^53,
division by zero, powers of floats, values that are not finite) `NotVectorizable` is raised, and the caller evaluates
row by row.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

EXACT = 2**53
"""integers up to here convert to float64 and back without loss"""


class NotVectorizable(Exception):
    """A column cannot be computed exactly by NumPy; evaluated row by row it may have a value, or a clear error."""


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """A column as indices into a domain, int8 or int16 [n]; -1 where the row has no such value."""

    index: np.ndarray
    domain: np.ndarray


class Columns:
    """Names bound to scalars, arrays [n] or `EncodedColumn`s; `lets` are expressions evaluated on first use.

    `knobs` are the names that an error message shows.
    """

    def __init__(
        self, values: Mapping[str, Any], length: int, lets: Mapping[str, Any] | None = None, knobs: Sequence[str] = ()
    ) -> None:
        self.values, self.length, self.lets, self.knobs = values, length, lets or {}, knobs
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self._fetch(name)
        return self._known[name]

    def _fetch(self, name: str) -> Any:
        if name in self.lets:
            return compute(self.lets[name].tree, self)
        value = self.values.get(name)
        if isinstance(value, EncodedColumn):
            if value.index.size and value.index.min() < 0:
                raise NotVectorizable(name)
            value = value.domain[value.index]
        if value is None:
            raise NotVectorizable(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
            value = value.astype(np.float64 if value.dtype.kind == "f" else np.int64, copy=False)
        return _exact(value)

    def at(self, rows: np.ndarray) -> Columns:
        """Return the same names restricted to the rows at these positions [m]."""
        return Columns(_At(self.values, rows), len(rows), self.lets, self.knobs)

    def rows(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield each row as plain Python values, and its knobs alone; a name without a value in the row is absent."""
        bound = {name: self.values[name] for name in self.values}
        for i in range(self.length):
            cells = ((name, _cell(value, i)) for name, value in bound.items())
            row = {name: value for name, value in cells if value is not None}
            yield row, {name: row[name] for name in self.knobs if name in row}


class _At(Mapping[str, Any]):
    """A view of some rows of named columns that gathers a column when it is first read."""

    def __init__(self, source: Mapping[str, Any], rows: np.ndarray) -> None:
        self.source, self.taken = source, rows

    def __getitem__(self, name: str) -> Any:
        value = self.source[name]
        if isinstance(value, EncodedColumn):
            return EncodedColumn(value.index[self.taken], value.domain)
        return value[self.taken] if isinstance(value, np.ndarray) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


def _cell(value: Any, i: int) -> Any:
    if isinstance(value, EncodedColumn):
        return value.domain[value.index[i]].item() if value.index[i] >= 0 else None
    return value[i].item() if isinstance(value, np.ndarray) else value


def compute(node: ast.expr, columns: Columns) -> Any:
    """Return the value of a checked expression: an array [columns.length], or a scalar where no column takes part.

    Raises NotVectorizable if the column must be computed row by row.
    """
    return _COMPUTE[type(node)](node, columns)


def _constant(node: ast.Constant, columns: Columns) -> Any:
    return _exact(node.value)


def _name(node: ast.Name, columns: Columns) -> Any:
    return columns[node.id]


def _binary(node: ast.BinOp, columns: Columns) -> Any:
    return _ARITHMETIC[type(node.op)](_number(compute(node.left, columns)), _number(compute(node.right, columns)))


def _unary(node: ast.UnaryOp, columns: Columns) -> Any:
    value = compute(node.operand, columns)
    if isinstance(node.op, ast.Not):
        return np.logical_not(as_bool(value)) if isinstance(value, np.ndarray) else not value
    return -_number(value) if isinstance(node.op, ast.USub) else +_number(value)


def _compare(node: ast.Compare, columns: Columns) -> Any:
    result: Any = True
    left = compute(node.left, columns)
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, ast.In | ast.NotIn):
            found: Any = False
            for item in cast(ast.Tuple, right_node).elts:
                found = found | (left == compute(item, columns))
            step, right = (found if isinstance(op, ast.In) else found ^ True), None
        else:
            right = compute(right_node, columns)
            step = _COMPARISON[type(op)](left, right)
        result, left = result & step, right
    return result


def _bool_op(node: ast.BoolOp, columns: Columns) -> Any:
    """Compute later operands only on the rows that earlier ones leave undecided, as Python's `and` and `or` do."""
    stop = isinstance(node.op, ast.Or)
    result = np.full(columns.length, not stop)
    rows = np.arange(columns.length)
    for operand in node.values:
        value = compute(operand, columns if len(rows) == columns.length else columns.at(rows))
        if not isinstance(value, np.ndarray):
            if bool(value) == stop:
                result[rows] = stop
                break
            continue
        decided = as_bool(value) == stop
        result[rows[decided]] = stop
        rows = rows[~decided]
        if not len(rows):
            break
    return result


def _conditional(node: ast.IfExp, columns: Columns) -> Any:
    """Compute each branch only on its own rows."""
    test = compute(node.test, columns)
    if not isinstance(test, np.ndarray):
        return compute(node.body if test else node.orelse, columns)
    mask = as_bool(test)
    if mask.all() or not mask.any():
        return compute(node.body if mask.any() else node.orelse, columns)
    yes, no = np.flatnonzero(mask), np.flatnonzero(~mask)
    a, b = np.asarray(compute(node.body, columns.at(yes))), np.asarray(compute(node.orelse, columns.at(no)))
    result = np.empty(columns.length, np.result_type(a, b))
    result[yes], result[no] = a, b
    return result


def _call(node: ast.Call, columns: Columns) -> Any:
    arguments = [_number(compute(a, columns)) for a in node.args]
    return _FUNCTIONS[cast(ast.Name, node.func).id](*arguments)


def as_bool(value: np.ndarray) -> np.ndarray:
    return value if value.dtype == bool else value != value.dtype.type()


def _number(value: Any) -> Any:
    # NumPy adds booleans as a logical or; Python counts them.
    return value.astype(np.int64) if isinstance(value, np.ndarray) and value.dtype == bool else value


def _exact(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            if not np.isfinite(value).all():
                raise NotVectorizable("not finite")
        elif value.dtype.kind == "i" and value.size and max(-int(value.min()), int(value.max())) > EXACT:
            raise NotVectorizable("beyond 2^53")
    elif isinstance(value, int) and not -EXACT <= value <= EXACT:
        raise NotVectorizable("beyond 2^53")
    elif isinstance(value, float) and not math.isfinite(value):
        raise NotVectorizable("not finite")
    return value


def _largest(value: Any) -> float:
    if isinstance(value, np.ndarray):
        return max(abs(float(value.min())), abs(float(value.max()))) if value.size else 0.0
    return abs(float(value))


def _is_float(value: Any) -> bool:
    return value.dtype.kind == "f" if isinstance(value, np.ndarray) else isinstance(value, float)


def _add(a: Any, b: Any) -> Any:
    return _exact(a + b)


def _subtract(a: Any, b: Any) -> Any:
    return _exact(a - b)


def _multiply(a: Any, b: Any) -> Any:
    # The cheap bound first: int64 wraps silently, so a product is only formed where it is known to fit.
    may_wrap = not (_is_float(a) or _is_float(b)) and _largest(a) * _largest(b) > EXACT
    if may_wrap and np.any(np.abs(np.multiply(a, b, dtype=np.float64)) > EXACT):
        raise NotVectorizable("beyond 2^53")
    return _exact(a * b)


def _dividing(divide: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def divided(a: Any, b: Any) -> Any:
        if np.any(np.equal(b, 0)):
            raise NotVectorizable("division by zero")
        return _exact(divide(a, b))

    return divided


def _power(a: Any, b: Any) -> Any:
    # pow() of floats differs in the last bit between NumPy and libm.
    if _is_float(a) or _is_float(b) or np.any(np.less(b, 0)) or _largest(b) > 64:
        raise NotVectorizable("power")
    if max(_largest(a), 1.0) ** _largest(b) > EXACT:
        raise NotVectorizable("beyond 2^53")
    return a**b


_floor_divide = _dividing(operator.floordiv)


def _ceil_div(a: Any, b: Any) -> Any:
    return -_floor_divide(-a, b)


def _round_up(a: Any, b: Any) -> Any:
    return _multiply(_ceil_div(a, b), b)


def _fold(pairwise: Callable[[Any, Any], Any], scalar: Callable[..., Any]) -> Callable[..., Any]:
    def folded(*values: Any) -> Any:
        if not any(isinstance(v, np.ndarray) for v in values):
            return scalar(values)
        result = values[0]
        for value in values[1:]:
            result = pairwise(result, value)
        return result

    return folded


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil_div": _ceil_div,
    "round_up": _round_up,
    "min": _fold(np.minimum, min),
    "max": _fold(np.maximum, max),
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.Div: _dividing(operator.truediv),
    ast.FloorDiv: _floor_divide,
    ast.Mod: _dividing(operator.mod),
    ast.Pow: _power,
}
_COMPARISON: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPUTE: dict[type[ast.expr], Callable[[Any, Columns], Any]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.Compare: _compare,
    ast.BoolOp: _bool_op,
    ast.IfExp: _conditional,
    ast.Call: _call,
}
