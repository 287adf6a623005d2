"""A Store for tests whose ranks are all in one process."""

from __future__ import annotations


class Store:
    """Of one process, with the methods of torch's; a key that is not there is a KeyError."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.keys[key] = value

    def get(self, key: str) -> bytes:
        return self.keys[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.keys[key] = str(int(self.keys.get(key, "0")) + amount)
        return int(self.keys[key])

    def compare_set(self, key: str, expected: str, value: str) -> None:
        assert not expected
        self.keys.setdefault(key, value)

    def close(self) -> None:
        """Nothing to end."""
