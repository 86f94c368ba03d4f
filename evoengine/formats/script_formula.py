"""Write a function of a tuner's script as a formula of its tuning parameters.

script_runner.py runs this in the process of the script, without importing evoengine. The importer compares a formula
with the function's own values in some configurations, which detects formulas that were derived wrongly.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Mapping
from typing import Any

MOST_CHARS = 2000
_ROUNDED_DOWN = ("int", "floor", "trunc", "int32", "int64")


class Unwritable(Exception):
    """A function that cannot be written as a formula."""


def formula(function: Callable[..., Any], names: list[str]) -> str | list[str] | None:
    """Return the formula of a function of one dict of parameters, or of parameters by name.

    A function that returns a tuple gives a list. None if there is no formula.
    """
    try:
        node, body = _parsed(function)
        known = {**function.__globals__, **_enclosed(function)}
        parameters = [argument.arg for argument in node.args.args]
        if len(parameters) == 1 and parameters[0] not in names:
            writer = _Writer(parameters[0], {}, known)
        elif set(parameters) <= set(names):
            writer = _Writer("", {name: ast.Name(name) for name in parameters}, known)
        else:
            return None
        found = writer.result(body)
        if isinstance(found, ast.Tuple | ast.List):
            return [_text(item) for item in found.elts]
        return _text(found)
    except (Unwritable, AttributeError, LookupError, OSError, RecursionError, SyntaxError, TypeError, ValueError):
        return None


def _text(node: ast.expr) -> str:
    text = ast.unparse(ast.fix_missing_locations(node))
    if len(text) > MOST_CHARS:
        raise Unwritable
    return text


def _enclosed(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True)}


def _parsed(function: Callable[..., Any]) -> tuple[ast.Lambda | ast.FunctionDef, list[ast.stmt]]:
    """Return the function's node in its file, and its statements. Columns distinguish lambdas on one line."""
    code = function.__code__
    with open(code.co_filename, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    places = [p for p in code.co_positions() if p[0] is not None and p[1] is not None and p[3]]
    best: ast.Lambda | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and code.co_firstlineno == min(
            [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
        ):
            return node, node.body
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            inside = all(begin <= (p[0], p[2]) and (p[1], p[3]) <= end for p in places)
            if inside and (best is None or begin >= (best.lineno, best.col_offset)):
                best = node
    if best is None:
        raise Unwritable
    return best, [ast.Return(best.body)]


class _Writer:
    """Write expressions with parameters by name, and with numbers for all other values that the script knows."""

    def __init__(self, parameter: str, local: dict[str, ast.expr], known: Mapping[str, Any]) -> None:
        self.parameter, self.local, self.known = parameter, local, known

    def result(self, body: list[ast.stmt]) -> ast.expr:
        """Return the result of a body of assignments, branches and returns."""
        for i, statement in enumerate(body):
            match statement:
                case ast.Expr(value=ast.Constant()):
                    continue
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.local[name] = self.written(value)
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if all(
                    isinstance(target, ast.Name) for target in targets
                ):
                    written = [self.written(value) for value in values]
                    self.local |= {t.id: w for t, w in zip(targets, written, strict=True) if isinstance(t, ast.Name)}
                case ast.Return(value=ast.expr() as value):
                    return self.written(value)
                case ast.If(test=test, body=then, orelse=other):
                    condition, before = self.written(test), dict(self.local)
                    chosen = self.result(then)
                    self.local = before
                    return ast.IfExp(condition, chosen, self.result([*other, *body[i + 1 :]]))
                case _:
                    raise Unwritable
        raise Unwritable

    def written(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str() as key)) if (
                name == self.parameter
            ):
                return ast.Name(key)
            case ast.Name(id=name) if name in self.local:
                return self.local[name]
            case ast.Constant(value=bool() | int() | float() | str()):
                return node
            case ast.Call(func=func, args=args, keywords=[]):
                return self._call(self._function(func), args)
            case ast.BoolOp(op=op, values=values):
                return ast.BoolOp(op, [self.written(value) for value in values])
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as op, right=right):
                either = ast.And() if isinstance(op, ast.BitAnd) else ast.Or()
                return ast.BoolOp(either, [self.written(left), self.written(right)])
            case ast.BinOp(left=left, op=op, right=right):
                return ast.BinOp(self.written(left), op, self.written(right))
            case ast.UnaryOp(op=op, operand=operand):
                return ast.UnaryOp(op, self.written(operand))
            case ast.Compare(left=left, ops=ops, comparators=others):
                return ast.Compare(self.written(left), ops, [self.written(other) for other in others])
            case ast.IfExp(test=test, body=body, orelse=other):
                return ast.IfExp(self.written(test), self.written(body), self.written(other))
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return type(node)([self.written(item) for item in items])
        return _plain(self._value(node))

    def _function(self, node: ast.expr) -> str:
        """Return the name of a function of Python, math or NumPy; `get` for that of the parameters."""
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr="get") if name == self.parameter:
                return "get"
            case ast.Name(id=name):
                found = self.known.get(name, getattr(builtins, name, None))
            case _:
                found = self._value(node)
        return str(getattr(found, "__name__", ""))

    def _call(self, name: str, args: list[ast.expr]) -> ast.expr:
        match name, args:
            case "get", [ast.Constant(value=str() as key), *_]:
                return ast.Name(key)
            case (("min" | "max"), [_, _, *_]):
                return ast.Call(ast.Name(name), [self.written(argument) for argument in args], [])
            case (("all" | "any"), [ast.List(elts=items) | ast.Tuple(elts=items)]):
                return ast.BoolOp(ast.And() if name == "all" else ast.Or(), [self.written(item) for item in items])
            case "ceil", [ast.BinOp(left=left, op=ast.Div(), right=right)]:
                return ast.Call(ast.Name("ceil_div"), [self.written(left), self.written(right)], [])
            case _, [ast.BinOp(left=left, op=ast.Div(), right=right)] if name in _ROUNDED_DOWN:
                return ast.BinOp(self.written(left), ast.FloorDiv(), self.written(right))
            case (("int" | "float" | "bool" | "ceil" | "int32" | "int64"), [argument]):
                return self.written(argument)
        raise Unwritable

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression that names no parameter and calls nothing."""
        match node:
            case ast.Name(id=name) if name in self.known:
                return self.known[name]
            case ast.Attribute(value=owner, attr=attr):
                return getattr(self._value(owner), attr)
            case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
                return self._value(owner)[key]
        raise Unwritable


def _plain(value: Any) -> ast.expr:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return ast.Constant(value)
    if isinstance(value, list | tuple) and len(value) <= 256:
        return ast.List([_plain(item) for item in value])
    raise Unwritable
