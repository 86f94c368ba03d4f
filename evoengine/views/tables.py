"""Tables that drop and shorten columns to fit the terminal.

A cell is a string, or a `Styled` one. Its text goes through `plain`, so that no cell can print markup, an escape
sequence or a line break.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from evoengine.text import plain

GAP = "  "
HEADING, DIM = "bold", "dim"


class Styled(NamedTuple):
    text: str
    style: str


Cell = str | Styled


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    right: bool = False
    leaves: int = 0
    """priority for removal in a narrow terminal: the highest first, of equal ones the rightmost; 0 is never removed"""
    least: int = 0
    """minimum width to which free text may be shortened; 0: never shortened"""
    folds: bool = False
    """whether free text that is too long is wrapped; else it is truncated and ends with …"""


class Table:
    """Rows with a heading. A column that is empty in every row is omitted.

    If the width is too small, free text is shortened first, then headings are broken at underscores, and then columns
    are removed; a last line names those.
    """

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, title: str = "") -> None:
        """Create a table. Each row has a cell for every column. If no column has a name, there is no heading."""
        self._title = plain(title)
        # each distinct cell of a column is measured once: most of thousands of rows are alike
        found: list[Sequence[Cell]] = [*zip(*rows, strict=True)] or [()] * len(columns)
        texts = [{cell: _plain(cell) for cell in set(cells)} for cells in found]
        widths = [max((_width(_text(cell)) for cell in of_column.values()), default=0) for of_column in texts]
        filled = [i for i, _ in enumerate(zip(columns, found, strict=True)) if widths[i]]  # as many cells as columns
        self._columns, self._widths = [columns[i] for i in filled], [widths[i] for i in filled]
        self._cells = [[texts[i][cell] for cell in found[i]] for i in filled]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        layout = _Layout(console, self._columns, self._widths, options.max_width)
        if self._title:
            yield Segment(f"{self._title}\n", _style(console, HEADING))
        yield from layout.rows([[Styled(name, HEADING) for name in heading] for heading in layout.headings()])
        yield from layout.rows([self._cells[i] for i in layout.kept])
        if layout.left_out:
            remark = f"columns hidden in this narrow terminal: {', '.join(layout.left_out)}"
            for line in _folded(console, remark, options.max_width):
                yield Segment(f"{line}\n", _style(console, DIM))


def rows_table(rows: Iterable[tuple[str, str]], title: str = "") -> Table:
    """Return a table of names and texts, one per row. Long texts continue on the lines below."""
    return Table([Column(""), Column("", least=20, folds=True)], rows, title=title)


class _Layout:
    """The columns kept at a width, with their widths and headings. `widths` are those of the widest cells."""

    def __init__(self, console: Console, columns: Sequence[Column], widths: Sequence[int], most: int) -> None:
        self._console, self._columns = console, columns
        self._colourful = console.is_terminal
        self.kept = list(range(len(columns)))
        self._headings = [[plain(c.name)] for c in columns]
        self._fit_to_headings(widths)
        if self._least() > most:
            self._headings = [
                _broken(heading, max(width, 6)) for width, [heading] in zip(widths, self._headings, strict=True)
            ]
            self._fit_to_headings(widths)
        while self._least() > most and (leaving := [i for i in self.kept if columns[i].leaves]):
            self.kept.remove(max(leaving, key=lambda i: (columns[i].leaves, i)))
        self._squeeze(most)

    def _fit_to_headings(self, widths: Sequence[int]) -> None:
        self._widths = [
            max(width, *map(_width, heading)) for width, heading in zip(widths, self._headings, strict=True)
        ]

    def _least(self) -> int:
        """Return the minimum width of the kept columns with their separators."""
        return sum(map(self._narrowest, self.kept)) + len(GAP) * (len(self.kept) - 1)

    def _narrowest(self, i: int) -> int:
        own, least = self._widths[i], self._columns[i].least
        return min(own, max(least, *map(_width, self._headings[i]))) if least else own

    def _squeeze(self, most: int) -> None:
        """Shorten free-text columns by the excess width."""
        for i in reversed(self.kept):
            excess = sum(self._widths[j] for j in self.kept) + len(GAP) * (len(self.kept) - 1) - most
            if excess > 0:
                self._widths[i] = max(self._narrowest(i), self._widths[i] - excess)

    @property
    def left_out(self) -> list[str]:
        return [plain(c.name) for i, c in enumerate(self._columns) if i not in self.kept]

    def headings(self) -> list[list[str]]:
        """Return the lines of each column's name, padded at the top to the tallest.

        A column has no lines if no column has a name.
        """
        headings = [self._headings[i] for i in self.kept]
        height = max(map(len, headings), default=0) if any(name for heading in headings for name in heading) else 0
        return [[""] * (height - len(heading)) + heading if height else [] for heading in headings]

    def rows(self, columns: Sequence[Sequence[Cell]]) -> Iterator[Segment]:
        """Yield the rows of the kept columns. A row has several lines if free text is wrapped."""
        shown = [self._shown(i, cells) for i, cells in zip(self.kept, columns, strict=True)]
        blanks = [" " * self._widths[i] for i in self.kept]
        for cells, parts in zip(zip(*columns, strict=True), zip(*shown, strict=True), strict=True):
            for n in range(max(map(len, parts))):
                line = [part[n] if n < len(part) else blank for part, blank in zip(parts, blanks, strict=True)]
                if self._colourful:
                    yield from self._coloured(cells, line)
                else:
                    yield Segment(f"{GAP.join(line).rstrip()}\n")

    def _shown(self, i: int, cells: Sequence[Cell]) -> list[list[str]]:
        """Return the lines of each cell, padded to the width of the column."""
        made = {cell: [self._padded(i, line) for line in self._lines(i, _text(cell))] for cell in set(cells)}
        return [made[cell] for cell in cells]

    def _coloured(self, cells: Sequence[Cell], line: Sequence[str]) -> Iterator[Segment]:
        for n, (cell, text) in enumerate(zip(cells, line, strict=True), start=1):
            text = text.rstrip() if n == len(line) else text + GAP
            yield Segment(text, _style(self._console, cell.style) if isinstance(cell, Styled) else None)
        yield Segment.line()

    def _padded(self, i: int, text: str) -> str:
        blanks = " " * (self._widths[i] - _width(text))
        return blanks + text if self._columns[i].right else text + blanks

    def _lines(self, i: int, text: str) -> list[str]:
        """Return the lines of a cell's text in its column."""
        width, column = self._widths[i], self._columns[i]
        if not column.least or _width(text) <= width:
            return [text]
        if column.folds:
            return _folded(self._console, text, width)
        return [set_cell_size(text, width - 1).rstrip() + "…"]


def _broken(name: str, width: int) -> list[str]:
    """Split a column's name into lines at underscores and blanks."""
    lines = [""]
    for piece in name.replace("_", "_ ").split(" "):
        between = " " if lines[-1] and not lines[-1].endswith("_") else ""
        if lines[-1] and _width(lines[-1] + between + piece) > width:
            lines.append(piece)
        else:
            lines[-1] += between + piece
    return lines


def _folded(console: Console, text: str, width: int) -> list[str]:
    return [line.plain.rstrip() for line in Text(text).wrap(console, width, overflow="fold")]


def _plain(cell: Cell) -> Cell:
    return Styled(plain(cell.text), cell.style) if isinstance(cell, Styled) else plain(cell)


def _text(cell: Cell) -> str:
    return cell.text if isinstance(cell, Styled) else cell


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _style(console: Console, name: str) -> Style:
    return console.get_style(name)
