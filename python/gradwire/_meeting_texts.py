"""What the board of a meeting holds: a text below each key; and who waits for which.

Used on the thread of the server alone (`_meeting.py`). Who waits is woken by the one key that it waits for: with hundreds of ranks, each
of which writes while all others wait, waking everybody at each write would take rank 0 longer than all else.
"""

from __future__ import annotations

import asyncio

from gradwire._meeting_limits import NoRequestError, Room, is_count


class Texts:
    """The texts, by their keys.

    Args:
        keys_max: so many keys.
        room: for the bytes, which others may use too.
    """

    def __init__(self, keys_max: int, room: Room) -> None:
        self._keys_max = keys_max
        self._room = room
        self._texts: dict[str, str] = {}
        self._awaited: dict[str, set[asyncio.Future[None]]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    def get(self, key: str) -> str | None:
        """What lies there, if anything does."""
        return self._texts.get(key)

    def set(self, key: str, text: str) -> None:
        """Writes.

        Raises:
            NoRequestError: there is no room for it, here and below.
        """
        before = self._texts.get(key)
        if before is None and len(self._texts) >= self._keys_max:
            raise NoRequestError(f"more than {self._keys_max} keys")
        self._room.take(len(text) - (-len(key) if before is None else len(before)))
        self._texts[key] = text
        _wake(self._awaited.pop(key, set()))

    def set_once(self, key: str, text: str) -> None:
        """Writes if nothing is there yet."""
        if key not in self._texts:
            self.set(key, text)

    def add(self, key: str) -> str:
        """Counts up by one and returns the sum.

        Raises:
            NoRequestError: what is there is no number.
        """
        text = self._texts.get(key, "0")
        if not is_count(text):
            raise NoRequestError("what is there is no number")
        self.set(key, str(int(text) + 1))
        return self._texts[key]

    def forget(self, prefix: str) -> None:
        """Makes room: nobody needs what lies below `prefix` any more."""
        for key in [key for key in self._texts if key.startswith(prefix)]:
            self._room.take(-len(key) - len(self._texts.pop(key)))

    async def wait(self, key: str, timeout_s: float) -> None:
        """Until something lies there, all are let go, or the time is over."""
        if key in self._texts:
            return
        future = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(key, set()).add(future)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            waiting = self._awaited.get(key, set())
            waiting.discard(future)
            if not waiting:
                self._awaited.pop(key, None)

    def let_go(self) -> None:
        """Ends all waits: it is over."""
        for waiting in self._awaited.values():
            _wake(waiting)


def _wake(waiting: set[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
