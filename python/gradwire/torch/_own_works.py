"""Gives Python callers the Work that the backend made.

torch >= 2.14 wraps a Work from Python in a holder that forwards `wait` and `get_future` and nothing else: `is_completed()`
would stay False for ever, so a loop that polls it never ends, and `dist.recv` without a source would fail because the
holder knows no source rank. The methods of `ProcessGroup` therefore hand the caller the Work itself, if one of ours was made
during the call; what other backends return is passed on untouched. C++ callers (DDP) still get the holder.

A Work of Python's that a Python caller hands on to C++ and forgets loses its methods: C++ would wait for what nobody ever
signals, without a timeout. Only DDP under `Join` does so (`_register_work` makes a holder), so its reducer keeps the Work here.

Of `gather_single` (2.15) torch does not tell a backend written in Python at all: it is called here.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch

from gradwire.torch import _compat
from gradwire.torch._work import GradwireWork

METHODS = (
    "_allgather_base",
    "_end_coalescing",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
UNTOLD = ("gather_into_tensor", "gather_single")

# The latest Work that each reducer of DDP was given, until the next one or its end.
_held_for: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class _Latest(threading.local):
    """What the methods below wait for on this thread."""

    work: GradwireWork | None = None
    is_asked = False


_latest = _Latest()


def remember(work: GradwireWork) -> None:
    """The work that this thread's call returns. Where nobody asks, in C++ or before torch 2.14, its tensors would be held for ever."""
    if _latest.is_asked:
        _latest.work = work


def install() -> None:
    """Changes `Reducer`, once, and `ProcessGroup` where torch would wrap our works."""
    _hold_what_reducers_wait_for(torch._C._distributed_c10d.Reducer)
    group: Any = torch._C._distributed_c10d.ProcessGroup
    if _compat.backend_class() is None or hasattr(group, "_gradwire_own_works"):
        return
    for name in METHODS:
        if hasattr(group, name):
            setattr(group, name, _unwrapped(getattr(group, name)))
    for name in UNTOLD:
        if hasattr(group, name):
            setattr(group, name, _told(getattr(group, name), name))
    group._gradwire_own_works = True


def _hold_what_reducers_wait_for(reducer: Any) -> None:
    if hasattr(reducer, "_gradwire_held_works"):
        return
    method = reducer._set_forward_pass_work_handle

    @functools.wraps(method)
    def call(own: Any, work: Any, *args: Any, **kwargs: Any) -> None:
        method(own, work, *args, **kwargs)
        _held_for[own] = work

    _compat.hide_from_dynamo([call])
    reducer._set_forward_pass_work_handle = call
    reducer._gradwire_held_works = True


def _unwrapped(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A signal handler that makes a call may come here in the midst of another one, whose Work is there already.
        before, _latest.is_asked, _latest.work = (_latest.is_asked, _latest.work), True, None
        try:
            work = method(*args, **kwargs)
            own = _latest.work
        finally:
            _latest.is_asked, _latest.work = before
        if own is None or work is None:
            return work
        if own.is_barrier and _compat.may_be_graph_input():
            own.registered = work
        return own

    _compat.hide_from_dynamo([call])
    return call


def _told(method: Any, name: str) -> Any:
    @functools.wraps(method)
    def call(group: Any, output: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        backend = _compat.peeled(group._get_backend(tensor.device))
        is_ours = getattr(backend, "link", None) is not None
        return (
            getattr(backend, name)(output, tensor, *args, **kwargs)
            if is_ours
            else method(group, output, tensor, *args, **kwargs)
        )

    _compat.hide_from_dynamo([call])
    return call
