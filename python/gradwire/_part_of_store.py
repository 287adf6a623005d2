"""A part of a Store, for groups that meet there at the same time as others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any


class PartOfStore:
    """Those methods of a Store by which groups are formed, with keys below a prefix.

    Args:
        store: a board's, or torch's.
        prefix: of every key.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self.is_of_one_start = getattr(store, "is_of_one_start", False)
        self.underlying_store = store
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        """Writes."""
        self.underlying_store.set(self._prefix + key, value)

    def get(self, key: str) -> Any:
        """Reads what is there."""
        return self.underlying_store.get(self._prefix + key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self.underlying_store.check([self._prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Counts up and returns the sum."""
        return int(self.underlying_store.add(self._prefix + key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        """Writes if what is there is as expected, and returns what the Store does."""
        return self.underlying_store.compare_set(self._prefix + key, expected, value)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Waits as the Store does."""
        self.underlying_store.wait([self._prefix + key for key in keys], timeout)

    def delete_key(self, key: str) -> None:
        """Removes it, where the Store can."""
        self.underlying_store.delete_key(self._prefix + key)
