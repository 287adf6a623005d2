"""Calls of one group without an engine: they end when a test says so, and note when their results are delivered."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from gradwire._outbox import LaterOp
from gradwire.errors import MismatchError
from gradwire.torch._deliveries import Deliveries
from gradwire.torch._work import GradwireWork

PATIENCE_S = 120.0
A_MOMENT = timedelta(milliseconds=1)
ERROR = MismatchError("rank 0 called barrier, rank 1 all_reduce")


class Calls:
    """Calls of one group, of which each notes when its result is delivered."""

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.deliveries = Deliveries(os.getpid())
        self.works: list[GradwireWork] = []
        self.ops: list[LaterOp] = []
        self.steps: dict[int, Callable[[], None]] = {}
        self._callbacks: list[tuple[Any, Callable[[], None]]] = []
        self._completes: threading.Thread | None = None
        self._completer: Any = SimpleNamespace(
            last_error=None,
            sync_futures=False,
            is_current_thread=lambda: threading.current_thread() is self._completes,
            watch=lambda *call: self._callbacks.append(call),
        )

    def start(self, name: str = "all_gather", *, buffered: bool = True, is_waited_for: bool = False) -> GradwireWork:
        self.deliveries.bring()
        at, op = len(self.ops), LaterOp()
        work = GradwireWork(name, [op], [], self._completer, last=(lambda: self._deliver(at)) if buffered else None)
        self.ops.append(op)
        self.works.append(work)
        if self.deliveries.admit(work.ending, is_waited_for=is_waited_for, is_barrier=name == "barrier"):
            work.deliveries = self.deliveries
        return work

    def end(self, *numbers: int, error: Exception | None = None) -> None:
        """These calls end, and the completer finds it out."""
        for at in numbers:
            self.ops[at].resolve(None, error)
        ended = [call for call in self._callbacks if all(op.is_done() for op in call[0])]
        self._callbacks = [call for call in self._callbacks if call not in ended]
        for _, callback in ended:
            callback()

    @contextmanager
    def ended_meanwhile(self, *numbers: int) -> Iterator[None]:
        """The completer finds it out on a thread of its own."""
        self._completes = threading.Thread(target=self.end, args=numbers, daemon=True)
        self._completes.start()
        yield
        self._completes.join(PATIENCE_S)
        assert not self._completes.is_alive()

    def _deliver(self, at: int) -> None:
        self.steps.get(at, lambda: None)()
        self.delivered.append(at)
