"""How a body tries to form the default group again and again, as often as it has ways in which that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import rank
import torch.distributed as dist
from gradwire import _runtime

TIMEOUT = timedelta(seconds=15)


def form(name: str, world_size: int = rank.WORLD_SIZE, timeout: timedelta = TIMEOUT) -> None:
    """Tries to form it with a Store of its own, `name`; whatever happens, the next try starts afresh."""
    with tried(timeout):
        rank.init(world_size=world_size, timeout=timeout, store=name)


@contextmanager
def tried(timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """A try that is over in time, and leaves no engine behind."""
    started = time.monotonic()
    try:
        yield
    finally:
        runtime = _runtime.current()
        if runtime is not None:
            runtime.stop()
        _runtime._process.runtime = None
        assert not dist.is_initialized()
        assert time.monotonic() - started < timeout.total_seconds() + 5
