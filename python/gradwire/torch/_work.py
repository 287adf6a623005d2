"""The Work that `torch.distributed` hands to the caller of a collective.

C++ keeps it in a holder that forwards only `wait` and `get_future`. An error is never given to
`Future.set_exception`: the gradient reducer of DDP crashes on such a future. The future that leaves this file is
`base.then(unwrap)`, where `base` holds the tensors or the error as a plain value.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from gradwire._completer import Completer
from gradwire._outbox import Op
from gradwire.errors import InvalidRequestError, WaitTimeoutError
from gradwire.report import DeliveryReport, DeliveryTotals
from gradwire.torch import _compat, _memory
from gradwire.torch._deliveries import Deliveries, InFlight, one_for_each_device
from gradwire.torch._ending import Ending, is_settling, may_be_of_a_handler
from gradwire.torch._pinned import Fence
from gradwire.torch._staging import Staging, after

NO_TIMEOUT = timedelta(0)
MESSAGES = ("send", "receive")
# torch's hooks that start collectives in the callbacks of others. Ranks match calls by their order, which is theirs alone while
# callbacks run on the caller's thread: on another one they would race with the calls for the next bucket.
NESTING_HOOKS = tuple(
    f"torch.distributed.algorithms.ddp_comm_hooks.{name}" for name in ("powerSGD_hook", "quantization_hooks")
)
# This one has another hook start the first: with one of torch's own and a wrapper of it there are up to five frames between.
NESTING_WRAPPER = "hook_with_zero_interleaved_fn"
FRAMES_BETWEEN = 6


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
        # What follows the operations, and who is told of it.
        self.ending: Ending = Ending(
            ops, completer, staging=staging, parts=[part.ending for part in parts], last=last, failure=failure
        )
        # A send or a receive, or several of those, stands apart from the order of the group's calls.
        self.is_message: bool = all([part.is_message for part in parts]) if parts else name in MESSAGES  # noqa: C419  no generator
        # So it waits for calls that deliver by themselves, too.
        self.is_barrier: bool = any([part.is_barrier for part in parts]) if parts else name == "barrier"  # noqa: C419  as above
        self._ops = ops
        self._result = result
        self._parts = parts
        self._completer = completer
        # A signal handler may ask for the future while this thread makes it, hence the kind of lock.
        self._lock = threading.RLock()
        self._future: torch.futures.Future[Any] | None = None
        # The thread that has made it and has not seen to its completion yet.
        self._asker = 0
        self._trace: torch.futures.Future[Any] | None = None
        # Called once before the future completes, if the collective ended well: on a GPU on a stream on which the result is there.
        self.observer: Callable[[GradwireWork], None] | None = None
        # Of the call, among those of its group from 1 on; of several, none.
        self.sequence_number = 0
        self.timeout_of_call = NO_TIMEOUT
        # Of a barrier, which has no tensors: what torch has entered for it into the registry of works that graphs may wait for.
        self.registered: dist.Work | None = None
        # What has to come before this call's results; None: nothing.
        self.deliveries: Deliveries | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Blocks until the result is there; on a GPU, until it is on its way: what the caller starts from then on comes after it.

        So are those of the calls of the group before it (`_deliveries.py`), of which a failure is told to who waits for that call.

        Args:
            timeout: 0 waits as long as it takes, which the group's timeout bounds.

        Raises:
            WaitTimeoutError: `timeout` passed first; the collective goes on.
            GradwireError: the collective failed.
        """
        seconds = timeout.total_seconds()
        end = time.monotonic() + seconds if seconds > 0 else None
        before = self.deliveries
        self.ending.tell()  # who waits, even if not to the end
        try:
            if not self._come_before(end):
                text = f"a call that was made before this {self.name} is still in flight after {seconds:g} s"
                raise WaitTimeoutError(text, waited_s=seconds)
            if not self.ending.wait_until(end):
                raise WaitTimeoutError(f"{self.name} is still in flight after {seconds:g} s", waited_s=seconds)
            self._end()
            if _compat.may_be_graph_input():
                self._strike_off()
        finally:
            if before is not None:  # what has been brought is on its way, whatever becomes of this one
                before.join(self.ending.turn)
        return True

    def _strike_off(self) -> None:
        """Takes this call out of torch's registry, which holds its tensors, as the `wait` of torch's own works does.

        torch finds it by them, takes it out and waits for it, which is at its end here; for another call with the same one, too.
        """
        with torch.no_grad():
            for tensor in self._result:
                torch.ops._c10d_functional.wait_tensor(tensor)
        registered, self.registered = self.registered, None
        if registered is not None:
            registered.synchronize()

    def _come_before(self, end: float | None) -> bool:
        """Whether the calls that come before this one have ended by then."""
        if self.deliveries is None:
            return True
        if self.ending.has_failed():  # it delivers nothing that could overtake them
            self.deliveries.first_in_flight(self.ending.turn, is_barrier=self.is_barrier)
            return True
        return self.deliveries.wait(self.ending.turn, end, is_barrier=self.is_barrier)

    def stand_apart(self) -> None:
        """Who calls this brings the result as soon as it is there, or its error: of other calls only barriers wait for this one."""
        self.ending.tell()
        if self.deliveries is not None:
            self.deliveries.keep(self.ending)

    def wait_apart(self) -> None:
        """Waits for this call and for none before it, of which none may write the same memory.

        Raises:
            GradwireError: the collective failed.
        """
        self.ending.wait_until(None)
        self._end()

    def _end(self) -> None:
        if self._trace is not None and not self._completer.is_current_thread():
            self._trace.wait()
        error = self._settle()
        if error is not None:
            raise error
        for fence in self.ending.fences:
            fence.join()

    def _settle(self) -> Exception | None:
        was_settled = self.ending.is_settled
        error = self.ending.settle()
        if error is None and not self.ending.is_settled:
            text = f"the result of this {self.name} comes when who asks returns, which interrupts the thread that brings it"
            return WaitTimeoutError(text)
        if self.deliveries is not None and not was_settled:
            self.deliveries.let_go(self.ending)
        return error

    def _first_in_flight(self) -> InFlight | None:
        """Of this call and those whose results come before its own, the one that has not ended."""
        if not self.ending.has_come():
            return self.ending
        if self.deliveries is None or self.ending.is_settled or self.ending.has_failed():
            return None
        return self.deliveries.first_in_flight(self.ending.turn, is_barrier=self.is_barrier)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of result tensors. For a hook that nests collectives it has ended: see `NESTING_HOOKS`."""
        return self.future_of(self._result, ended=_is_nesting(sys._getframe().f_back))

    def future_of(self, value: Any, *, ended: bool = False) -> torch.futures.Future[Any]:
        """A future of `value`, which holds the result tensors in the caller's form. The first call decides.

        Args:
            value: what the future will hold.
            ended: wait for the operations first, so that callbacks run on the caller's thread.
        """
        known = self._future
        if known is not None and known.done():
            return known
        if self._interrupts():
            base, future = self._new_future()
            self._complete_at_end(base, value, ended=True)
            return future
        with self._lock:
            if self._future is not None:
                return self._future
            base, future = self._new_future()
            self._future, self._asker = future, threading.get_ident()
        try:
            self._complete_at_end(base, value, ended=ended)
        except BaseException:  # an interrupt of the wait, or a forked child: nobody would complete this one
            if not base.done():
                self._future = None
            raise
        finally:
            self._asker = 0
        self.stand_apart()  # the future brings it
        return future

    def _interrupts(self) -> bool:
        """Whether a signal handler or a finalizer asks, for whose thread others may wait before they complete the future."""
        return self._asker == threading.get_ident() or is_settling()

    def _new_future(self) -> tuple[torch.futures.Future[Any], torch.futures.Future[Any]]:
        """One to complete, and what leaves this file."""
        base: torch.futures.Future[Any] = torch.futures.Future(devices=_memory.devices_of(self._result))
        return base, base.then(_unwrap)

    def _complete_at_end(self, base: torch.futures.Future[Any], value: Any, *, ended: bool) -> None:
        # On the completer's thread nobody else could complete it, should the callback that asks wait for it.
        if ended or self._completer.sync_futures or self._completer.is_current_thread():
            while (first := self._first_in_flight()) is not None:
                for op in first.ops:
                    op.wait()
        if not self.ending.has_come():
            for part in self._parts:
                part.on_end(partial(self._settle_part, part))
        self._complete_when_due(base, value)

    def _settle_part(self, part: GradwireWork) -> None:
        # Else it comes with the others of this call, behind what has to come before.
        if self.deliveries is None or self.deliveries.first_in_flight(self.ending.turn) is None:
            part.ending.settle()

    def _complete_when_due(self, base: torch.futures.Future[Any], value: Any) -> None:
        first = self._first_in_flight()
        if first is None:
            self.complete(base, value)
        else:
            self._completer.watch(first.ops, partial(self._complete_when_due, base, value))

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
        """Completes a future of this work, whose operations are done. With the error, whatever fails here: somebody waits for it."""
        observer = None
        try:
            error = self._settle()
            if self.ending.is_settled:
                observer, self.observer = self.observer, None
        except Exception as failed:
            if not self.ending.is_settled and may_be_of_a_handler(failed):
                raise
            error = failed
        try:
            with after(one_for_each_device(self._fences())):
                if error is None and observer is not None:
                    observer(self)
                observer = None  # what it holds may be gone as soon as somebody has the result
                base.set_result(value if error is None else error)
        except Exception as failed:
            if base.done():
                raise
            base.set_result(failed)

    def report(self) -> DeliveryReport:
        """What was delivered, after `wait`.

        Raises:
            WaitTimeoutError: the collective is still in flight.
            GradwireError: it failed.
        """
        self._check_delivered()
        if self._parts:
            return DeliveryReport.of_parts([part.report() for part in self._parts])
        fields = self._ops[0].report() if self._ops else None
        return DeliveryReport(collective=self.name) if fields is None else DeliveryReport.from_native(fields)

    def totals(self) -> DeliveryTotals:
        """The sums of `report`, in a time that does not grow with the ranks. Raises what that raises."""
        self._check_delivered()
        if self._parts:
            return DeliveryTotals.of_parts([part.totals() for part in self._parts])
        fields = self._ops[0].totals() if self._ops else None
        return DeliveryTotals() if fields is None else DeliveryTotals(**fields)

    def _check_delivered(self) -> None:
        if self._first_in_flight() is not None:
            raise WaitTimeoutError(f"{self.name} is still in flight: wait for it first")
        error = self.exception()
        if error is not None:
            raise error

    @property
    def was_submitted(self) -> bool:
        """Whether it takes a place among the calls of its group."""
        return self.ending.failure is None or bool(self._ops)

    def is_completed(self) -> bool:
        """Whether it has ended, well or not, so that `wait` would not block; on a GPU, whether the result is there for every stream."""
        if self._first_in_flight() is not None:
            return False
        self._settle()
        return all(fence.passed() for fence in self._fences())

    def _fences(self) -> list[Fence]:
        """What has to pass before this call's results may be read, and those of the calls before it."""
        before = [] if self.deliveries is None else self.deliveries.arriving(self.ending.turn)
        return [*before, *self.ending.fences]

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """The error that it ended with, if any: known as soon as nothing of the call will be delivered, whatever is in flight before it."""
        if self._first_in_flight() is not None:
            return None
        self.ending.tell()
        return self._settle()

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._result

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def timeout(self) -> timedelta:
        """How long the call may take: its own timeout, or the group's."""
        return self.timeout_of_call

    def _get_sequence_number(self) -> int:
        return self.sequence_number

    def source_rank(self) -> int:
        """The sender of a receive from any rank, after `wait`.

        Raises:
            InvalidRequestError: it is no receive.
        """
        if self.name != "receive":
            raise InvalidRequestError(f"{self.name}: only a receive has a source rank")
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
        failure = next((work.ending.failure for work in works if work.ending.failure is not None), None)
        work = cls(name, ops, result, completer, parts=works, last=last, failure=failure)
        work.timeout_of_call = max((part.timeout_of_call for part in works), default=NO_TIMEOUT)
        return work


def _is_nesting(frame: FrameType | None) -> bool:
    """Whether a hook that nests collectives runs in a frame, or has called it; None: no Python does, as on autograd's thread of a GPU."""
    if frame is not None and frame.f_globals.get("__name__") in NESTING_HOOKS:
        return True
    for _ in range(FRAMES_BETWEEN):
        if frame is None or frame.f_code.co_name == NESTING_WRAPPER:
            return frame is not None
        frame = frame.f_back
    return False


def _unwrap(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value
