"""Groups between hosts whose interfaces say that 1,500 bytes pass, where a thousand do. The body forms them itself."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import rank
import torch
import torch.distributed as dist
from gradwire.errors import UnreachableError

from bodies.forming import form


def check_a_peer_that_answers_small_datagrams_only_is_said_to() -> None:
    # Both are here before the short time to form a group begins.
    store = dist.FileStore(str(rank.FOLDER / "here"), rank.WORLD_SIZE)
    store.set(str(rank.RANK), "")
    store.wait([str(each) for each in range(rank.WORLD_SIZE)], timedelta(seconds=60))
    with pytest.raises(UnreachableError, match=r"which answers small ones: .*GRADWIRE_MTU") as caught:
        form("as the interfaces say", timeout=timedelta(seconds=4))
    assert caught.value.ranks == [1 - rank.RANK]


def check_the_advice_helps() -> None:
    os.environ["GRADWIRE_MTU"] = "1000"
    rank.init(store="as advised")
    tensor = torch.full((1 << 16,), float(rank.RANK + 1))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((1 << 16,), 3.0))
