"""Calls of one rank alone, whose tensors are taken for those of a device, each interrupted at another step by who makes one too."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gradwire import _outbox
from gradwire.torch import _group, _pinned, _staging
from interrupts import at_each_step

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from lazy_streams import LazyStreams, on

WHERE = (_outbox, _group, _pinned, _staging)


def call() -> None:
    dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()


def run() -> None:
    print(sum(1 for _ in at_each_step(call, call, WHERE)))


dist.init_process_group("gradwire", store=dist.HashStore(), rank=0, world_size=1)
on(LazyStreams(eager_reader=True), run)
dist.destroy_process_group()
