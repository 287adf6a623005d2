"""What follows the end of a call's operations: its results go to the caller's tensors, once, when somebody first sees the end.

Whoever waits, polls or completes a future comes here (`_work.py`), on a thread of the caller's or on the completer's. A call of several
has endings as its parts, of which each sends its own results on their way.

Who comes while another thread delivers waits for it. Who interrupts a delivery on its own thread, a signal handler or a finalizer, goes on
without it.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from gradwire._completer import Completer
from gradwire._outbox import Op
from gradwire.errors import AbortedError, EngineError, ForkedError, GradwireError, GroupError
from gradwire.torch._pinned import Fence
from gradwire.torch._staging import Staging
from gradwire.torch._streams import BACK

logger = logging.getLogger("gradwire")

# Of each ending that is being settled, the thread that does it.
_settling: list[int] = []


def _forget_other_threads() -> None:
    """In a forked child, where a new thread may get the number of one that is not there."""
    own = threading.get_ident()
    _settling[:] = [thread for thread in _settling if thread == own]


os.register_at_fork(after_in_child=_forget_other_threads)


class Ending:
    """The end of one call.

    Args:
        ops: operations in flight.
        completer: is told of the error.
        staging: copies results back when the operations have ended.
        parts: endings that come before this one.
        last: what makes the result of the parts' results.
        failure: why nothing was started.

    Attributes:
        fences: on devices: what has to pass before the result may be read. Known when settled.
        explain: what an error of the operations is told to the caller as.
        on_failed: called when it is settled and has failed, and when its caller is told of it after that.
        on_seen: called once by whoever sees the end first.
        turn: among the calls of its group, see `_deliveries.py`; 0: it has none.
        is_told: its caller knows how it ended, or is sure to be told.
        bare: what its group keeps of it beside this.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        completer: Completer,
        *,
        staging: Staging | None = None,
        parts: Sequence[Ending] = (),
        last: Callable[[], None] | None = None,
        failure: Exception | None = None,
    ) -> None:
        self.fences: list[Fence] = []
        self.explain: Callable[[Exception], Exception | None] | None = None
        self.on_failed: Callable[[Ending], None] | None = None
        self.on_seen: Callable[[], None] | None = None
        self.turn = 0
        self.is_told = False
        self.bare: Bare | None = None
        self.ops = ops
        self._completer = completer
        self._staging = staging
        self._parts = parts
        self._last = last
        self._failure = failure
        self._settled = False
        # The thread that settles it. It may be interrupted by a signal handler that comes here again, hence the kind of lock.
        self._settler = 0
        self._raised = ""  # while it was settled, and taken for a signal handler's
        self._lock = threading.RLock()
        self._owner_pid: int | None = None

    @property
    def failure(self) -> Exception | None:
        """Why nothing was started; when settled, the error that the call ended with."""
        return self._failure

    @property
    def is_settled(self) -> bool:
        """Whether the results are in the caller's tensors, or on their way."""
        return self._settled

    @property
    def delivers(self) -> bool:
        """Whether `settle` writes tensors of the caller's. False when it has."""
        return (
            (self._staging is not None and self._staging.delivers)
            or self._last is not None
            or (len(self._parts) > 0 and any(part.delivers for part in self._parts))
        )

    def belongs_to(self, pid: int) -> None:
        """Only this process may settle it: in a forked child its lock may be held by a thread that is not there."""
        self._owner_pid = pid
        for part in self._parts:
            part.belongs_to(pid)

    def is_in_hand(self) -> bool:
        """Whether the thread that asks is about to settle it or a part of it, and was interrupted."""
        return self._settler == threading.get_ident() or (
            len(self._parts) > 0 and any(part.is_in_hand() for part in self._parts)
        )

    def has_come(self) -> bool:
        """Whether the operations have ended."""
        return have_ended(self.ops)

    def has_failed(self) -> bool:
        """Whether the operations have ended and nothing of them will be delivered."""
        if self._failure is not None and not self._parts:
            return True
        if self._parts:
            return all(part.has_failed() for part in self._parts)
        return self.has_come() and any(op.error() is not None for op in self.ops)

    def tell(self) -> None:
        """Who made the call is told how it ended, or is sure to be: then no barrier has to."""
        was_told, self.is_told = self.is_told, True
        if self.bare is not None:
            self.bare.is_told = True
        for part in self._parts:
            part.tell()
        if not was_told:
            self._say_if_failed()

    def wait_until(self, end: float | None) -> bool:
        """Whether the operations have ended by then. The result of each part is sent on its way as soon as it is there."""
        for part in self._parts:
            if not part.wait_until(end):
                return False
            part.settle()
        return bool(self._parts) or wait_for(self.ops, end)

    def settle(self) -> Exception | None:
        """What follows, once: copies out of staging buffers. Returns the error, if any.

        Raises:
            ForkedError: it belongs to the process that this one was forked from, which had not settled it.
        """
        if self._settled:
            return self._failure
        if self._owner_pid is not None:
            self._check_process()
        own = threading.get_ident()
        if own in _settling and self.is_in_hand():  # an interrupted delivery goes on when the handler has returned
            return self._failure
        with self._lock:
            try:
                _settling.append(own)
                self._settler = own
                if not self._settled:
                    self._follow()
                    self._settled = True
            finally:
                self._settler = 0
                _settling.remove(own)
        return self._failure

    def _check_process(self) -> None:
        if (child := os.getpid()) != self._owner_pid:
            text = (
                f"this call belongs to process {self._owner_pid} and cannot be waited for in its forked child {child}"
            )
            raise ForkedError(text, owner_pid=self._owner_pid, child_pid=child)

    def _follow(self) -> None:
        self._failure = self._failure or next(filter(None, (op.error() for op in self.ops)), None)
        self._bring_back()
        if self._failure is not None and self.explain is not None:
            try:
                self._failure = self.explain(self._failure)
            except Exception as error:  # for who asks for this call, and not for others
                if self._is_of_a_handler(error):
                    raise
                self._failure = error
            self.explain = None  # of a delivery that is interrupted later
        if self._failure is not None:
            self._completer.last_error = _alone(self._failure)
            self._say_if_failed()
        for op in self.ops:
            if (choice := op.choice()) is not None:
                logger.info("%s", choice)
        on_seen, self.on_seen = self.on_seen, None
        if on_seen is not None:
            on_seen()

    def _say_if_failed(self) -> None:
        if self._failure is not None and self.on_failed is not None:
            self.on_failed(self)

    def _bring_back(self) -> None:
        """The results, into the caller's tensors."""
        errors = [error for part in self._parts if (error := part.settle()) is not None]
        if errors:
            self._failure = _cause(errors)
        for part in self._parts:
            self.fences += part.fences
        try:
            if self._failure is None and self._staging is not None:
                self._staging.finish()
                self.fences += self._staging.arrived
            elif self._staging is not None:
                self._staging.abandon()
            if self._failure is None and self._last is not None:
                self.fences += _made_of(self.fences, self._last)
        except Exception as error:  # a GPU that failed in the copy: the caller's collective failed
            if self._is_of_a_handler(error):
                raise
            self._failure = without_frames(error)
        self._staging, self._last = None, None

    def _is_of_a_handler(self, error: Exception) -> bool:
        """Whether what was raised here goes to the program. The same again does not."""
        if not may_be_of_a_handler(error) or _text_of(error) == self._raised:
            return False
        self._raised = _text_of(error)
        return True


