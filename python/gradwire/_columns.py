"""Tables that may be wider than the terminal: which columns stand beside each other."""

from __future__ import annotations

from collections.abc import Sequence


def parts_of(widths: Sequence[int], naming: Sequence[int], first: int, width: int) -> list[list[int]]:
    """The columns of each table: all that name the lines, and of the others, from the `first` one on, as many as fit, but one at least.

    Args:
        widths: of all columns, with what stands between two.
        naming: those that name the lines.
        first: of the others.
        width: of the terminal.
    """
    parts: list[list[int]] = []
    room = 0
    for at in range(first, len(widths)):
        room -= widths[at]
        if room < 0:
            parts.append(list(naming))
            room = width - sum(widths[name] for name in naming) - widths[at]
        parts[-1].append(at)
    return parts
