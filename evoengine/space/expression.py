"""The expression language of space files: parsed by Python's own parser, checked node by node, and then compiled.

An expression holds names, `gpu.NAME`, numbers, text, arithmetic, comparison chains, and/or/not, `in` with a literal
list, `a if c else b`, and calls of ceil_div, round_up, min and max. Nothing else gets past `Expression.parse`.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from evoengine.errors import UsageError
from evoengine.records import Config, Value
from evoengine.space import arrays
from evoengine.space.symbol import Symbol, Undecided, fold

LARGEST = 2**63 - 1
_LONGEST = 4000
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_ALLOWED = "an expression holds names, numbers, text, arithmetic, comparisons, and/or/not, in [...], and a if c else b"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Return the smallest multiple of b that is at least a."""
    return -(-a // b) * b


def _power(a: float, b: float) -> float:
    if not isinstance(b, int) or not 0 <= b <= 64:
        raise OverflowError("a power whose exponent is not an integer from 0 to 64")
    if isinstance(a, int) and a.bit_length() * b > 256:
        raise OverflowError("a power that is too large")
    return a**b


CALLS: dict[str, Callable[..., Any]] = {"ceil_div": ceil_div, "round_up": round_up, "min": min, "max": max}
# No source text can spell the last two names, so no knob can stand in for them.
_GLOBALS: dict[str, Any] = {"__builtins__": {}, **CALLS, "**": _power, "truth()": bool}


class Undefined(UsageError):
    """An expression needs a name that has no value, mostly an inactive knob."""


class Scope(dict[str, Any]):
    """Names with their values for scalar evaluation; `lets` are evaluated when first needed and kept.

    `config` is what error messages show.
    """

    def __init__(self, values: Mapping[str, Any], lets: Mapping[str, Expression], config: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.update(_GLOBALS)
        self.lets, self.config = lets, config

    def __missing__(self, name: str) -> Any:
        self[name] = value = self.lets[name].evaluate(self)
        return value


class Expression:
    """One checked expression. `names` are those it reads, GPU variables as `gpu.NAME`."""

    __slots__ = ("_code", "names", "text", "tree", "where")

    def __init__(self, text: str, where: str, tree: ast.expr) -> None:
        self.text, self.where, self.tree = text, where, tree
        self.names = _names(tree)
        self._code = _compile(tree)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    @classmethod
    def parse(cls, text: str, where: str) -> Expression:
        """Parse an expression; `where` names its entry and file in errors. Raises UsageError naming what is wrong."""
        text = text.strip()
        if len(text) > _LONGEST:
            raise UsageError(f"{where}: an expression has at most {_LONGEST} characters; split this one with [let]")
        try:
            expression = cls(text, where, _parsed(text))
        except _Forbidden as forbidden:
            raise UsageError(f"{where}: `{text}` {forbidden}") from None
        except RecursionError:
            raise UsageError(f"{where}: `{text[:40]}…` is nested too deeply; split it with [let]") from None
        expression.kind({})
        return expression

    def kind(self, kinds: Mapping[str, str | None]) -> str | None:
        """Return `number` or `text`, given the kinds of names; None if a name of unknown kind decides it.

        Raises UsageError if text is used in arithmetic, ordered, used as a truth value or compared with a number.
        """
        try:
            return _kind(self.tree, kinds)
        except _Forbidden as forbidden:
            raise UsageError(f"{self.where}: `{self.text}` {forbidden}") from None

    def evaluate(self, mapping: Mapping[str, Any]) -> Value:
        """Return the value for one configuration, a Symbol where it depends on one. `and` and `or` give a bool.

        Raises Undefined if a name has no value, and UsageError on division by zero and where the result is not
        finite or exceeds 64 bits; both name the configuration.
        """
        try:
            value: Value = self._value(mapping)
        except ZeroDivisionError:
            raise self._failure("divides by zero", mapping) from None
        except (OverflowError, TypeError) as error:
            raise self._failure(f"has no value ({error})", mapping) from None
        except NameError as error:
            raise Undefined(str(self._failure(f"needs {error.name}, which has no value", mapping))) from None
        fits = isinstance(value, str | Symbol) or (
            math.isfinite(value) if isinstance(value, float) else abs(value) <= LARGEST
        )
        if not fits:
            raise self._failure("overflows 64 bits", mapping)
        return value

    def _value(self, mapping: Mapping[str, Any]) -> Any:
        try:
            return eval(self._code, _GLOBALS, mapping)  # the tree holds only what _checked let through
        except Undecided:
            try:
                return fold(self.tree, mapping, {**CALLS, "**": _power})
            except KeyError as missing:
                raise NameError(name=str(missing.args[0])) from None

    def evaluate_arrays(self, mapping: Mapping[str, Any] | arrays.Columns) -> np.ndarray:
        """Return the values [n] for n configurations at once, with names bound to arrays [n] or scalars.

        Raises what `evaluate` raises for the first configuration that has no value.
        """
        columns = mapping if isinstance(mapping, arrays.Columns) else _columns(mapping)
        try:
            with np.errstate(all="ignore"):
                result = arrays.compute(self.tree, columns)
        except (arrays.NotVectorizable, ArithmeticError, TypeError):
            result = np.array([self.evaluate(Scope(row, columns.lets, config)) for row, config in columns.rows()])
        return result if isinstance(result, np.ndarray) else np.full(columns.length, result)

    def _failure(self, what: str, mapping: Mapping[str, Any]) -> UsageError:
        # `in` and .get do not evaluate lets, so describing a failure cannot fail again.
        shown = getattr(mapping, "config", None) or {n: mapping[n] for n in sorted(self.names) if n in mapping}
        setting = ", ".join(f"{name}={value}" for name, value in shown.items())
        return UsageError(f"{self.where}: `{self.text}` {what} for {setting or 'this problem and GPU'}")


def _columns(mapping: Mapping[str, Any]) -> arrays.Columns:
    length = next((len(v) for v in mapping.values() if isinstance(v, np.ndarray)), 1)
    return arrays.Columns(mapping, length)


class _Forbidden(Exception):
    """A construct that expressions may not use, described as the end of a sentence."""


# A space file is read again for each problem and GPU, with the same texts and so the same trees.
_MAX_CACHED = 4096
_ASSIGNMENT = re.compile(r"(?<![=!<>])=(?!=)")


@lru_cache(_MAX_CACHED)
def _parsed(text: str) -> ast.expr:
    """Return the checked tree, shared by all callers and never modified.

    Raises _Forbidden if the text is not an expression of the language.
    """
    try:
        tree = ast.parse(f"(\n{text}\n)" if "\n" in text else text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "nested too deeply or not text"
        if _ASSIGNMENT.search(text):
            reason = "two values are compared with =="
        raise _Forbidden(f"is not an expression: {reason}") from None
    return _checked(tree)


@lru_cache(_MAX_CACHED)
def _names(tree: ast.expr) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name)) - CALLS.keys()


def _checked(node: ast.AST) -> ast.expr:
    """Return the tree with each `gpu.X` replaced by one name; raise _Forbidden at the first disallowed node."""
    match node:
        case ast.Constant(value=bool() | str()):
            return node
        case ast.Constant(value=int() | float() as number):
            if abs(number) > LARGEST and not (isinstance(number, float) and math.isfinite(number)):
                raise _Forbidden("holds a number beyond 64 bits")
            return node
        case ast.Name(id=name):
            if name == "gpu":
                raise _Forbidden("uses gpu alone; write gpu.NAME, as in gpu.shared_per_block")
            if name in CALLS:
                raise _Forbidden(f"uses the function {name} without calling it")
            return node
        case ast.Attribute(value=ast.Name(id="gpu"), attr=name):
            return ast.Name(id=f"gpu.{name}", ctx=ast.Load())
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            return ast.BinOp(_checked(left), op, _checked(right))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not() as op, operand=operand):
            return ast.UnaryOp(op, _checked(operand))
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(op, [_checked(v) for v in values])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(_checked(test), _checked(body), _checked(orelse))
        case ast.Compare():
            return _checked_comparison(node)
        case ast.Call():
            return _checked_call(node)
    raise _Forbidden(f"{_description(node)}, which is not allowed: {_ALLOWED}")


