"""Streams that do nothing before somebody has a right to expect it: what a GPU may do at worst, on the CPU.

What a stream is given waits in its queue. Only a wait that orders it (`synchronize`, or reading a tensor as its stream's
owner) runs the queue, and of other streams only what it was told to wait for. A copy whose event nobody waits for never
happens, so that a missing edge shows as a wrong number and not as a race.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gradwire.torch import _streams


class Stream:
    """A queue of what is to be done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.todo: list[Callable[[], None]] = []
        self.done = 0

    def run(self, upto: int) -> None:
        while self.done < upto:
            step, self.done = self.todo[self.done], self.done + 1
            step()


class Event:
    """The end of the first `at` steps of a stream."""

    def __init__(self, stream: Stream, at: int) -> None:
        self.stream, self.at = stream, at


class LazyStreams:
    """`gradwire.torch._streams.Streams` over tensors in host memory, each thread with a current stream of its own.

    Args:
        eager_reader: callers read tensors with no further ado, as they do on a CPU: what their stream is told to wait
            for, and what a future is completed after, happens at once.
    """

    def __init__(self, *, eager_reader: bool = False) -> None:
        self.log: list[str] = []
        self.pinned_bytes = 0
        self.held: list[tuple[int, str]] = []
        self._eager = eager_reader
        self._sides: dict[str, Stream] = {}
        self._of_thread = threading.local()
        self._lock = threading.RLock()
        self.copied = threading.Condition(self._lock)

    def current(self, device: torch.device) -> Stream:
        del device
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = Stream("caller")
        return self._of_thread.stream

    def side(self, device: torch.device, direction: str) -> Stream:
        del device
        return self._sides.setdefault(direction, Stream(direction))

    def record(self, stream: Stream) -> Event:
        with self._lock:
            self.log.append(f"record {stream.name}")
            return Event(stream, len(stream.todo))

    def wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            self.log.append(f"{stream.name} waits for {event.stream.name}")
            stream.todo.append(lambda: event.stream.run(event.at))
            if self._eager and stream.name == "caller":
                stream.run(len(stream.todo))

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._lock:
            self.log.append(f"copy on {stream.name}")
            stream.todo.append(lambda: _streams.copy_into(target, source))
            self.copied.notify_all()

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.held.append((tensor.data_ptr(), stream.name))

    def synchronize(self, event: Event) -> None:
        with self._lock:
            self.log.append(f"synchronize {event.stream.name}")
            event.stream.run(event.at)

    def passed(self, event: Event) -> bool:
        with self._lock:
            return event.stream.done >= event.at

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        if self._eager:
            with self._lock:
                stream.run(len(stream.todo))
        yield

    def pinned(self, size: int) -> torch.Tensor:
        self.pinned_bytes += size
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN in every floating-point dtype

    def unpin(self) -> None:
        self.log.append("unpin")

    # What a test does as the owner of tensors.

    def compute(self, step: Callable[[], Any]) -> None:
        """A kernel on this thread's stream."""
        with self._lock:
            self.current(torch.device("cpu")).todo.append(step)

    def end(self) -> None:
        """The device does what its side streams have been given: later calls of a group may ask for its end."""
        with self._lock:
            for side in self._sides.values():
                side.run(len(side.todo))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a copy to the host on this thread's stream would show."""
        with self._lock:
            stream = self.current(tensor.device)
            stream.run(len(stream.todo))
            return tensor.clone()


def on(streams: LazyStreams, run: Callable[[], None]) -> None:
    """Runs with host tensors taken for those of a device."""
    _streams._of_type["cpu"] = streams
    try:
        run()
    finally:
        del _streams._of_type["cpu"]
        streams.end()
