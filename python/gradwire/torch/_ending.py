"""What follows the end of a call's operations: its results go to the caller's tensors, once, when somebody first sees the end.

Whoever waits, polls or completes a future comes here (`_work.py`), on a thread of the caller's or on the completer's. A call of several
has endings as its parts, of which each sends its own results on their way.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence

from gradwire._completer import Completer
from gradwire._outbox import Op
from gradwire.errors import AbortedError, EngineError, GradwireError, GroupError
from gradwire.torch._pinned import Fence
from gradwire.torch._staging import Staging

logger = logging.getLogger("gradwire")


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
        on_seen: called once by whoever sees the end first.
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
        self.on_seen: Callable[[], None] | None = None
        self._ops = ops
        self._completer = completer
        self._staging = staging
        self._parts = parts
        self._last = last
        self._failure = failure
        self._settled = False
        self._lock = threading.Lock()

    @property
    def failure(self) -> Exception | None:
        """Why nothing was started; when settled, the error that the call ended with."""
        return self._failure

    def has_come(self) -> bool:
        """Whether the operations have ended."""
        return all(op.is_done() for op in self._ops)

    def wait_until(self, end: float | None) -> bool:
        """Whether the operations have ended by then. The result of each part is sent on its way as soon as it is there."""
        for part in self._parts:
            if not part.wait_until(end):
                return False
            part.settle()
        return bool(self._parts) or all(
            op.wait(None if end is None else max(0.0, end - time.monotonic())) for op in self._ops
        )

    def settle(self) -> Exception | None:
        """What follows, once: copies out of staging buffers. Returns the error, if any."""
        with self._lock:
            if not self._settled:
                self._failure = self._failure or next(filter(None, (op.error() for op in self._ops)), None)
                self._bring_back()
                if self._failure is not None and self.explain is not None:
                    self._failure = self.explain(self._failure)
                if self._failure is not None:
                    self._completer.last_error = _alone(self._failure)
                for op in self._ops:
                    if (choice := op.choice()) is not None:
                        logger.info("%s", choice)
                if self.on_seen is not None:
                    self.on_seen()
                self._settled = True
            return self._failure

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
        except Exception as error:  # noqa: BLE001  a GPU that failed in the copy: the caller's collective failed
            self._failure = error
        self._staging, self._last = None, None


def _alone(error: Exception) -> Exception:
    """A copy for who asks later: `error` itself holds each frame that it went through, and so the model and the batch of a failed step."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001  of a class that is not made of what its instances hold
        copied = None
    return copied if type(copied) is type(error) else GradwireError(f"{type(error).__name__}: {error}")


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
    return [Fence(f.streams, f.device, f.streams.record(f.streams.current(f.device))) for f in parts]
