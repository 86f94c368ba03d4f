"""The gate's cases of kernels whose blocks compute whole rows, several at once and in several turns.

A configuration states it by `rows_per_block`, the rows at once, and `turns`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from evoengine.records import Config
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


def row_cells(rows: int, columns: int, config: Config) -> Iterator[Cell]:
    """Yield remainders of rows, turns without a row, and the problem's own rows."""
    at_once, block = rows_of(config)
    yield from remainder_cells("rows", block, rows, near=1)
    if at_once + 1 < block:
        yield LATER_TURN
    if rows * columns <= MOST_ELEMENTS:
        yield OWN_ROWS


def visited_rows(rows: int, whole: int, config: Config) -> Iterator[Cell]:
    """Yield the row cells that a case of so many rows visits, for a problem with `whole` rows."""
    at_once, block = rows_of(config)
    yield from visited_remainders("rows", rows, block, whole)
    if rows > block and rows % block > at_once and rows % at_once == 1 % at_once:
        yield LATER_TURN
    if rows == whole:
        yield OWN_ROWS
