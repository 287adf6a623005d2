"""Collectives in the traces of torch.profiler and of NVTX.

Each call makes two events while a profiler records, and costs two looks at flags while none does. `gradwire:all_reduce`,
with the shapes of its tensors, lasts from the call to the end of the collective: it starts on the caller's thread and ends
on the completer's, which is what makes it asynchronous for torch. A short one at its start is named
`gradwire.call all_reduce bytes=100 dtype=float32 group=0 ranks=2`; with `record_shapes=True` it also has these and more under the keys of
torch's `record_param_comms`, a name that torch keeps for backends in C++.

Where CUDA is in use each call is also a range of NVTX, for Nsight Systems, named alike: `gradwire:all_reduce bytes=100 ..`, from the
call until its end is first seen, by a wait, a poll or the completer of its future. With no tool attached a range is a call into an empty
function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.torch._work import GradwireWork

if TYPE_CHECKING:
    from gradwire.torch._group import GroupLink

PREFIX = "gradwire:"


def begin(name: str, tensors: Sequence[Any], link: GroupLink, results: Sequence[Any] | None = None) -> Trace | None:
    """Starts the events of one call; None where no profiler records on this thread and CUDA is not in use.

    Args:
        name: of the collective, as torch's own backends call it in their traces.
        tensors: that this rank puts in, or lists of them.
        link: the group.
        results: that this rank gets. None: as much as it puts in.
    """
    profiled, ranged = torch.autograd._profiler_enabled(), torch.cuda.is_initialized()
    if not profiled and not ranged:
        return None
    given = _only_tensors(tensors)
    events = None
    if profiled:
        events = _Events(name, given, given if results is None else _only_tensors(results), link)
    return Trace(events, _Range(name, given, link) if ranged else None)


class Trace:
    """One call in the traces."""

    def __init__(self, events: _Events | None, span: _Range | None) -> None:
        self._events = events
        self._range = span

    def end_with(self, work: GradwireWork) -> None:
        """The call ends when the work does."""
        if self._events is not None:
            self._events.end_with(work)
        if self._range is not None:
            work.ending.on_seen = self._range.end

    def end(self) -> None:
        """A call without a Work ends now."""
        if self._events is not None:
            self._events.end()
        if self._range is not None:
            self._range.end()


class _Range:
    """A range of NVTX, which may end on another thread than it began on."""

    def __init__(self, name: str, tensors: list[Tensor], link: GroupLink) -> None:
        self._range = torch.cuda.nvtx.range_start(PREFIX + _said(name, tensors, link))

    def end(self) -> None:
        torch.cuda.nvtx.range_end(self._range)


class _Events:
    """The two events of torch.profiler."""

    def __init__(self, name: str, tensors: list[Tensor], results: list[Tensor], link: GroupLink) -> None:
        facts = {
            "Collective name": name,
            "In msg nelems": _elems(tensors),
            "Out msg nelems": _elems(results),
            "bytes": _bytes(tensors),
            "dtype": _dtype(tensors),
            **link.describe(),
        }
        # The name says it too: torch keeps the facts only where it is asked for shapes.
        with torch._C._profiler._RecordFunctionFast(f"gradwire.call {_said(name, tensors, link)}", tensors, facts):
            pass
        self._handle = torch._C._autograd._record_function_with_args_enter(PREFIX + name, *tensors)

    def end_with(self, work: GradwireWork) -> None:
        # torch carries the caller's profiler to the thread that completes the future; a plain call there would be lost.
        done: torch.futures.Future[None] = torch.futures.Future()
        ended = torch.ops.profiler._call_end_callbacks_on_jit_fut(self._handle, done)
        work.on_end(lambda: done.set_result(None))
        work.wait_also_for(ended)

    def end(self) -> None:
        done: torch.futures.Future[None] = torch.futures.Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut(self._handle, done)
        done.set_result(None)


def _only_tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [tensor for each in given for tensor in _only_tensors(each)] if isinstance(given, (list, tuple)) else []


def _elems(tensors: list[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _said(name: str, tensors: list[Tensor], link: GroupLink) -> str:
    return f"{name} bytes={_bytes(tensors)} dtype={_dtype(tensors)} group={link.name} ranks={link.world_size}"


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _dtype(tensors: list[Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
