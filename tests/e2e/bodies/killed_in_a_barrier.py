"""A rank is killed while rank 0 waits for all in a `monitored_barrier`, the others alive and late: the error is about the killed one."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from gradwire.errors import PeerLostError
from gradwire.torch import _compat
from rank import RANK

DESTROY = False
LATE, VICTIM = 1, 2


def check_the_killed_rank_is_named_and_no_living_one() -> None:
    if _compat.backend_class() is None:
        return  # before 2.14 torch allows the call to gloo alone
    groups = [dist.new_group() for _ in range(2)]
    store = dist.distributed_c10d._get_default_store()
    if RANK == VICTIM:
        store.wait(["waits"])
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == LATE:
        store.wait(["has failed"])
        with pytest.raises(PeerLostError, match="Rank 1 successfully reached monitoredBarrier") as late:
            dist.monitored_barrier(groups[0])
        assert late.value.rank == VICTIM
        return
    store.set("waits", "")
    for group, wait_all_ranks in zip(groups, (False, True), strict=True):
        with pytest.raises(PeerLostError, match=rf"Rank {VICTIM} failed to pass monitoredBarrier") as caught:
            dist.monitored_barrier(group, wait_all_ranks=wait_all_ranks)
        assert caught.value.rank == VICTIM
        assert caught.value.silent_s > 0
    store.set("has failed", "")
