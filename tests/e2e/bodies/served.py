"""DDP over dedicated parameter servers, which are processes of their own."""

from __future__ import annotations

from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE

from bodies.ddp import GLOO, close, identical_everywhere, train


def over_servers(**options: Any) -> Any:
    """A hook of `train` that averages gradients over the servers."""
    return lambda model: gradwire.torch.tolerate_loss(model, algorithm="parameter_server", **options)


def check_ddp_over_servers_trains_like_gloo() -> None:
    reference = train(GLOO)
    ours = train(None, over_servers(preset="reliable"))
    close(ours, reference)
    identical_everywhere(ours)


def check_a_policy_reaches_the_servers_with_the_call() -> None:
    for preset in ("auto", "mlt", "ltp"):
        identical_everywhere(train(None, over_servers(preset=preset, loss_bound=0.2 if preset == "mlt" else None)))


def check_reductions_of_every_size_are_exact_and_said_to_be_over_servers() -> None:
    for elems in (1, 3, 1000, 300_001):
        tensor = torch.arange(elems, dtype=torch.float32) + RANK
        expected = torch.arange(elems, dtype=torch.float32) * WORLD_SIZE + sum(range(WORLD_SIZE))
        work = gradwire.torch.all_reduce(tensor, dist.ReduceOp.SUM, preset="reliable", algorithm="parameter_server")
        assert work.report().collective == "all_reduce/parameter_server"
        assert torch.equal(tensor, expected), elems


def check_other_collectives_and_groups_go_on_without_the_servers() -> None:
    dist.barrier()
    gathered = [torch.zeros(5) for _ in range(WORLD_SIZE)]
    dist.all_gather(gathered, torch.full((5,), float(RANK)))
    assert [int(row[0]) for row in gathered] == list(range(WORLD_SIZE))
    group = dist.new_group()
    tensor = torch.ones(1000)
    gradwire.torch.all_reduce(tensor, dist.ReduceOp.SUM, algorithm="parameter_server", group=group)
    assert torch.equal(tensor, torch.full((1000,), float(WORLD_SIZE)))
    assert len(gradwire.torch.stats(group)["group"]["peers"]) == WORLD_SIZE - 1


def check_statistics_name_the_servers() -> None:
    hosts = [peer["host"] for peer in gradwire.torch.stats()["group"]["peers"]]
    assert [host.split(" on ")[0] for host in hosts if host.startswith("parameter server")] == [
        "parameter server 0",
        "parameter server 1",
    ]
