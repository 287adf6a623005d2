"""The Work that `torch.distributed` hands to the caller of a collective.

C++ keeps it in a holder that forwards only `wait` and `get_future`. An error is never given to
`Future.set_exception`: the gradient reducer of DDP crashes on such a future. The future that leaves this file is
`base.then(unwrap)`, where `base` holds the tensors or the error as a plain value.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire._completer import Completer
from gradwire._outbox import Op
from gradwire.errors import WaitTimeoutError
from gradwire.report import DeliveryReport
from gradwire.torch import _memory
from gradwire.torch._pinned import Fence
from gradwire.torch._staging import Staging, after

logger = logging.getLogger("gradwire")

NO_TIMEOUT = timedelta(0)
# torch's hooks that start collectives in the callbacks of others. Ranks match calls by their order, which is theirs alone while
# callbacks run on the caller's thread: on another one they would race with the calls for the next bucket.
NESTING_HOOKS = tuple(
    f"torch.distributed.algorithms.ddp_comm_hooks.{name}" for name in ("powerSGD_hook", "quantization_hooks")
)


class GradwireWork(dist.Work):
    """One call of a collective: usually one operation of the engine, several when coalesced.

    Args:
        name: of the collective, for messages.
        ops: operations in flight.
        result: tensors that hold the result, the value of the future.
        completer: thread that completes futures.
        staging: copies results back when the operations have ended.
        parts: works that are waited for with this one.
        last: what makes the result of the parts' results.
        failure: why nothing was started, delivered to whoever waits.
    """

    def __init__(
        self,
        name: str,
        ops: Sequence[Op],
        result: list[torch.Tensor],
        completer: Completer,
        *,
        staging: Staging | None = None,
        parts: Sequence[GradwireWork] = (),
        last: Callable[[], None] | None = None,
        failure: Exception | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.submitted_s = time.monotonic()
        self._ops = ops
        self._result = result
        self._staging = staging
        self._parts = parts
        self._last = last
        self._completer = completer
        self._failure = failure
        self._settled = False
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._trace: torch.futures.Future[Any] | None = None
        # What an error of the operations is told to the caller as.
        self.explain: Callable[[Exception], Exception | None] | None = None
        # Called once before the future completes, if the collective ended well.
        self.observer: Callable[[GradwireWork], None] | None = None
        # Called once by whoever sees the end first.
        self.on_seen: Callable[[], None] | None = None
        # On devices: what has to pass before the result may be read. Known when settled.
        self._fences: list[Fence] = []

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Blocks until the result is there; on a GPU, until it is on its way: what the caller starts from then on comes after it.

        Args:
            timeout: 0 waits as long as it takes, which the group's timeout bounds.

        Raises:
            WaitTimeoutError: `timeout` passed first; the collective goes on.
            GradwireError: the collective failed.
        """
        seconds = timeout.total_seconds()
        if not self._wait_until(time.monotonic() + seconds if seconds > 0 else None):
            raise WaitTimeoutError(f"{self.name} is still in flight after {seconds:g} s", waited_s=seconds)
        if self._trace is not None and not self._completer.is_current_thread():
            self._trace.wait()
        error = self.settle()
        if error is not None:
            raise error
        for fence in self._fences:
            fence.join()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of result tensors. For a hook that nests collectives it has ended: see `NESTING_HOOKS`."""
        return self.future_of(self._result, ended=_calling_module() in NESTING_HOOKS)

    def future_of(self, value: Any, *, ended: bool = False) -> torch.futures.Future[Any]:
        """A future of `value`, which holds the result tensors in the caller's form. The first call decides.

        Args:
            value: what the future will hold.
            ended: wait for the operations first, so that callbacks run on the caller's thread.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            base: torch.futures.Future[Any] = torch.futures.Future(devices=_memory.devices_of(self._result))
            self._future = base.then(_unwrap)
        # On the completer's thread nobody else could complete it, should the callback that asks wait for it.
        if ended or self._completer.sync_futures or self._completer.is_current_thread():
            for op in self._ops:
                op.wait()
        if self._has_ended():
            self.complete(base, value)
        else:
            for part in self._parts:
                part.on_end(part.settle)
            self.on_end(lambda: self.complete(base, value))
        return self._future

    def on_end(self, callback: Callable[[], object]) -> None:
        """Calls back when the operations have ended: on the completer's thread, or now where there are none."""
        if self._ops:
            self._completer.watch(self._ops, callback)
        else:
            callback()

    def wait_also_for(self, trace: torch.futures.Future[Any]) -> None:
        """`wait` returns after this future too, which the end of the operations completes."""
        self._trace = trace

    def complete(self, base: torch.futures.Future[Any], value: Any) -> None:
        """Completes a future of this work, whose operations are done."""
        error = self.settle()
        if error is None and self.observer is not None:
            self.observer(self)
        with after(self._fences):
            base.set_result(value if error is None else error)

    def settle(self) -> Exception | None:
        """What follows the end of the operations, once: copies out of staging buffers. Returns the error, if any."""
        with self._lock:
            if not self._settled:
                self._failure = self._failure or next(filter(None, (op.error() for op in self._ops)), None)
                self._bring_back()
                if self._failure is not None and self.explain is not None:
                    self._failure = self.explain(self._failure)
                if self._failure is not None:
                    self._completer.last_error = self._failure
                for op in self._ops:
                    if (choice := op.choice()) is not None:
                        logger.info("%s", choice)
                if self.on_seen is not None:
                    self.on_seen()
                self._settled = True
            return self._failure

    def _bring_back(self) -> None:
        """The results, into the caller's tensors."""
        for part in self._parts:
            self._failure = part.settle() or self._failure
            self._fences += part._fences
        try:
            if self._failure is None and self._staging is not None:
                self._staging.finish()
                self._fences += self._staging.arrived
            elif self._staging is not None:
                self._staging.abandon()
            if self._failure is None and self._last is not None:
                self._fences += _made_of(self._fences, self._last)
        except Exception as error:  # noqa: BLE001  a GPU that failed in the copy: the caller's collective failed
            self._failure = error
        self._staging, self._last = None, None

    def report(self) -> DeliveryReport:
        """What was delivered, after `wait`.

        Raises:
            WaitTimeoutError: the collective is still in flight.
            GradwireError: it failed.
        """
        if not self._has_ended():
            raise WaitTimeoutError(f"{self.name} is still in flight: wait for it first")
        error = self.settle()
        if error is not None:
            raise error
        if self._parts:
            return DeliveryReport.of_parts([part.report() for part in self._parts])
        fields = self._ops[0].report() if self._ops else None
        return DeliveryReport(collective=self.name) if fields is None else DeliveryReport.from_native(fields)

    @property
    def was_submitted(self) -> bool:
        """Whether it takes a place among the calls of its group."""
        return self._failure is None or bool(self._ops)

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; on a GPU, whether the result is there for every stream."""
        if not self._has_ended():
            return False
        self.settle()
        return all(fence.passed() for fence in self._fences)

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.settle() is None

    def exception(self) -> Exception | None:
        """The error that it ended with, if any."""
        return self.settle() if self._has_ended() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._result

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def source_rank(self) -> int:
        """The sender of a receive from any rank, after `wait`."""
        return self.report().sources[0].rank

    _source_rank = source_rank

    @classmethod
    def joined(cls, works: Sequence[GradwireWork], completer: Completer) -> GradwireWork:
        """One work for several, which ends when all have ended."""
        result = [tensor for work in works for tensor in work._result]
        return cls.following("coalesced", works, result, completer)

    @classmethod
    def following(
        cls,
        name: str,
        works: Sequence[GradwireWork],
        result: list[torch.Tensor],
        completer: Completer,
        last: Callable[[], None] | None = None,
    ) -> GradwireWork:
        """One work for several, with a result of its own that `last` makes of theirs."""
        ops = [op for work in works for op in work._ops]
        failure = next((work._failure for work in works if work._failure is not None), None)
        return cls(name, ops, result, completer, parts=works, last=last, failure=failure)

    def _has_ended(self) -> bool:
        """Whether the operations have."""
        return all(op.is_done() for op in self._ops)

    def _wait_until(self, end: float | None) -> bool:
        """Whether the operations have ended by then. The result of each part is sent on its way as soon as it is there."""
        for part in self._parts:
            if not part._wait_until(end):
                return False
            part.settle()
        return bool(self._parts) or all(
            op.wait(None if end is None else max(0.0, end - time.monotonic())) for op in self._ops
        )


def _calling_module() -> str | None:
    """Whose Python calls the caller of this function, through C++ or not; None: nobody's, as on autograd's thread of a GPU."""
    try:
        return sys._getframe(2).f_globals.get("__name__")
    except ValueError:
        return None


def _made_of(parts: Sequence[Fence], last: Callable[[], None]) -> list[Fence]:
    """Makes a result of what came before these fences, on the current streams of this thread; what comes after it."""
    for fence in parts:
        fence.join()
    last()
    return [Fence(f.streams, f.device, f.streams.record(f.streams.current(f.device))) for f in parts]


def _unwrap(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value
