"""What a C++ package computes from the sizes of a call: expressions of kernel.json as C++, and the checks of sizes."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

Described = Mapping[str, Any]

HELPERS = """
struct Sizes {{  // of a call; each has its largest here
    std::int64_t {members};
}};

inline std::int64_t floor_div(std::int64_t a, std::int64_t b) {{ return a / b - (a % b != 0 && (a < 0) != (b < 0)); }}

inline void check(const Sizes& sizes) {{
{checks}}}
"""
_OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=", ast.USub: "-", ast.UAdd: "+", ast.Not: "!", ast.And: " && ", ast.Or: " || ",
}  # fmt: skip # a table


class NoCpp(Exception):
    """An expression that C++ has no integers for, such as a quotient with decimals."""


def sizes_of(described: Described) -> Described | None:
    """Return what kernel.json says of the sizes of a call.

    None for a kernel of one size, and where C++ has no integers for an expression.
    """
    found: Described | None = described.get("run_time")
    if not found:
        return None
    try:
        for value in (*_numbers(found), *(rule["expression"] for rule in found["requires"])):
            in_cpp(value)
    except NoCpp:
        return None
    return found


def _numbers(found: Described) -> Iterator[str | int]:
    """Yield all numbers that depend on sizes."""
    for grid in found["grids"]:
        yield from grid
    for p in found["parameters"]:
        for name in ("shape", "dims", "strides_bytes", "box"):
            yield from p.get(name, ())
        yield from (p[name] for name in ("offset", "scratch") if name in p)
        if isinstance(p.get("value"), str):
            yield p["value"]
        if isinstance(p.get("swizzle"), str):
            raise NoCpp(p["swizzle"])


def helpers(described: Described) -> str:
    """Return the C++ text of the struct of sizes and of what checks them; empty for a kernel of one size."""
    sizes = sizes_of(described)
    if sizes is None:
        return ""
    members = ", ".join(f"{axis} = {most}" for axis, most in sizes["axes"].items())
    return HELPERS.format(members=members, checks="".join(_checks(sizes, described)))


def _checks(sizes: Described, described: Described) -> Iterator[str]:
    for axis, most in sizes["axes"].items():
        says = f"{axis} must be from 1 to {most}, the sizes that this kernel was verified for"
        yield f"    if (sizes.{axis} < 1 || sizes.{axis} > {most}) throw std::runtime_error({json.dumps(says)});\n"
    for p, largest in zip(sizes["parameters"], described["parameters"], strict=True):
        if isinstance(p.get("scratch"), str):
            says = f"{p['name']} needs more than the {largest['scratch']} bytes that are allocated"
            yield f"    if ({in_cpp(p['scratch'])} > {largest['scratch']})\n"
            yield f"        throw std::runtime_error({json.dumps(says)});\n"
    for rule in sizes["requires"]:
        says = f"this kernel needs {rule['expression']}: {rule['why']}"
        yield f"    if (!({in_cpp(rule['expression'])}))\n        throw std::runtime_error({json.dumps(says)});\n"


def in_cpp(value: int | str) -> str:
    """Return a number of kernel.json as C++, of the struct `sizes`; the SMs of the GPU are `sms_`. Raises NoCpp."""
    return _cpp(ast.parse(value, mode="eval").body) if isinstance(value, str) else str(value)


def _cpp(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=bool() | int() as value):
            return str(int(value))
        case ast.Name(id=name):
            return f"sizes.{name}"
        case ast.Attribute(value=ast.Name(id="gpu"), attr="sms"):
            return "sms_"
        case ast.UnaryOp(op=op, operand=operand):
            return f"{_OPERATORS[type(op)]}({_cpp(operand)})"
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return f"floor_div({_cpp(left)}, {_cpp(right)})"
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            a, b = _cpp(left), _cpp(right)
            return f"({a} - {b} * floor_div({a}, {b}))"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return f"({_cpp(left)} {_OPERATORS[type(op)]} {_cpp(right)})"
        case ast.BoolOp(op=op, values=values):
            return f"({_OPERATORS[type(op)].join(map(_cpp, values))})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({_cpp(test)} ? {_cpp(body)} : {_cpp(orelse)})"
        case ast.Compare(left=left, ops=ops, comparators=others):
            pairs = zip([left, *others], ops, others, strict=False)
            return f"({' && '.join(_compared(a, op, b) for a, op, b in pairs)})"
        case ast.Call(func=ast.Name(id="ceil_div"), args=[a, b]):
            return f"-floor_div(-({_cpp(a)}), {_cpp(b)})"
        case ast.Call(func=ast.Name(id="round_up"), args=[a, b]):
            return f"(-floor_div(-({_cpp(a)}), {_cpp(b)}) * {_cpp(b)})"
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments):
            return f"std::{name}<std::int64_t>({{{', '.join(map(_cpp, arguments))}}})"
    raise NoCpp(ast.unparse(node))


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> str:
    if isinstance(right, ast.Tuple):
        listed = " || ".join(f"{_cpp(left)} == {_cpp(item)}" for item in right.elts)
        return f"({listed})" if isinstance(operator, ast.In) else f"!({listed})"
    return f"{_cpp(left)} {_OPERATORS[type(operator)]} {_cpp(right)}"
