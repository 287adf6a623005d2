"""A table on a screen of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from gradwire._columns import parts_of

_BETWEEN = 2  # blanks, two columns


class Columns:
    """Rows of cells. Where they are wider than the screen they are in several tables, each of which begins with the names.

    No number and no head is cut. Texts, and the names where there is room for nothing else, go on in a line below.

    Args:
        heads: of the columns.
        names: so many, the first ones, say what a row is of.
        texts: the columns of words, by their heads; all others are numbers.
    """

    def __init__(self, heads: Sequence[str], names: int, texts: Sequence[str]) -> None:
        self._heads, self._names, self._texts = heads, names, texts
        self._rows: list[tuple[tuple[str | Text, ...], str]] = []

    def add(self, *cells: str | Text, style: str = "") -> None:
        """One more row."""
        self._rows.append((cells, style))

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Table]:
        columns = zip(self._heads, *(cells for cells, _ in self._rows), strict=True)
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
        for cells, style in self._rows:
            table.add_row(*(cells[at] for at in part), style=style)
        return table
