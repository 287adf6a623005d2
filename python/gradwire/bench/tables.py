"""Tables of results on a terminal, which may be narrower than they are: in parts beneath each other, of which no cell is folded."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from gradwire._columns import parts_of

_BORDER = 1  # columns, before the first column and after each
_PADDING = 2  # of a column

Lines = Sequence[Sequence[str]]


def print_table(console: Console, title: str, heads: Sequence[str], lines: Lines, names: int) -> None:
    """Prints a table, as wide as it is where it fits.

    Where it does not, the title says what is the same in all lines, and the columns that follow the names are in several tables, each
    of which begins with the names. One that is still too wide, as it has one column besides, is printed so.

    Args:
        console: where to.
        title: of all.
        heads: of the columns.
        lines: a cell for each column.
        names: so many columns say what a line is of.
    """
    widths = [max(map(cell_len, column)) + _PADDING + _BORDER for column in zip(heads, *lines, strict=True)]
    parts = [list(range(len(heads)))]
    if _BORDER + sum(widths) > console.width:
        same = [at for at in range(1, names) if len({line[at] for line in lines}) == 1]
        title = ", ".join([title, *(f"{heads[at]} {lines[0][at]}" for at in same)])
        parts = parts_of(widths, [at for at in range(names) if at not in same], names, console.width - _BORDER)
    for part in parts:
        table = Table(title=title, title_justify="left", width=_BORDER + sum(widths[at] for at in part))
        for at in part:
            table.add_column(heads[at], justify="left" if at == 0 else "right", no_wrap=True)
        for line in lines:
            table.add_row(*(line[at] for at in part))
        console.print(table, crop=False)
        title = ""