def _checked_comparison(node: ast.Compare) -> ast.expr:
    comparators: list[ast.expr] = []
    for op, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, ast.Is | ast.IsNot):
            raise _Forbidden("compares with is; use == or !=")
        if not isinstance(op, ast.In | ast.NotIn):
            comparators.append(_checked(right))
            continue
        if len(node.ops) > 1:
            raise _Forbidden("chains in with another comparison; join the two with and")
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise _Forbidden("uses in with something that is not a literal list; write it like x in [16, 32]")
        items = [_checked(item) for item in right.elts]
        if any(isinstance(n, ast.Name) for item in items for n in ast.walk(item)):
            raise _Forbidden("uses in with a list that holds names; it may hold numbers or text only")
        comparators.append(ast.Tuple(items, ast.Load()))
    return ast.Compare(_checked(node.left), node.ops, comparators)


def _checked_call(node: ast.Call) -> ast.expr:
    if not isinstance(node.func, ast.Name) or node.func.id not in CALLS:
        raise _Forbidden(f"calls {ast.unparse(node.func)}; only {', '.join(CALLS)} may be called")
    name = node.func.id
    if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
        raise _Forbidden(f"calls {name} with something other than plain arguments")
    if len(node.args) != 2 if name in ("ceil_div", "round_up") else len(node.args) < 2:
        takes = "two" if name in ("ceil_div", "round_up") else "two or more"
        raise _Forbidden(f"calls {name} with {len(node.args)} arguments; it takes {takes}")
    return ast.Call(node.func, [_checked(a) for a in node.args], [])


