"""The gate's cases of kernels whose blocks compute whole rows, several at once and in several turns.

A configuration states it by `rows_per_block`, the rows at once, and `turns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from evoengine.records import Config, Launch
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import Cell, own_tail, remainder_cells, visited_remainders

MANY_ROWS = 33
"""rows sufficient for sums over the errors of all rows, in the cases in which those are independent"""
LATER_TURN = Cell("rows", "a turn that is not whole behind a whole one")
OWN_ROWS = Cell("extents", "rows")
MOST_ELEMENTS = 1 << 22
"""limit of the elements of a case with all rows of the problem, which takes about a second"""


class RowCase(NamedTuple):
    name: str
    rows: int
    draw: str
    long: bool = False


def has_rows(config: Config) -> bool:
    """Return whether a configuration states how many rows a block has."""
    return {"rows_per_block", "turns"} <= config.keys()


def rows_of(config: Config) -> tuple[int, int]:
    """Return the number of rows that a block computes at once, and in all its turns."""
    at_once = int(config.get("rows_per_block", 1))
    return at_once, at_once * int(config.get("turns", 1))


def row_cases(rows: int, columns: int, config: Config, kinds: int, independent: str) -> Iterator[RowCase]:
    """Yield a single row, whole blocks, a last block with one row missing or with one row, and the problem's own tail.

    `kinds` is the number of kinds of extreme rows that follow one another, `independent` the draw of many ordinary
    rows.
    """
    at_once, block = rows_of(config)
    yield RowCase("one row", 1, "normal")
    yield RowCase("whole blocks", 2 * block, "extreme rows" if 2 * block < kinds else "constant rows")
    yield RowCase("one row more", -(-MANY_ROWS // block) * block + 1, independent)
    yield RowCase("extreme rows, one row short", -(-(kinds + 1) // block) * block - 1, "extreme rows")
    yield RowCase("remainders", block + own_tail(rows, block), "constant rows")
    if at_once < block:
        yield RowCase("turns that have no row", block + at_once + 1, "extreme rows")
    if rows * columns <= MOST_ELEMENTS:
        yield RowCase("own rows", rows, "extreme rows", long=True)


def row_cells(rows: int, columns: int, config: Config, values: Iterable[str]) -> frozenset[Cell]:
    """Return remainders of rows, turns without a row, the problem's own rows, and what values must show.

    There are none if the configuration does not state how many rows a block has.
    """
    if not has_rows(config):
        return frozenset()
    at_once, block = rows_of(config)
    found = {*remainder_cells("rows", block, rows, near=1), *(Cell("values", what) for what in values)}
    if at_once + 1 < block:
        found.add(LATER_TURN)
    if rows * columns <= MOST_ELEMENTS:
        found.add(OWN_ROWS)
    return frozenset(found)


def visited_rows(case: Case[Any], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
    """Return the cells that a case visits by its rows."""
    if case.whole is None or not has_rows(case.config):
        return frozenset()
    rows, (at_once, block) = case.problem.rows, rows_of(case.config)
    found = set(visited_remainders("rows", rows, block, case.whole.rows))
    if rows > block and rows % block > at_once and rows % at_once == 1 % at_once:
        found.add(LATER_TURN)
    if rows == case.whole.rows:
        found.add(OWN_ROWS)
    return frozenset(found)
