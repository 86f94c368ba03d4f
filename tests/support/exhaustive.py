"""Which cases of a table `make test` runs; the others are marked `exhaustive`, and `make test-all` runs them too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def more(cases: Iterable[Any]) -> list[ParameterSet]:
    """Cases for parametrize, all exhaustive: more of the same. A tuple is one case of several arguments."""
    return [_marked(case) for case in cases]


def representatives(cases: Iterable[ParameterSet], *starts: str) -> list[ParameterSet]:
    """The cases; all are exhaustive but, for each start, the first whose id begins with it.

    Raises ValueError for a start that no id begins with.
    """
    cases = list(cases)
    kept = set()
    for start in starts:
        found = next((n for n, case in enumerate(cases) if case.id.startswith(start)), None)
        if found is None:
            raise ValueError(f"no case begins with {start!r}")
        kept.add(found)
    return [case if n in kept else _marked(case) for n, case in enumerate(cases)]


def planted(names: str | Sequence[str], faults: Iterable[Sequence[Any]], *fast: str) -> pytest.MarkDecorator:
    """Parametrize a test by planted faults, each a name and its values; `fast` are the `starts` of representatives."""
    cases = [pytest.param(*values, id=name) for name, *values in faults]
    return pytest.mark.parametrize(names, representatives(cases, *fast))


def each_nth(nth: int, cases: Iterable[Any]) -> list[ParameterSet]:
    """The first case and each n-th after it; those between are exhaustive."""
    cases = [case if isinstance(case, ParameterSet) else _case(case) for case in cases]
    return [case if place % nth == 0 else _marked(case) for place, case in enumerate(cases)]


def _case(case: Any) -> ParameterSet:
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)


def _marked(case: Any) -> ParameterSet:
    if not isinstance(case, ParameterSet):
        case = _case(case)
    return pytest.param(*case.values, marks=[*case.marks, pytest.mark.exhaustive], id=case.id)
