"""One call of a collective on NumPy arrays: on its way to the engine (`Call`), and in flight (`Operation`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gradwire import _arrays, _native
from gradwire._arrays import Array
from gradwire._durations import seconds
from gradwire.errors import InvalidRequestError, WaitTimeoutError
from gradwire.report import DeliveryReport


class Operation:
    """One call of a collective. Until it has ended, its arrays belong to it: neither write them nor read a result."""

    def __init__(self, op: _native.Op, kind: str, result: Array | None, after: list[Callable[[], None]]) -> None:
        self._op = op
        self._kind = kind
        self._result = result
        self._after = after
        self._lock = threading.RLock()  # a signal handler may wait for the call whose wait it interrupts

    def wait(self, timeout: timedelta | None = None) -> None:
        """Blocks until the result is in its array.

        Args:
            timeout: None waits as long as it takes, which the communicator's timeout bounds.

        Raises:
            ConfigError: `timeout` is no timedelta.
            WaitTimeoutError: `timeout` passed first; the call goes on and may be waited for again. Fields: during, waited_s.
            GroupError: the call failed, and so will every later one of this communicator.
        """
        longest = None if timeout is None else seconds("timeout", timeout)
        if not self._op.wait(longest):
            text = f"{self._kind} has not ended after {longest:g} s; it goes on"
            raise WaitTimeoutError(text, during=self._kind, waited_s=longest)
        error = self._op.error()
        if error is not None:
            raise error
        with self._lock:
            while self._after:
                step = self._after[-1]
                step()
                # Not before: who was interrupted in it, or could not write, may wait again, and its interrupter may have done so.
                if self._after and self._after[-1] is step:
                    self._after.pop()

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not. The result is there after `wait`."""
        return self._op.is_done()

    @property
    def result(self) -> Array | None:
        """The array that holds the result, after waiting for it; None where this rank gets none.

        Raises:
            GroupError: the call failed.
        """
        self.wait()
        return self._result

    def report(self) -> DeliveryReport:
        """What was delivered, after waiting for it.

        Raises:
            GroupError: the call failed.
        """
        self.wait()
        fields = self._op.report()
        assert fields is not None, "a call that ended well has a report"
        return DeliveryReport.from_native(fields)


class Call:
    """A call on its way to the engine: arrays, and what is copied where when it has ended."""

    def __init__(self, kind: str, source: Array | None, target: Array | None, **options: Any) -> None:
        self.kind = kind
        self.result = target
        self.after: list[Callable[[], None]] = []
        self.options: dict[str, Any] = options
        self._source = source
        self._target = target
        self._load = False
        self._only_reads = False
        self._keep: list[Array] = []

    def copy(self) -> Call:
        """Of a collective that only moves."""
        array = self._target if self._source is None else self._source
        assert array is not None, "every collective that moves has an array"
        _arrays.check(array)
        self.options |= _arrays.copy_options(array)
        return self

    def load(self) -> None:
        """What the target holds now matters: a call in place, or values that stay where a result is missing."""
        self._load = True

    def only_reads(self) -> None:
        """The array is the target of the others: it may be one that cannot be written."""
        self._only_reads = True

    def add_residual(self, residual: Array) -> None:
        """Memory for what did not count.

        Raises:
            InvalidRequestError: it is not like the array, or memory that the call uses already.
        """
        assert self._source is not None, "whoever reduces has an array"
        _arrays.check_like("residual", residual, "the array", self._source.shape, self._source.dtype)
        for other in (self._source, self._target):
            if other is not None and _arrays.share_memory(residual, other):
                raise InvalidRequestError("residual shares memory with the array or with out: it needs its own")
        rest = _arrays.writable(residual, self.after, load=True)
        self.options["residual"] = _arrays.address(rest)
        self._keep.append(rest)

    def _memory(self) -> tuple[Array | None, Array | None]:
        if self._only_reads:
            assert self._source is not None, "it is what is read"
            source = _arrays.readable(self._source)
            return source, source
        target = None if self._target is None else _arrays.writable(self._target, self.after, load=self._load)
        if self._source is self._target and self._load:
            return target, target
        # one array for both may be given to an all-to-all, too, which is never in place
        return None if self._source is None else _arrays.readable(self._source, beside=target), target

    def request(self, timeout_s: float) -> _native.Call:
        """As the binding takes it."""
        source, target = self._memory()
        request: _native.Call = {
            "kind": self.kind,
            "input": _arrays.address(source),
            "output": _arrays.address(target),
            "timeout_s": timeout_s,
            "keep": [source, target, *self._keep],
        }
        request.update(self.options)  # type: ignore[typeddict-item]
        return request
