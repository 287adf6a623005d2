"""What a program does over a sealed group. The launch says with GRADWIRE_TEST_CIPHER whether it must be sealed."""

from __future__ import annotations

import os

import rank
import torch
import torch.distributed as dist
from gradwire.torch import stats


def check_the_groups_are_sealed_as_they_should_be() -> None:
    subgroup = dist.new_group([0, rank.WORLD_SIZE - 1])
    value = torch.ones(1000)
    dist.all_reduce(value)
    sealed = os.environ["GRADWIRE_TEST_CIPHER"] == "sealed"
    member = subgroup is not dist.GroupMember.NON_GROUP_MEMBER
    for group in (None, subgroup) if member else (None,):
        security = stats(group)["group"]["security"]
        assert (security["cipher"] is not None) == sealed, security
    if member:
        value = torch.full((5,), float(rank.RANK + 1))
        dist.all_reduce(value, group=subgroup)
        assert value.tolist() == [1.0 + rank.WORLD_SIZE] * 5


def check_collectives_are_exact() -> None:
    for elems in (1, 1000, 300_001):
        value = torch.arange(elems, dtype=torch.float32).remainder(1000) * (rank.RANK + 1)
        expected = torch.arange(elems, dtype=torch.float32).remainder(1000) * sum(range(1, rank.WORLD_SIZE + 1))
        dist.all_reduce(value)
        assert torch.equal(value, expected)
    parts = [torch.zeros(7) for _ in range(rank.WORLD_SIZE)]
    dist.all_gather(parts, torch.full((7,), float(rank.RANK)))
    assert [int(part[0]) for part in parts] == list(range(rank.WORLD_SIZE))


def check_nothing_was_refused() -> None:
    engine = stats()["engine"]
    assert engine["datagrams_not_authentic"] == engine["datagrams_replayed"] == engine["seals_refused"] == 0, engine
