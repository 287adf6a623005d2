"""How a message names ranks: of a large group the first ones and how many more, so that it stays one that is read."""

from __future__ import annotations

from collections.abc import Iterable

# As many as the engine's messages name: the ranks of a host, which fail together.
NAMED_MAX = 8


def first_named(ranks: Iterable[object], separator: str = ", ") -> str:
    """The first eight of them, or of what is said of each, and how many more there are."""
    said = list(map(str, ranks))
    more = len(said) - NAMED_MAX
    return separator.join(said[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