def _description(node: ast.AST) -> str:
    match node:
        case ast.Attribute():
            return f"reads the attribute {ast.unparse(node)}"
        case ast.BinOp(op=op) | ast.UnaryOp(op=op):
            return f"uses the operator {type(op).__name__}"
        case ast.Constant(value=value):
            return f"holds the constant {value!r}"
    names = {"JoinedStr": "an f-string", "NamedExpr": "an assignment", "ListComp": "a comprehension"}
    return f"holds {names.get(type(node).__name__, 'a ' + type(node).__name__.lower())}"


def _kind(node: ast.expr, kinds: Mapping[str, str | None]) -> str | None:
    def number(part: ast.expr, use: str) -> None:
        if _kind(part, kinds) == "text":
            raise _Forbidden(f"{use} {ast.unparse(part)}, which is text")

    def same(a: ast.expr, b: ast.expr, use: str) -> str | None:
        first, second = _kind(a, kinds), _kind(b, kinds)
        if first and second and first != second:
            raise _Forbidden(f"{use} {ast.unparse(a)} ({first}) and {ast.unparse(b)} ({second})")
        return first or second

    match node:
        case ast.Constant(value=value):
            return "text" if isinstance(value, str) else "number"
        case ast.Name(id=name):
            return kinds.get(name)
        case ast.BinOp(left=left, right=right):
            for part in (left, right):
                number(part, "calculates with")
        case ast.UnaryOp(operand=operand):
            number(operand, "negates")
        case ast.Call(args=args):
            for part in args:
                number(part, "calculates with")
        case ast.BoolOp(values=values):
            for part in values:
                number(part, "takes for true or false")
        case ast.IfExp(test=test, body=body, orelse=orelse):
            number(test, "takes for true or false")
            return same(body, orelse, "chooses between")
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for op, right in zip(ops, comparators, strict=True):
                ordering = isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
                for item in right.elts if isinstance(right, ast.Tuple) else [right]:
                    if same(left, item, "compares") == "text" and ordering:
                        raise _Forbidden(f"orders {ast.unparse(left)}, which is text; only == and != compare text")
                left = right
    return "number"


