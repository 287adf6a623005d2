"""A table on a screen of any width."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradwire._columns import parts_of

_BETWEEN = 2  # blanks, two columns


@dataclass(frozen=True)
class Row:
    """A line of a table, which may go on in further ones.

    Attributes:
        cells: one for each column.
        style: of all of them.
        weight: of two rows that do not both have room the one with more of it is shown.
    """

    cells: tuple[str | Text, ...]
    style: str = ""
    weight: float = 0.0


class Columns:
    """Rows of cells. Where they are wider than the screen they are in several tables, each of which begins with the names.

    No number and no head is cut. Texts, and the names where there is room for nothing else, go on in a line below.

    Args:
        heads: of the columns.
        names: so many, the first ones, say what a row is of.
        texts: the columns of words, by their heads; all others are numbers.
        rest: what the rows are of, and where all of them are found, for the line that says how many there is no room for.
    """

    def __init__(self, heads: Sequence[str], names: int, texts: Sequence[str], rest: str = "rows") -> None:
        self._heads, self._names, self._texts, self._rest = heads, names, texts, rest
        self._rows: list[Row] = []

    def add(self, *cells: str | Text, style: str = "", weight: float = 0.0) -> None:
        """One more row."""
        self._rows.append(Row(cells, style, weight))

    def within(self, lines: int, console: Console, options: ConsoleOptions) -> RenderableType:
        """The table in no more than so many lines: its rows of the greatest weight, in their order, and how many more there are.

        Nothing where there is no room for a row.
        """
        # Of thousands of rows only those are measured that may have room, as each takes a line at least.
        most = max(0, min(len(self._rows), lines))
        if most == len(self._rows) and height_of([self], console, options) <= lines:
            return self
        heaviest = nsmallest(most, range(len(self._rows)), key=lambda at: -self._rows[at].weight)

        def height(many: int) -> int:
            return height_of(self._only(heaviest[:many]), console, options)

        # The more rows, the more lines.
        many = bisect_right(range(1, min(most, len(self._rows) - 1) + 1), lines, key=height)
        return Group(*self._only(heaviest[:many])) if many else Group()

    def _only(self, chosen: Sequence[int]) -> tuple[Columns, Text]:
        """These rows, and how many more there are."""
        part = Columns(self._heads, self._names, self._texts)
        part._rows = [self._rows[at] for at in sorted(chosen)]
        return part, Text(f"\u2026 {len(self._rows) - len(chosen)} more {self._rest}", style="dim")

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Table]:
        columns = zip(self._heads, *(row.cells for row in self._rows), strict=True)
        widths = [max(cell_len(str(cell)) for cell in column) + _BETWEEN for column in columns]
        for part in parts_of(widths, range(self._names), self._names, options.max_width + _BETWEEN):
            yield self._table(part)

    def _table(self, part: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for at in part:
            is_text = self._heads[at] in self._texts
            table.add_column(
                self._heads[at],
                justify="left" if is_text else "right",
                no_wrap=not is_text and at >= self._names,
                overflow="fold",
            )
        for row in self._rows:
            table.add_row(*(row.cells[at] for at in part), style=row.style)
        return table


def height_of(what: Sequence[RenderableType], console: Console, options: ConsoleOptions) -> int:
    """Lines that this takes on a screen of this width."""
    return sum(len(console.render_lines(one, options.reset_height(), pad=False)) for one in what)
