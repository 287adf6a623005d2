"""What training scripts build on DDP, while gradients are lost: Join, ZeRO, sparse embeddings, what SyncBatchNorm calls. Two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.torch import _compat, _hook, _steps
from owed import owed_in
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
WORLD = dist.group.WORLD
WIDTH = 400
LOSING: dict[str, Any] = {"preset": "mlt", "loss_bound": 0.3, "gather_loss_bound": 0.0}


class StatisticsOfAllRanks(torch.autograd.Function):
    """Calls what SyncBatchNorm calls (it refuses CPU tensors): a gather going forward, an all-reduce going back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        own = torch.cat([x.mean(0), x.var(0, unbiased=False)])
        rows = torch.empty(WORLD_SIZE, own.numel())
        dist.all_gather_into_tensor(rows, own.view(1, -1), group=group)
        GATHERED.append(rows.clone())
        mean, variance = rows.mean(0).chunk(2)
        return (x - mean) / (variance + 1).sqrt()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.sum(0)
        dist.all_reduce(total, group=ctx.group)
        REDUCED.append(total.clone())
        return gradient + total / WORLD_SIZE, None


GATHERED: list[torch.Tensor] = []
REDUCED: list[torch.Tensor] = []


class Net(nn.Module):
    """Two layers, with statistics of all ranks between them if there is a group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last, self.group = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(hidden if self.group is None else StatisticsOfAllRanks.apply(hidden, self.group))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step * 10 + RANK))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def everybody(own: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.zeros_like(own) for _ in range(WORLD_SIZE)]
    dist.all_gather(rows, own, group=GLOO)
    return rows


Train = Callable[[DistributedDataParallel], None]


def exact_as_with_gloo_and_lossy_with_equal_replicas(train: Train, *, statistics: bool = False) -> None:
    """Exact by a hook that may not lose, while packets are lost; then with loss, which must have happened."""

    def run(group: dist.ProcessGroup, tolerance: dict[str, Any] | None) -> tuple[torch.Tensor, Any]:
        net = Net(group if statistics else None)
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.5)
        state = None if tolerance is None else gradwire.torch.tolerate_loss(model, **tolerance)
        train(model)
        return flat(model), state

    reference, _ = run(GLOO, None)
    reliable, _ = run(WORLD, {"preset": "reliable"})
    assert torch.equal(reliable, reference), "two ranks add to the same bits in either order"
    GATHERED.clear()
    REDUCED.clear()
    lossy, state = run(WORLD, LOSING)
    assert state.total.lost_share > 0, "this run says nothing"
    assert all(torch.equal(lossy, row) for row in everybody(lossy)), "replicas differ"
    assert not torch.equal(lossy, reference)


def check_ranks_with_more_batches_than_others_join() -> None:
    def train(model: DistributedDataParallel) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            for step in range(2 + 2 * RANK):
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()
                optimizer.step()

    exact_as_with_gloo_and_lossy_with_equal_replicas(train)


def check_a_rank_that_has_joined_sends_what_it_owed_also_where_parameters_may_be_unused() -> None:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    state = gradwire.torch.tolerate_loss(model, **LOSING)
    sent: list[torch.Tensor] = []
    all_reduce = _hook.all_reduce

    def noted(gradient: torch.Tensor, **options: Any) -> Any:
        sent.append(gradient.clone())
        return all_reduce(gradient, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hook, "all_reduce", noted)
        with Join([model]):
            for step in range(2 + 2 * RANK):
                before = len(sent)
                model(batch(step)).square().mean().backward()
            owed, until, buckets = owed_in(state.state_dict()), len(sent), len(sent) - before
    if RANK == 0:
        owed_in_all, _ = torch.cat([part.flatten() for part in owed.values()]).sort()
        assert owed_in_all.any(), "nothing was lost: the test has shown nothing"
        next_step, _ = torch.cat(sent[until : until + buckets]).sort()
        assert torch.equal(next_step, owed_in_all)


def check_optimizer_states_are_sharded() -> None:
    def train(model: DistributedDataParallel) -> None:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, process_group=model.process_group
        )
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        optimizer.consolidate_state_dict(to=0)

    exact_as_with_gloo_and_lossy_with_equal_replicas(train)


def check_statistics_between_layers_stay_exact() -> None:
    def train(model: DistributedDataParallel) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()

    exact_as_with_gloo_and_lossy_with_equal_replicas(train, statistics=True)
    for what in (*GATHERED, *REDUCED):
        assert all(torch.equal(what, row) for row in everybody(what)), "what crosses ranks in a layer is no gradient"
    assert len(GATHERED) == len(REDUCED) == 4


def check_results_that_were_filled_in_are_counted_in_each_step_and_told_as_a_scalar() -> None:
    filled: list[int] = []
    scalars: list[float] = []
    add = _steps.StepMeter.add

    def noted(self: _steps.StepMeter, work: Any) -> None:
        add(self, work)
        filled.append(sum(end - start for start, end in work.report().filled))

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, *_: int) -> None:
            if tag == "gradwire/filled_share":
                scalars.append(scalar_value)

    model = DistributedDataParallel(Net(), bucket_cap_mb=0.5)
    state = gradwire.torch.tolerate_loss(model, **{**LOSING, "gather_loss_bound": 0.3}, tensorboard=Writer())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_steps.StepMeter, "add", noted)
        for step in range(4):
            model(batch(step)).square().mean().backward()
    assert sum(filled) == sum(record.elems_filled for record in state.steps) == state.total.elems_filled
    assert state.total.elems_filled > 0, "this run says nothing"
    assert 0 < state.total.filled_share < 0.3
    assert scalars == [record.filled_share for record in list(state.steps)[:3]]


class Words(nn.Module):
    """A sparse embedding before a layer whose gradients may be lost."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.last = nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(words))


def check_sparse_gradients_are_averaged_exactly() -> None:
    def run(tolerance: dict[str, Any] | None) -> tuple[list[torch.Tensor], torch.Tensor, Any]:
        model = DistributedDataParallel(Words(), bucket_cap_mb=0.5)
        state = None if tolerance is None else gradwire.torch.tolerate_loss(model, **tolerance)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradients = []
        for step in range(4):
            optimizer.zero_grad()
            model(torch.tensor([RANK, 5, 6 + 2 * step + RANK])).square().mean().backward()
            gradients.append(model.module.words.weight.grad.to_dense())
            optimizer.step()
        return gradients, flat(model), state

    exact, expected, _ = run(None)
    assert torch.equal(run({"preset": "reliable"})[1], expected)
    lossy, found, state = run(LOSING)
    assert state.total.lost_share > 0, "this run says nothing"
    assert torch.equal(lossy[0], exact[0]), "later ones are of other parameters"
    assert all(torch.equal(found, row) for row in everybody(found)), "replicas differ"


def check_sparse_gradients_go_with_the_others_where_torch_has_another_backend_for_the_device() -> None:
    if _compat.backend_class() is None:
        return  # before torch 2.14 a group of Python's takes all devices
    found = []
    for backend in ("gradwire", "cpu:gloo,cuda:gradwire"):
        group = dist.new_group(backend=backend)
        model = DistributedDataParallel(Words(), process_group=group)
        # Of halves gloo adds no sparse ones.
        gradwire.torch.tolerate_loss(model, preset="reliable", compression=default_hooks.fp16_compress_wrapper)
        model(torch.tensor([RANK, 5, 6 + RANK])).square().mean().backward()
        found.append(model.module.words.weight.grad.to_dense())
        dist.destroy_process_group(group)
    assert found[0].any()
    assert torch.equal(*found)
