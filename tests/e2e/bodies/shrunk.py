"""Groups of `shrink_group`: what they are called, and where they meet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gradwire._rendezvous import Place
from gradwire.torch import _backend, _compat
from rank import RANK, WORLD_SIZE
from torch.distributed import TCPStore

LAST = WORLD_SIZE - 1
TIMEOUT = timedelta(seconds=60)
# So many ranks that are lost one after the other are a bad quarter of a year.
LOSSES = 60
# Torch's Store breaks the connection of who asks for a key of more than 8 KiB, and of many ranks it is asked for many keys at once.
KEY_CHARS_MAX = 200


def backend_of(group: Any) -> Any:
    """Ours, as torch asks it to shrink."""
    return _compat.peeled(group._get_backend(torch.device("cpu")))


SHRINKS = hasattr(dist, "shrink_group") and hasattr(backend_of(dist.group.WORLD), "shrink")
GROUPS = [backend_of(dist.new_group()) for _ in range(3)]


def total(backend: Any) -> float:
    tensor = torch.tensor([float(RANK + 1)])
    backend.allreduce([tensor]).wait()
    return float(tensor)


def check_keys_stay_short_however_often_a_group_is_shrunk() -> None:
    if not SHRINKS:
        return
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    backend = _backend.connect(store, Place(0, 1, "alone", TIMEOUT))
    names = set()
    for _ in range(LOSSES):
        before = backend
        backend = before.shrink([])
        before.shutdown()
        names.add(backend.link.name)
    assert len(names) == LOSSES, "whoever has shrunk more often is in another group"
    assert max(map(len, store.list_keys())) < KEY_CHARS_MAX
    assert total(backend) == RANK + 1
    backend.shutdown()


def check_groups_with_the_same_ranks_shrink_at_the_same_time() -> None:
    if not SHRINKS or RANK == LAST:
        return
    both = GROUPS[:2]
    with ThreadPoolExecutor(2) as pool:
        shrunk = list(pool.map(lambda backend: backend.shrink([LAST]), both))
    for before, backend in zip(both, shrunk, strict=True):
        assert backend.link.name.startswith(f"{before.link.name}/shrunk/")
        assert total(backend) == sum(range(1, WORLD_SIZE))
    for backend in shrunk:
        backend.shutdown()


def check_a_group_shrinks_to_the_same_ranks_again_and_then_to_fewer() -> None:
    if not SHRINKS or RANK == LAST:
        return
    for _ in range(2):
        backend = GROUPS[2].shrink([LAST])
        assert total(backend) == sum(range(1, WORLD_SIZE))
        backend.shutdown()
    backend = GROUPS[2].shrink([LAST])
    if RANK == 0:
        fewer = backend.shrink(list(range(1, LAST)))
        assert fewer.link.name != backend.link.name
        assert total(fewer) == 1.0
        fewer.shutdown()
    backend.shutdown()
