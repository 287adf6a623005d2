"""What staging needs of an accelerator: its streams, events and page-locked memory, and nothing else.

`CudaStreams` is what runs on a GPU. Everything that has an order is decided in `_staging.py` in terms of this interface, so
that the order can be tested where there is none (`tests/e2e/lazy_streams.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

Stream = Any
Event = Any

OUT, BACK = "out", "back"
"""Directions of a copy: out of the accelerator's memory, and back into it. Each has a stream of its own."""


class Streams(Protocol):
    """The queues of one kind of accelerator. Nothing here waits but `synchronize`."""

    def current(self, device: torch.device) -> Stream:
        """The stream that the calling thread's work on a device goes to."""

    def side(self, device: torch.device, direction: str) -> Stream:
        """A stream of gradwire's own for copies in one direction."""

    def record(self, stream: Stream) -> Event:
        """An event after everything that the stream has been given so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on comes after the event."""

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Gives the stream a copy between device and host."""

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """The allocator must not give the tensor's memory away before the stream has done what it was given so far."""

    def synchronize(self, event: Event) -> None:
        """Blocks this thread until the event has passed; other threads run on."""

    def passed(self, event: Event) -> bool:
        """Whether it has."""

    def entered(self, stream: Stream) -> AbstractContextManager[Any]:
        """Makes the stream the thread's current one; a future completed inside has its values ready on that stream."""

    def pinned(self, size: int) -> Tensor:
        """New page-locked memory of so many bytes."""

    def unpin(self) -> None:
        """Gives page-locked memory that nobody refers to any more back to the system."""


class CudaStreams:
    """`Streams` of CUDA's devices, all of them.

    gradwire's own threads have device 0 for their current one, whatever the process computes on. Whatever returns to "the current device"
    there would create a context on it, hundreds of MB that a process on another GPU has no use for, so the stream's or the event's device
    is entered first: leaving it sets the old one back only if that has a context already.
    """

    def __init__(self) -> None:
        self._sides: dict[tuple[int | None, str], torch.cuda.Stream] = {}

    def current(self, device: torch.device) -> Stream:
        """See `Streams`, like all that follow."""
        return torch.cuda.current_stream(device)

    def side(self, device: torch.device, direction: str) -> Stream:
        """One for each device and direction: a copy back must not queue behind one out that waits for a kernel."""
        key = (device.index, direction)
        if key not in self._sides:
            self._sides.setdefault(key, torch.cuda.Stream(device))
        return self._sides[key]

    def record(self, stream: Stream) -> Event:
        """Of the kind that a thread sleeps for."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """On the device, not here."""
        stream.wait_event(event)

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Asynchronous if the host's side is page-locked; torch makes what is not dense so on the device."""
        with self.entered(stream):
            copy_into(target, source, non_blocking=True)

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """Tells torch's caching allocator."""
        tensor.record_stream(stream)

    def synchronize(self, event: Event) -> None:
        """Without the GIL."""
        with torch.cuda.device(event.device):
            event.synchronize()

    def passed(self, event: Event) -> bool:
        """Asks the driver."""
        with torch.cuda.device(event.device):
            return bool(event.query())

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        """The device first: `torch.cuda.stream` alone ends by setting the stream that was current on the device that was."""
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def pinned(self, size: int) -> Tensor:
        """From torch's allocator, which keeps it from reuse as long as a copy that it knows of is under way."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def unpin(self) -> None:
        """Where torch can."""
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()


_of_type: dict[str, Streams] = {"cuda": CudaStreams()}


def copy_into(target: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
    """Writes a caller's tensor, or one of ours, on whatever thread: one made in inference mode may be written nowhere else."""
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.copy_(source, non_blocking=non_blocking)


def streams_of(tensor: Tensor) -> Streams | None:
    """The streams that a tensor's device has; None: it is in host memory."""
    return _of_type.get(tensor.device.type)