class Bare:
    """What a group keeps of a call that brings its own results, or has failed: no tensors. What else there is of it belongs to its Work."""

    __slots__ = ("failure", "is_of_group", "is_told", "ops", "turn")

    def __init__(self, turn: int, ops: Sequence[Op], failure: Exception | None = None) -> None:
        self.turn = turn
        self.ops = ops
        self.is_told = False
        self._ends_with(failure)

    def has_come(self) -> bool:
        """As `Ending`."""
        return have_ended(self.ops)

    def wait_until(self, end: float | None) -> bool:
        """The same."""
        return wait_for(self.ops, end)

    def has_failed(self) -> bool:
        """Whether the call, which has ended, has."""
        if self.failure is None:
            self._ends_with(next(filter(None, (op.error() for op in self.ops)), None))
        return self.failure is not None

    def _ends_with(self, error: Exception | None) -> None:
        self.failure = None if error is None else _text_of(error)
        # With all that was in flight: who is told of one of these calls knows it of the others.
        self.is_of_group = isinstance(error, GroupError)


def is_settling() -> bool:
    """Whether the thread that asks is about to settle any call and was interrupted: others may wait until it goes on."""
    return threading.get_ident() in _settling


def have_ended(ops: Sequence[Op]) -> bool:
    """Whether all of them have."""
    return ops[0].is_done() if len(ops) == 1 else all(op.is_done() for op in ops)


def wait_for(ops: Sequence[Op], end: float | None) -> bool:
    """Whether all of them have ended by then."""
    return all(op.wait(None if end is None else max(0.0, end - time.monotonic())) for op in ops)


def may_be_of_a_handler(error: Exception) -> bool:
    """Of a signal handler, which only the main thread runs. What a copy raises is a RuntimeError, and never for the time that it takes."""
    is_of_a_copy = isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, TimeoutError)
    return not is_of_a_copy and threading.current_thread() is threading.main_thread()


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def without_frames(error: Exception) -> Exception:
    """The same error. Its Work, which torch may hold in ways that no collector sees, would hold model and batch of the failed step.

    What the caller was handling when it was raised is the caller's, and stays whole.
    """
    at: BaseException | None = error
    while at is not None and at.__traceback__ is not None:
        at.__traceback__ = at.__context__ = None
        at = at.__cause__
    return error


def _alone(error: Exception) -> Exception:
    """A copy for who asks later: `error` itself holds each frame that it went through, and so the model and the batch of a failed step."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001  of a class that is not made of what its instances hold
        copied = None
    return copied if type(copied) is type(error) else GradwireError(_text_of(error))


def _cause(errors: Sequence[Exception]) -> Exception:
    """Of the parts' errors, in order, what the others follow from.

    A part that cannot be copied ends the group, and parts that are in flight may fail with that end before their results are there.
    """

    def follows(error: Exception) -> int:
        return 2 if isinstance(error, AbortedError) else isinstance(error, (EngineError, GroupError))

    return min(errors, key=follows)


def _made_of(parts: Sequence[Fence], last: Callable[[], None]) -> list[Fence]:
    """Makes a result of what came before these fences, on the current streams of this thread; what comes after it."""
    for fence in parts:
        fence.join()
    last()
    made = [Fence(f.streams, f.device, f.streams.record(f.streams.current(f.device))) for f in parts]
    for fence in {f.device: f for f in made}.values():
        # The result of a later call, which may be for the same memory, comes on this stream.
        fence.streams.wait(fence.streams.side(fence.device, BACK), fence.event)
    return made