class _ForScalars(ast.NodeVisitor):
    """Copy a tree with powers guarded and and/or giving a bool, so that scalars behave as columns do.

    The original is left unchanged, since columns are computed from it.
    """

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return type(node)(**{name: self._field(value) for name, value in ast.iter_fields(node)})

    def _field(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._field(item) for item in value]
        return self.visit(value) if isinstance(value, ast.AST) else value

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        left, right = self.visit(node.left), self.visit(node.right)
        return _called("**", left, right) if isinstance(node.op, ast.Pow) else ast.BinOp(left, node.op, right)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        return _called("truth()", ast.BoolOp(node.op, [self.visit(v) for v in node.values]))


def _called(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


@lru_cache(_MAX_CACHED)
def _compile(tree: ast.expr) -> CodeType:
    guarded = _ForScalars().visit(tree)
    return compile(ast.fix_missing_locations(ast.Expression(guarded)), "<expression>", "eval")


# Select configurations by an expression over their knobs: `tile_m >= 64 and family == "wgmma"`.


class Where:
    """An expression of the space language (`evoengine.space.expression`) that is true of some configurations.

    One that does not have a knob which the expression needs is not picked.
    """

    def __init__(self, text: str) -> None:
        """Parse the expression of `--where`.

        Raises UsageError naming what is not allowed, and where the expression can be neither true nor false.
        """
        self._expression = Expression.parse(text, "--where")
        self._checked: set[tuple[type | None, ...]] = set()
        self._names = tuple(self._expression.names)
        if _is_number(self._expression.tree):
            raise self._no_condition()

    @property
    def names(self) -> frozenset[str]:
        """Return the names that the expression reads."""
        return self._expression.names

    def matches(self, config: Config) -> bool:
        """Return whether the expression holds for a configuration; False if it names a knob that has no value.

        Raises UsageError if text is used in arithmetic or compared with a number, on division by zero, and where the
        value is neither true nor false.
        """
        # checked before evaluation: a text times a large number would exhaust memory
        if (seen := tuple(type(config.get(name)) for name in self._names)) not in self._checked:
            self._check_kinds(config)
            self._checked.add(seen)
        try:
            value = self._expression.evaluate(config)
        except Undefined:
            return False
        if not isinstance(value, bool):
            raise self._no_condition()
        return value

    def require_known(self, missing: Sequence[str], known: Iterable[str]) -> None:
        """Raise UsageError if the expression names any of `missing`, which are not knobs."""
        names = sorted(known)
        for name in missing:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise UsageError(f"--where: `{self._expression.text}` names {name}, which no trial has as a knob; {hint}")

    def _check_kinds(self, config: Config) -> None:
        needed = {name: config[name] for name in self._names if name in config}
        kinds = {name: "text" if isinstance(value, str) else "number" for name, value in needed.items()}
        if self._expression.kind(kinds) == "text":
            raise UsageError(f"--where: `{self._expression.text}` is text; compare it with something")

    def _no_condition(self) -> UsageError:
        text = self._expression.text
        return UsageError(f"--where: `{text}` is a number, neither true nor false; compare it with something")


def _is_number(node: ast.expr) -> bool:
    """Return whether the value is a number whatever the knobs are. A name's kind is unknown until it has a value."""
    match node:
        case ast.Constant(value=value):
            return not isinstance(value, bool | str)
        case ast.UnaryOp(op=op):
            return not isinstance(op, ast.Not)
        case ast.IfExp(body=body, orelse=orelse):
            return _is_number(body) or _is_number(orelse)
    return isinstance(node, ast.BinOp | ast.Call)
