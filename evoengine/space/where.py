"""Picks configurations by an expression over their knobs: `tile_m >= 64 and family == "wgmma"`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from evoengine.errors import UsageError
from evoengine.records import Config
from evoengine.space.expression import Expression, Undefined


class Where:
    """An expression of the space language (`evoengine.space.expression`) that is true of some configurations.

    One that does not have a knob which the expression needs is not picked.
    """

    def __init__(self, text: str) -> None:
        """Raises UsageError naming what is not allowed."""
        self._expression = Expression.parse(text, "--where")
        self._checked: set[frozenset[tuple[str, str]]] = set()

    def picks(self, config: Config) -> bool:
        """Raises UsageError where text is calculated with or compared with a number, and on a division by zero."""
        needed = {name: config[name] for name in self._expression.names if name in config}
        kinds = {name: "text" if isinstance(value, str) else "number" for name, value in needed.items()}
        # before it is evaluated: a text times a large number would take all memory
        if (seen := frozenset(kinds.items())) not in self._checked:
            if self._expression.kind(kinds) == "text":
                raise UsageError(f"--where: `{self._expression.text}` is text; compare it with something")
            self._checked.add(seen)
        try:
            return bool(self._expression.evaluate(config))
        except Undefined:
            return False

    def require_known(self, knobs: Iterable[str]) -> None:
        """Raises UsageError where the expression names what is none of `knobs`."""
        known = sorted(set(knobs))
        for name in sorted(self._expression.names - set(known)):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"--where: `{self._expression.text}` names {name}, which no trial has as a knob; {hint}")
