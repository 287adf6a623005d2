"""Ends a coalescing manager whose body raises (`batch_isend_irecv` with a wrong tensor, for example).

torch leaves what it collects for the group in place then: every later call of this rank is added to it and sent to nobody, returns at
once, and leaves its tensor as it was, while the other ranks wait. What had been sent before the error is on its way and stays so; calls
that were only collected are not made.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire.torch import _compat
from gradwire.torch._group import GroupLink


def install() -> None:
    """Changes torch's context manager, once, where torch has it."""
    manager = getattr(c10d, "_coalescing_manager", None)
    if manager is None or hasattr(manager, "_gradwire_ends"):
        return
    ending: Any = _ending(manager)
    ending._gradwire_ends = True
    for module in (c10d, dist):
        if getattr(module, "_coalescing_manager", None) is manager:
            module._coalescing_manager = ending  # type: ignore[attr-defined]


def _ending(manager: Any) -> Any:
    @contextlib.contextmanager
    @functools.wraps(manager)
    def coalescing_manager(group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        group = group or c10d._get_default_group()
        is_within_another = group in c10d._world.pg_coalesce_state
        has_begun = False
        try:
            with manager(group, *args, **kwargs) as collected:
                has_begun = True
                yield collected
        except BaseException:
            # What another one around it has collected is still to be sent.
            if has_begun or not is_within_another:
                _forget(group)
            raise

    return coalescing_manager


def _forget(group: Any) -> None:
    """What a group of ours collects, if it is still there."""
    if not isinstance(group, dist.ProcessGroup):
        return  # torch's number for a group that this rank is not in
    with contextlib.suppress(RuntimeError):
        ours = [
            backend
            for backend in (_compat.peeled(group._get_backend(device)) for device in group._device_types)
            if isinstance(getattr(backend, "link", None), GroupLink)
        ]
        if ours:
            c10d._world.pg_coalesce_state.pop(group, None)
        for backend in ours:
            backend.stop_coalescing()
