"""What the groups of `shrink_group` are called, and where they meet.

A job may lose ranks for months, one after the other, and each time its groups are shrunk. So a name does not grow with each shrink, and the
Store that was the first group's is that of all: torch's `TCPStore` ends the connection of who asks for a key of more than 8 KiB.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

DIGEST_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Origin:
    """A group that was not made by a shrink, and what has become of it since.

    Attributes:
        name, store: of the group.
        shrinks: a digest of all shrinks since, one after the other; empty: there were none. Ranks of one group have shrunk alike, so they
            agree on it. Who has shrunk otherwise meets nobody, and so does another group with the same ranks: its origin is another one.
    """

    name: str
    store: Any
    shrinks: str = ""

    def without(self, excluded: Iterable[int]) -> Origin:
        """The same, shrunk once more.

        Args:
            excluded: ranks of the present group.
        """
        told = f"{self.shrinks}/{','.join(map(str, sorted(excluded)))}"
        return dataclasses.replace(self, shrinks=hashlib.blake2b(told.encode(), digest_size=DIGEST_BYTES).hexdigest())

    @property
    def shrunk(self) -> str:
        """Name of the group that comes of it, and prefix of its keys."""
        return f"{self.name}/shrunk/{self.shrinks}"
