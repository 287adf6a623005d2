"""The tensors of one call on their way to the engine and back. Called while a call is prepared, and when it has ended.

The engine sums in host memory. A tensor in a GPU's goes there and back beside everything else, ordered by events; no thread
that computes waits for a copy:

    caller's stream  kernels --+ issued                                       + join --> kernels
    out stream                 +--> copy --+ fetched                          |
    one thread                             +--> submit                        |
    engine                                        send, reduce, receive --+   |
    back stream                                                           +--> copy, arrived

So the copies of a call run while the one before it is sent. Large calls are cut into pieces that are calls of their own here
(`_pieces.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from gradwire._runtime import configuration
from gradwire.errors import InvalidRequestError
from gradwire.torch._pinned import Fence, Lease, PinnedPool
from gradwire.torch._streams import BACK, OUT, Streams, copy_into, streams_of


class Staging:
    """What one call does with its tensors before and after the engine has their memory.

    Attributes:
        fetched: what has to pass before the engine may read; empty where everything was in host memory.
        arrived: what has to pass before anybody may read results, known after `finish`.
    """

    __slots__ = ("_leases", "_steps", "arrived", "fetched")

    def __init__(self) -> None:
        self.fetched: list[Fence] = []
        self.arrived: list[Fence] = []
        self._steps: list[Callable[[], None]] = []
        self._leases: list[Lease] = []

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Contiguous host memory of the dtype of `like`, whose contents are undefined."""
        streams = streams_of(like)
        elems = 1
        for length in shape:
            elems *= length
        lease = None if streams is None or not elems else pool_of(streams).lease(elems * like.element_size())
        if lease is None:
            return torch.empty(tuple(shape), dtype=like.dtype, device="cpu")
        self._leases.append(lease)
        return lease.memory[: elems * like.element_size()].view(like.dtype).view(tuple(shape))

    def fetch(self, source: Tensor, target: Tensor) -> None:
        """Copies a caller's tensor into host memory of the same shape: now, or once the caller's stream has come to it."""
        streams = streams_of(source)
        if streams is None:
            target.copy_(source)
            return
        out = streams.side(source.device, OUT)
        streams.wait(out, streams.record(streams.current(source.device)))
        streams.copy(out, target, source)
        streams.hold(source, out)
        self.fetched.append(Fence(streams, source.device, streams.record(out)))

    def deliver(self, source: Tensor, target: Tensor) -> None:
        """Copies host memory into a caller's tensor of the same shape when the call has ended."""
        streams = streams_of(target)
        if streams is None:
            self._steps.append(partial(_copy_on_host, source, target))
            return
        # The caller's stream may still read what the tensor held, or what was in its memory before.
        issued = streams.record(streams.current(target.device))
        self._steps.append(partial(self._deliver, streams, issued, source, target))

    @property
    def delivers(self) -> bool:
        """Whether anything is to be copied into the caller's tensors when the call has ended."""
        return bool(self._steps)

    def finish(self) -> None:
        """The call has ended well: sends the results on their way. At most once."""
        for step in self._steps:
            step()
        self._give_back(self.arrived)

    def abandon(self) -> None:
        """The call has failed: the caller's tensors stay as they are. At most once."""
        self._give_back(self.fetched)

    def _deliver(self, streams: Streams, issued: object, source: Tensor, target: Tensor) -> None:
        _check_that_it_has_memory(target)
        back = streams.side(target.device, BACK)
        streams.wait(back, issued)
        streams.copy(back, target, source)
        streams.hold(target, back)
        self.arrived.append(Fence(streams, target.device, streams.record(back)))

    def _give_back(self, fences: list[Fence]) -> None:
        self._steps.clear()  # first: who is interrupted below comes here again, and the memory may be another call's by then
        for lease in self._leases:
            lease.give_back(fences)
        self._leases.clear()


def after(fences: Sequence[Fence]) -> ExitStack:
    """Inside, what is done on the devices of these fences comes after them, and a future completed is ready with them."""
    stack = ExitStack()
    for fence in fences:
        back = fence.streams.side(fence.device, BACK)
        # What is made of several results is made on the stream of whoever saw their end first, not on this one.
        fence.streams.wait(back, fence.event)
        stack.enter_context(fence.streams.entered(back))
    return stack


def pool_of(streams: Streams) -> PinnedPool:
    """The page-locked memory of this process."""
    if streams not in _pools:
        _pools.setdefault(streams, PinnedPool(streams, configuration().pinned_mb << 20))
    return _pools[streams]


def reach(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    return 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


_pools: dict[Streams, PinnedPool] = {}


def has_its_memory(tensor: Tensor) -> bool:
    """Whether its storage, which the program may have resized, holds all its elements."""
    elems = tensor.numel()
    if elems and not tensor.is_contiguous():  # of most it is not asked for each dimension
        elems = reach(tensor)
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    return elems == 0 or held >= tensor.storage_offset() + elems


def _check_that_it_has_memory(target: Tensor) -> None:
    # A result may come long after its call, and torch would copy it to address 0, or behind the end.
    if not has_its_memory(target):
        raise InvalidRequestError(
            "the memory of a tensor was given back (resize_ of its storage) before its result came"
        )


def _copy_on_host(source: Tensor, target: Tensor) -> None:
    _check_that_it_has_memory(target)
    copy_into(target, source)
