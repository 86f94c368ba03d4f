"""Symbols in place of sizes: computations with them give expressions of the space language instead of numbers.

An exported kernel can serve other sizes than its own if its parameters and its launch are known as expressions of them.
The functions that compute both for one problem give these expressions when they are called with symbols.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np


class Undecided(Exception):
    """A computation needs the value of a symbol, as a comparison in Python does."""


class Symbol:
    """An expression of sizes without values, with which arithmetic gives another.

    `dtype` is its C type where it is the argument of a kernel.
    """

    __slots__ = ("dtype", "tree")

    def __init__(self, tree: ast.expr, dtype: str = "") -> None:
        self.tree, self.dtype = tree, dtype

    def __repr__(self) -> str:
        return ast.unparse(self.tree)

    @property
    def nbytes(self) -> int:
        """Return the bytes of an argument, as a NumPy scalar has it."""
        return np.dtype(self.dtype).itemsize

    def item(self) -> Symbol:
        """Return itself, as a NumPy scalar returns its number."""
        return self

    def __add__(self, other: object) -> Symbol:
        return _binary(self, ast.Add(), other)

    def __radd__(self, other: object) -> Symbol:
        return _binary(other, ast.Add(), self)

    def __sub__(self, other: object) -> Symbol:
        return _binary(self, ast.Sub(), other)

    def __rsub__(self, other: object) -> Symbol:
        return _binary(other, ast.Sub(), self)

    def __mul__(self, other: object) -> Symbol:
        return self if _is_one(other) else _binary(self, ast.Mult(), other)

    def __rmul__(self, other: object) -> Symbol:
        return self if _is_one(other) else _binary(other, ast.Mult(), self)

    def __floordiv__(self, other: object) -> Symbol:
        return _binary(self, ast.FloorDiv(), other)

    def __rfloordiv__(self, other: object) -> Symbol:
        return _binary(other, ast.FloorDiv(), self)

    def __mod__(self, other: object) -> Symbol:
        return _binary(self, ast.Mod(), other)

    def __rmod__(self, other: object) -> Symbol:
        return _binary(other, ast.Mod(), self)

    def __neg__(self) -> Symbol:
        return Symbol(ast.UnaryOp(ast.USub(), self.tree))

    def _undecided(self, *_: object) -> Any:
        raise Undecided(f"{self} has no value")

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __int__ = __index__ = __float__ = _undecided
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __abs__ = _undecided

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._undecided())

    def __hash__(self) -> int:
        return id(self)


def symbol(name: str) -> int:
    """Return a Symbol of that name for functions that take an integer."""
    return cast(int, Symbol(ast.Name(name, ast.Load())))


def int32(value: int) -> np.int32:
    """Return a size as the argument of a kernel; a Symbol remains one."""
    return cast(np.int32, integer(value, "int32"))


def integer(value: int, dtype: str) -> np.int32 | np.int64:
    """Return a size as an argument of that type, int32 or int64; a Symbol remains one."""
    if isinstance(value, Symbol):
        return cast(np.int32, typed(value, dtype))
    return np.int32(value) if dtype == "int32" else np.int64(value)


def typed(value: Symbol, dtype: str) -> Any:
    """Return a Symbol as an argument of that type."""
    return Symbol(value.tree, dtype)


def _is_one(value: object) -> bool:
    return type(value) is int and value == 1


def _binary(left: object, operator: ast.operator, right: object) -> Symbol:
    return Symbol(ast.BinOp(_tree(left), operator, _tree(right)))


def _tree(value: object) -> ast.expr:
    return value.tree if isinstance(value, Symbol) else ast.Constant(cast("int | float | str", value))


Calls = Mapping[str, Callable[..., Any]]


def fold(node: ast.expr, names: Mapping[str, Any], calls: Calls) -> Any:
    """Return the value of an expression of which some names are Symbols: itself a Symbol where it depends on these.

    `a if c else b`, and/or are decided where their conditions have values, so that what is not needed need not exist.
    Raises Undecided for a power of a Symbol.
    """
    match node:
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=sign, operand=operand):
            return _joined([operand], lambda parts: ast.UnaryOp(sign, parts[0]), names, calls)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = fold(left, names, calls), fold(right, names, calls)
            return calls["**"](base, exponent)
        case ast.BinOp(left=left, op=operator, right=right):
            return _joined([left, right], lambda parts: ast.BinOp(parts[0], operator, parts[1]), names, calls)
        case ast.Compare(left=left, ops=operators, comparators=others):
            return _joined([left, *others], lambda parts: ast.Compare(parts[0], operators, parts[1:]), names, calls)
        case ast.Call(func=function, args=arguments):
            return _joined(arguments, lambda parts: ast.Call(function, parts, []), names, calls)
        case ast.Tuple(elts=elements):
            return tuple(fold(element, names, calls) for element in elements)
        case ast.BoolOp(op=word, values=values):
            return _bool(word, values, names, calls)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            decided = fold(test, names, calls)
            if not isinstance(decided, Symbol):
                return fold(body if decided else orelse, names, calls)
            return Symbol(ast.IfExp(decided.tree, *(_tree(fold(part, names, calls)) for part in (body, orelse))))
    assert isinstance(node, ast.Constant)  # of what the language has
    return node.value


def _joined(
    parts: Sequence[ast.expr], join: Callable[[list[ast.expr]], ast.expr], names: Mapping[str, Any], calls: Calls
) -> Any:
    """Return the value of an expression of these parts, or the Symbol of them."""
    values = [fold(part, names, calls) for part in parts]
    tree = join([ast.Tuple([*map(_tree, v)], ast.Load()) if isinstance(v, tuple) else _tree(v) for v in values])
    if any(isinstance(value, Symbol) for value in values):
        return Symbol(tree)
    code = compile(ast.fix_missing_locations(ast.Expression(tree)), "<expression>", "eval")
    return eval(code, {"__builtins__": {}, **calls})  # it is a tree of the language's own nodes and of numbers


def _bool(operator: ast.boolop, values: Sequence[ast.expr], names: Mapping[str, Any], calls: Calls) -> Any:
    ends, open_ = isinstance(operator, ast.Or), list[ast.expr]()
    for value in values:
        found = fold(value, names, calls)
        if isinstance(found, Symbol):
            open_.append(found.tree)
        elif bool(found) is ends:
            return ends
    if len(open_) == 1:
        return Symbol(open_[0])
    return Symbol(ast.BoolOp(operator, open_)) if open_ else not ends


def texts(value: Any) -> Any:
    """Return what is written as JSON with the text of each Symbol in its place."""
    if isinstance(value, Symbol):
        return str(value)
    if isinstance(value, Mapping):
        return {name: texts(part) for name, part in value.items()}
    return [*map(texts, value)] if isinstance(value, list | tuple) else value
