"""Collectives in the traces of torch.profiler.

Each call makes two events while a profiler records, and costs one look at a flag while none does. `gradwire:all_reduce`,
with the shapes of its tensors, lasts from the call to the end of the collective: it starts on the caller's thread and ends
on the completer's, which is what makes it asynchronous for torch. A short `gradwire.call` at its start names group, ranks,
bytes and dtype under the keys of torch's `record_param_comms`, a name that torch keeps for backends in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.torch._work import GradwireWork

PREFIX = "gradwire:"


def begin(name: str, tensors: Sequence[Tensor], describe: Callable[[], dict[str, Any]]) -> Trace | None:
    """Starts the events of one call; None where no profiler records on this thread.

    Args:
        name: of the collective, as torch's own backends call it in their traces.
        tensors: that this rank puts in.
        describe: what is to be said about the group.
    """
    if not torch.autograd._profiler_enabled():
        return None
    return Trace(name, [t for t in tensors if isinstance(t, Tensor)], describe())


class Trace:
    """One call in the trace."""

    def __init__(self, name: str, tensors: list[Tensor], group: dict[str, Any]) -> None:
        elems = sum(t.numel() for t in tensors)
        facts = {
            "Collective name": name,
            "In msg nelems": elems,
            "Out msg nelems": elems,
            "bytes": sum(t.numel() * t.element_size() for t in tensors),
            "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            **group,
        }
        with torch._C._profiler._RecordFunctionFast("gradwire.call", tensors, facts):
            pass
        self._handle = torch._C._autograd._record_function_with_args_enter(PREFIX + name, *tensors)

    def end_with(self, work: GradwireWork) -> None:
        """The event ends when the work does."""
        # torch carries the caller's profiler to the thread that completes the future; a plain call there would be lost.
        done: torch.futures.Future[None] = torch.futures.Future()
        ended = torch.ops.profiler._call_end_callbacks_on_jit_fut(self._handle, done)
        work.on_end(lambda: done.set_result(None))
        work.wait_also_for(ended)
