"""A call whose tensor never leaves its device is in flight when the process ends."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from gradwire.torch import _streams
from lazy_streams import LazyStreams


class Hung(LazyStreams):
    """A device that does not come to an end."""

    def synchronize(self, event: object) -> None:  # noqa: ARG002
        threading.Event().wait()


def check_starts_what_is_never_copied() -> None:
    _streams._of_type["cpu"] = Hung()
    dist.all_reduce(torch.ones(10), async_op=True)
    del _streams._of_type["cpu"]
