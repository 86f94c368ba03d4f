"""Parse values and conditions that other tuners store as Python text, by small grammars and without executing them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from evoengine.errors import UsageError
from evoengine.space.expression import Expression

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
    """The text is not of this grammar; the message names the first part that is not."""


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
                raise NotLiteral("a power with an exponent that is no integer from 0 to 64")
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
    raise NotLiteral(f"holds {ast.unparse(node)[:40]}, which is no number, list, range or comprehension over one")


def _scalar(value: Any) -> Any:
    if isinstance(value, list | range):
        raise NotLiteral("a list of lists")
    return value


def _combined(op: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if isinstance(left, list) and isinstance(right, list):
        return _bounded_list(op(left, right))
    if isinstance(left, list | str | range) or isinstance(right, list | str | range):
        raise NotLiteral("calculates with something that is no number")
    return _bounded_number(op(left, right))


def _bounded_list(items: Any) -> Any:
    if not isinstance(items, list | range) or len(items) > MAX_VALUES:
        raise NotLiteral(f"something that is no list of at most {MAX_VALUES} values")
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
    raise NotLiteral(f"chooses by {ast.unparse(node)[:40]}, which is no comparison")


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
        raise NotLiteral(f"`{text}` names {', '.join(unknown)}, which is no knob or axis")
    return " ".join(expression.text.split())
