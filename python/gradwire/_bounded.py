"""A Store that is asked for no longer than a while, and what it is called.

A client of torch's Store waits for an answer as long as its connection stands: where the host of the Store is cut off, for many minutes or
for ever, in C++, where no Ctrl-C is answered. So a thread asks, while the one that wants to know waits in Python.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from gradwire._in_time import comes, letting_go
from gradwire.errors import RendezvousError

# Longest wait for one answer while a group is formed: what a board of `_meeting.py` has, too.
ANSWER_S = 30.0
# Who asks in the last moment has an answer all the same, of a Store that many ask.
ANSWER_MIN_S = 2.0

NOBODY_JOINS = "Until it answers no rank can join"
NO_GROUP = "The ranks meet there, and form no group until it answers"


class BoundedStore:
    """Those methods of a torch Store by which groups are formed and ranks come back to them. For one thread.

    All requests run one after the other on one thread of its own, which the first one starts; so a Store that is not thread-safe is asked
    by one thread at a time. Nobody waits for it in vain: a request that has not ended in time goes on there, and until it has no other one
    is made.

    Args:
        store: of torch.
        timeout_s: longest wait for an answer.
        until: by `time.monotonic`, when who asks has no more time; then `ANSWER_MIN_S` is enough for an answer.
        meanwhile: what does not happen while it is silent, for the error.
    """

    def __init__(self, store: Any, timeout_s: float, *, until: float = math.inf, meanwhile: str = NOBODY_JOINS) -> None:
        self.underlying_store = store
        self.until = until
        self._timeout_s = timeout_s
        self._meanwhile = meanwhile
        self._pid = os.getpid()
        self._pending: _Request | None = None
        self._requests: queue.SimpleQueue[_Request | None] | None = None

    def set(self, key: str, value: str) -> None:
        """Writes."""
        self._ask("set", key, value)

    def get(self, key: str) -> Any:
        """Reads what is there."""
        return self._ask("get", key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        """Counts up and returns the sum."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        """Writes if what is there is as expected; nothing: an empty text. Returns what is there then, or else what was expected."""
        return self._ask("compare_set", key, expected, value)

    def delete_key(self, key: str) -> None:
        """Removes it, where the Store can."""
        self._ask("delete_key", key)

    def close(self) -> None:
        """Lets the thread go, once the request that it makes has ended. Another request starts another thread."""
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.put(None)

    def __del__(self) -> None:
        self.close()

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer; raises what the Store raises.

        Raises:
            RendezvousError: it did not answer in time, or has not answered an earlier request yet.
        """
        if os.getpid() != self._pid:
            # The thread stayed with the parent of a forked child.
            self._pid, self._pending, self._requests = os.getpid(), None, None
        if self._pending is not None and not self._pending.ended.is_set():
            raise self._silent("has not answered an earlier request")
        request = _Request(getattr(self.underlying_store, name), arguments)
        longest_s = min(self._timeout_s, max(self.until - time.monotonic(), ANSWER_MIN_S))
        self._pending = request
        with letting_go(request.ended):
            self._hand_over(request)
            is_answered = comes(request.ended, longest_s)
        if not is_answered:
            raise self._silent(f"did not answer within {round(longest_s, 1):g} s")
        self._pending = None
        return request.outcome()

    def _hand_over(self, request: _Request) -> None:
        if self._requests is not None:
            self._requests.put(request)
            return
        requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        requests.put(request)
        try:
            # A daemon: the end of the process does not wait for it either.
            threading.Thread(target=_work, args=(requests,), name="gradwire-store", daemon=True).start()
        except RuntimeError:
            # Python 3.12 starts none while the interpreter ends. Who leaves then only writes, for which torch's Store awaits no answer.
            # Where the system has no thread left the Store is asked as torch asks it, for as long as it takes.
            request.run()
            return
        except BaseException:  # interrupted: if it has begun, it ends with this request
            requests.put(None)
            raise
        self._requests = requests

    def _silent(self, what: str) -> RendezvousError:
        address = address_of(root_of(self.underlying_store))
        text = f"the Store{address and f' at {address}'} {what}: is its host cut off, or its process stopped? {self._meanwhile}"
        return RendezvousError(text, over=True, store=address)


class _Request:
    """One request on its way."""

    def __init__(self, method: Any, arguments: tuple[Any, ...]) -> None:
        self.ended = threading.Event()
        self._method, self._arguments = method, arguments
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes it; whatever comes of it is for who asked."""
        try:
            self._result = self._method(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - raised by `outcome`
            self._error = error
        self.ended.set()

    def outcome(self) -> Any:
        """What came of it: the result, or the Store's error is raised."""
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error  # its traceback has this frame, and would keep the Store


def _work(requests: queue.SimpleQueue[_Request | None]) -> None:
    """Makes one request after the other. It keeps none that has ended, and with it the Store, which may end with its last user."""
    while (request := requests.get()) is not None:
        request.run()
        del request


def give_time(store: Any, until: float) -> None:
    """Lets a Store, where it or what lies under it is a `BoundedStore`, answer until then, by `time.monotonic`."""
    while store is not None and not isinstance(store, BoundedStore):
        store = getattr(store, "underlying_store", None)
    if store is not None:
        store.until = max(store.until, until)


def root_of(store: Any) -> Any:
    """The Store under all prefixes."""
    while hasattr(store, "underlying_store"):  # torch's PrefixStore; this file does not know torch
        store = store.underlying_store
    return store


def address_of(store: Any) -> str:
    """`host:port` of a Store, or the path of its file; empty: it has neither."""
    if address := _text_of(store, "address"):  # of `_meeting.py`
        return address
    if host := _text_of(store, "host"):  # torch's TCPStore
        port = getattr(store, "port", "")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = _text_of(store, "path")  # torch's FileStore
    return os.path.abspath(path) if path else ""


def _text_of(store: Any, name: str) -> str:
    """Empty where it is no text: a Store of the user's may call anything by such a name, and torch decodes a path when it is asked."""
    try:
        found = getattr(store, name, "")
    except (RuntimeError, ValueError):
        return ""
    return found if isinstance(found, str) else ""
