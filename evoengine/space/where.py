"""Select configurations by an expression over their knobs: `tile_m >= 64 and family == "wgmma"`."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Sequence

from evoengine.errors import UsageError
from evoengine.records import Config
from evoengine.space.expression import Expression, Undefined


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
        """Return whether the expression holds for a configuration; False where it names a knob that has no value.

        Raises UsageError where text is used in arithmetic or compared with a number, on division by zero, and where the
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
        """Raise UsageError where the expression names any of `missing`, which are no knobs."""
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
