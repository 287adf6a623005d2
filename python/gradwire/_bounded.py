"""A Store that is asked for no longer than a while.

A client of torch's Store waits for an answer as long as its connection stands: where the host of the Store is cut off, for many minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from gradwire.errors import RendezvousError


class BoundedStore:
    """Those methods of a torch Store by which ranks come back to a group. Each runs on a thread, which nobody waits for in vain.

    A request that has not ended in time goes on there; until it has, no other one is made.

    Args:
        store: of torch.
        timeout_s: longest wait for an answer.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._pending: _Request | None = None

    def set(self, key: str, value: str) -> None:
        """Writes."""
        self._ask("set", key, value)

    def get(self, key: str) -> Any:
        """Reads what is there."""
        return self._ask("get", key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys))

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer; raises what the Store raises.

        Raises:
            RendezvousError: it did not answer in time, or has not answered an earlier request yet.
        """
        if self._pending is not None and not self._pending.ended.is_set():
            raise RendezvousError(
                "the Store has not answered an earlier request: is its host cut off? Until it answers no rank can join"
            )
        self._pending = request = _Request(getattr(self._store, name), arguments)
        if not request.ended.wait(self._timeout_s):
            raise RendezvousError(
                f"the Store did not answer within {self._timeout_s:g} s: is its host cut off? Until it answers no rank can join"
            )
        if request.error is not None:
            raise request.error
        return request.result


class _Request:
    """One request on its way. Its thread is a daemon: the end of the process does not wait for it either."""

    def __init__(self, method: Any, arguments: tuple[Any, ...]) -> None:
        self.ended = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
        self._method, self._arguments = method, arguments
        try:
            threading.Thread(target=self._run, name="gradwire-store", daemon=True).start()
        except RuntimeError:
            # Python 3.12 starts none while the interpreter ends. Who leaves then only writes, for which torch's Store awaits no answer.
            self._run()

    def _run(self) -> None:
        try:
            self.result = self._method(*self._arguments)
        except Exception as error:  # noqa: BLE001 - for who asked
            self.error = error
        self.ended.set()
