"""Reductions over dedicated servers with every datagram sealed."""

from __future__ import annotations

import gradwire.torch
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE


def check_reductions_over_sealed_servers_are_exact() -> None:
    for elems in (1, 1000, 300_001):
        tensor = torch.arange(elems, dtype=torch.float32).remainder(1000) + RANK
        expected = torch.arange(elems, dtype=torch.float32).remainder(1000) * WORLD_SIZE + sum(range(WORLD_SIZE))
        gradwire.torch.all_reduce(tensor, dist.ReduceOp.SUM, preset="reliable", algorithm="parameter_server")
        assert torch.equal(tensor, expected), elems


def check_it_is_sealed_and_nothing_was_refused() -> None:
    found = gradwire.torch.stats()
    assert found["group"]["security"]["cipher"] is not None
    engine = found["engine"]
    assert engine["datagrams_not_authentic"] == engine["datagrams_replayed"] == engine["seals_refused"] == 0, engine
