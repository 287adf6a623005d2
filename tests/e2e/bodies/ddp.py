"""DistributedDataParallel over gradwire: plain, and with gradients that tolerate loss."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from datetime import timedelta
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire import report
from gradwire._runtime import configuration
from gradwire.errors import ConfigError, InvalidRequestError, MismatchError, UnsupportedError
from gradwire.torch import _compat, _tolerant
from gradwire.torch._tolerant import link_of
from owed import owed_in
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
STEPS = 3


class Net(nn.Module):
    """Three layers; the middle one is used only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(20, 300)
        self.sometimes = nn.Linear(300, 300)
        self.last = nn.Linear(300, 4)

    def forward(self, inputs: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        if use_all:
            hidden = torch.relu(self.sometimes(hidden))
        return self.last(hidden)


def batch(step: int) -> torch.Tensor:
    """This rank's inputs of a step."""
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + RANK))


def train(group: Any, hook: Any = None, *, use_all: Any = lambda _step: True, **options: Any) -> list[torch.Tensor]:
    """Trains for a few steps; returns the gradients of the last step and the parameters after it."""
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.1, **options)
    if hook is not None:
        hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step), use_all(step)).square().mean().backward()
        optimizer.step()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return [t.detach().clone() for t in [*gradients, *model.parameters()]]


def close(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> None:
    """Equal up to the rounding of a float32 sum in another order."""
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def identical_everywhere(tensors: list[torch.Tensor]) -> None:
    """The same bits on every rank; compared over gloo."""
    flat = torch.cat([t.reshape(-1).view(torch.int32) for t in tensors])
    everybody = [torch.zeros_like(flat) for _ in range(WORLD_SIZE)]
    dist.all_gather(everybody, flat, group=GLOO)
    for rank, other in enumerate(everybody):
        assert torch.equal(flat, other), f"rank {rank} differs from rank {RANK} in {(flat != other).sum()} elements"


def check_ddp_trains_like_gloo_in_every_mode() -> None:
    modes: list[dict[str, Any]] = [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True, "use_all": lambda step: (step + RANK) % 2 == 0},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "use_all": lambda step: step == 0},
    ]
    for mode in modes:
        ours = train(dist.group.WORLD, **mode)
        close(ours, train(GLOO, **mode))
        identical_everywhere(ours)


def check_ddp_skips_the_exchange_under_no_sync() -> None:
    def accumulated(group: Any) -> list[torch.Tensor]:
        model = DistributedDataParallel(Net(), process_group=group)
        if group is not GLOO:
            state = gradwire.torch.tolerate_loss(model, preset="reliable")
        with model.no_sync():
            model(batch(0)).square().mean().backward()
        model(batch(1)).square().mean().backward()
        assert group is GLOO or len(state.steps) == 1
        return [p.grad.clone() for p in model.parameters()]

    close(accumulated(dist.group.WORLD), accumulated(GLOO))


def check_python_hooks_of_torch_work() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def plain(model: Any) -> None:
        model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)

    def half(model: Any) -> None:
        model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)

    close(train(dist.group.WORLD, plain), train(GLOO))
    identical_everywhere(train(dist.group.WORLD, half))


def check_tolerant_gradients_equal_gloo_where_nothing_is_lost() -> None:
    for preset in ("reliable", "auto"):
        for mode in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            ours = train(
                dist.group.WORLD, lambda model, p=preset: gradwire.torch.tolerate_loss(model, preset=p), **mode
            )
            close(ours, train(GLOO, **mode))
            identical_everywhere(ours)


# test of: mlt/layer-priority
def check_front_layers_are_urgent_and_all_buckets_are_in_flight_at_once_without_a_thread_of_their_own() -> None:
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), bucket_cap_mb=0.02)
    state = gradwire.torch.tolerate_loss(model, preset="reliable")
    link = link_of(dist.group.WORLD)
    submit, classes = link._submit, link.owner.config.classes

    def step() -> None:
        model(torch.ones(4, 64)).square().mean().backward()

    step()
    step()  # in the buckets that DDP keeps
    buckets = state.steps[-1].buckets
    tags: list[tuple[int, int]] = []
    ops: list[Any] = []
    before = threading.active_count()

    def noted(call: Any, timeout: Any) -> Any:
        if RANK and not tags:  # until then nothing can end on rank 0
            link.store.get("rank 0 has handed over its last bucket")
        tags.append((call.options["traffic_class"], call.options["priority"]))
        ops.append(submit(call, timeout))
        if RANK == 0 and len(tags) == buckets:
            assert not any(op.is_done() for op in ops)
            assert threading.active_count() == before
            link.store.set("rank 0 has handed over its last bucket", "")
        return ops[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_submit", noted)
        step()
    assert len(tags) == buckets >= 4
    assert tags[0][0] == classes - 1, "the last layers' gradients are there first"
    assert tags[-1][0] == 0
    assert sorted(tags, reverse=True) == tags
    assert len({order for _, order in tags}) == buckets, "of one class the front-most goes first"


# test of: tags/priority-function
def check_a_function_of_the_users_own_decides_the_class_of_each_bucket_and_what_of_it_is_important() -> None:
    buckets: list[int] = []

    def sent() -> tuple[list[int], int]:
        (tags,) = [peer["tags"] for peer in gradwire.torch.stats()["group"]["peers"]]
        return tags["sent"], tags["important_sent"]

    def priority(bucket: dist.GradBucket) -> tuple[int, list[bool]]:
        buckets.append(bucket.index())
        return 3 if bucket.is_last() else 2, [True, False]

    classes, important = sent()
    train(dist.group.WORLD, lambda model: gradwire.torch.tolerate_loss(model, preset="auto", priority=priority))
    more, more_important = sent()
    of_class = [now - before for now, before in zip(more, classes, strict=True)]
    assert 0 in buckets
    assert max(buckets) > 0, "one bucket has one class"
    assert of_class[2] > 0, of_class
    assert of_class[3] > 0, of_class
    assert 0 < more_important - important < of_class[2] + of_class[3], (important, more_important, of_class)


def check_a_function_of_the_users_own_that_raises_on_one_rank_fails_the_step_on_all() -> None:
    def priority(bucket: dist.GradBucket) -> int:
        if RANK == 0:
            raise ValueError(f"no class for bucket {bucket.index()}")
        return 0

    group = dist.new_group(timeout=timedelta(seconds=20))
    with pytest.raises(RuntimeError, match="no class for bucket" if RANK == 0 else "barrier"):
        train(group, lambda model: gradwire.torch.tolerate_loss(model, priority=priority))
    error = gradwire.torch.last_error()
    assert isinstance(error, (ValueError, MismatchError) if RANK == 0 else MismatchError), error


def check_what_was_owed_still_is_where_a_function_of_the_users_own_fails() -> None:
    def priority(_bucket: dist.GradBucket) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    for answer in (ValueError("no class for this bucket"), 99, (0, torch.ones(2, 2))):
        model = DistributedDataParallel(Net(), process_group=dist.new_group(), bucket_cap_mb=0.1)
        state = gradwire.torch.tolerate_loss(model, priority=priority)
        owed = {name: torch.full(p.shape, 2.0 + RANK) for name, p in model.module.named_parameters()}
        state.load_state_dict({"rank": RANK, "world_size": WORLD_SIZE, "residuals": owed})
        with pytest.raises(RuntimeError, match=r"no class|traffic_class|dimensions"):
            model(batch(0)).square().mean().backward()
        found = owed_in(state.state_dict())
        assert all(torch.equal(found[name], part) for name, part in owed.items()), answer


def check_what_is_owed_is_added_to_the_same_elements_whatever_their_order_in_memory() -> None:
    owed = torch.arange(8.0 * 3 * 2 * 2).view(8, 3, 2, 2)
    for order in (torch.contiguous_format, torch.channels_last):
        layer = nn.Conv2d(3, 8, 2, bias=False).to(memory_format=order)
        model = DistributedDataParallel(layer, process_group=dist.new_group())
        state = gradwire.torch.tolerate_loss(model, preset="reliable")
        state.load_state_dict({"rank": RANK, "world_size": WORLD_SIZE, "residuals": {"weight": owed}})
        model(torch.ones(1, 3, 4, 4)).sum().backward()
        assert torch.equal(layer.weight.grad, 9 + owed), order


def check_step_records_count_every_gradient_byte() -> None:
    states = []
    exact = {"preset": "reliable", "algorithm": "transpose"}
    train(dist.group.WORLD, lambda model: states.append(gradwire.torch.tolerate_loss(model, **exact)))
    (state,) = states
    assert len(state.steps) == STEPS
    elems = sum(p.numel() for p in Net().parameters())
    for step in state.steps:
        assert step.bytes_received == step.bytes_expected
        assert step.lost_share == 0.0
        assert 0.0 < step.comm_s < 30.0
    # Each rank averages its own shards, from every other rank: together (world size - 1) times the model, each step.
    total = torch.tensor(float(state.bytes_expected))
    dist.all_reduce(total, group=GLOO)
    assert total.item() == STEPS * 4 * elems * (WORLD_SIZE - 1)
    assert state.bytes_missing == 0


def check_a_step_is_counted_without_an_object_for_each_peer() -> None:
    def refuse(**_fields: Any) -> None:
        raise AssertionError("of 511 peers they take longer to make than a bucket is under way")

    states = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "PeerDelivery", refuse)
        train(dist.group.WORLD, lambda model: states.append(gradwire.torch.tolerate_loss(model)))
        with pytest.raises(AssertionError, match="511 peers"):
            gradwire.torch.all_reduce(torch.ones(10)).report()
    assert states[0].total.buckets >= STEPS
    assert states[0].bytes_expected > 0


def check_replicas_of_the_mlt_preset_stay_bit_identical() -> None:
    identical_everywhere(
        train(dist.group.WORLD, lambda model: gradwire.torch.tolerate_loss(model, preset="mlt", gather_loss_bound=0.0))
    )


def owed_of(state: gradwire.torch.LossTolerance) -> dict[str, torch.Tensor]:
    """The memory itself of what each parameter is owed."""
    return {name: owed.parts[name] for name, owed in state.residuals._holders.items()}


# test of: auto/error-feedback
def check_residuals_move_with_their_parameters_when_buckets_are_rebuilt() -> None:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.1)
    state = gradwire.torch.tolerate_loss(model, preset="reliable")
    model(batch(0)).square().mean().backward()
    planted = {name: part.fill_(float(i + 1)) for i, (name, part) in enumerate(owed_of(state).items())}
    values = {name: part.clone() for name, part in planted.items()}
    model.zero_grad()
    model(batch(1)).square().mean().backward()
    reference = Net()
    reference_ddp = DistributedDataParallel(reference, process_group=GLOO)
    reference_ddp(batch(1)).square().mean().backward()
    for (name, parameter), expected in zip(model.module.named_parameters(), reference.parameters(), strict=True):
        added = values[name].reshape(parameter.shape)  # every rank planted the same, so the mean is the same
        torch.testing.assert_close(parameter.grad, expected.grad + added, rtol=1e-5, atol=1e-6)
    assert all(not part.any() for part in owed_of(state).values()), "a residual was counted and kept"


def check_hook_state_survives_a_checkpoint() -> None:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.1)
    state = gradwire.torch.tolerate_loss(model, preset="reliable")
    model(batch(0)).square().mean().backward()
    for part in owed_of(state).values():
        part.fill_(0.25)
    saved = copy.deepcopy(state.state_dict())
    other = DistributedDataParallel(Net(), bucket_cap_mb=0.1)
    restored = gradwire.torch.tolerate_loss(other, preset="reliable")
    restored.load_state_dict(saved)
    other(batch(0)).square().mean().backward()
    plain = DistributedDataParallel(Net(), process_group=GLOO)
    plain(batch(0)).square().mean().backward()
    for ours, reference in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, reference.grad + 0.25, rtol=1e-5, atol=1e-6)
    restored.load_state_dict({**saved, "rank": RANK + 1})  # another rank's: ignored


def check_tolerate_loss_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
        gradwire.torch.tolerate_loss(Net())
    with pytest.raises(UnsupportedError, match="gloo"):
        gradwire.torch.tolerate_loss(DistributedDataParallel(Net(), process_group=GLOO))
    with pytest.raises(UnsupportedError, match="float64"):
        gradwire.torch.tolerate_loss(DistributedDataParallel(Net().double()))
    net = Net()
    late, *others = net.named_parameters()
    with pytest.raises(UnsupportedError, match="delay_all_reduce_named_params"):
        gradwire.torch.tolerate_loss(
            DistributedDataParallel(net, delay_all_reduce_named_params=[late], param_to_hook_all_reduce=others[0][1])
        )
    from torch._dynamo import config as dynamo

    with dynamo.patch(optimize_ddp="python_reducer"):
        without_buckets = DistributedDataParallel(Net())
    with pytest.raises(UnsupportedError, match="python_reducer"):
        gradwire.torch.tolerate_loss(without_buckets)
    fine = DistributedDataParallel(Net())
    with pytest.raises(ConfigError, match="loss_bound"):
        gradwire.torch.tolerate_loss(fine, loss_bound=1.5)
    with pytest.raises(ConfigError, match="preset"):
        gradwire.torch.tolerate_loss(fine, preset="dlpc")
    for preset in ("mlt", "dlcp", "ultima"):
        for call in (lambda **asked: gradwire.torch.tolerate_loss(fine, **asked), gradwire.torch.tolerant_group):
            with pytest.raises(ConfigError, match="algorithm = ring is not allowed where results may be lost"):
                call(preset=preset, algorithm="ring")
    gradwire.torch.tolerate_loss(fine)


def check_a_group_for_reductions_in_place_is_refused_where_previous_results_are_to_fill_in() -> None:
    keeping = dataclasses.replace(configuration(), gather_fill="previous")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tolerant, "configuration", lambda: keeping)
        with pytest.raises(ConfigError, match="gather_fill = previous is not kept in a tolerant_group"):
            gradwire.torch.tolerant_group()
        group = gradwire.torch.tolerant_group(gather_fill="zero")
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((1000,), float(WORLD_SIZE)))
    dist.destroy_process_group(group)


def check_explicit_all_reduce_is_the_mean_of_what_counted() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for preset in ("auto", "mlt", "reliable"):
            for algorithm in ("ring", "transpose"):
                tensor = torch.full((3000,), float(RANK + 1), dtype=dtype)
                residual = torch.zeros_like(tensor)
                work = gradwire.torch.all_reduce(
                    tensor, preset=preset, algorithm=algorithm, residual=residual, gather_loss_bound=0.0
                )
                report = work.report()
                summed_once = (
                    "transpose" if dtype != torch.float32 else algorithm
                )  # a ring would round halves on its way
                assert summed_once in report.collective
                identical_everywhere([tensor.float()])
                if report.lost_share == 0.0 and report.elems_uncounted == 0:
                    assert not residual.any()
    exact = torch.full((3000,), float(RANK + 1))
    gradwire.torch.all_reduce(exact, preset="reliable")
    torch.testing.assert_close(exact, torch.full((3000,), sum(range(1, WORLD_SIZE + 1)) / WORLD_SIZE))


def check_explicit_all_reduce_refuses_other_dtypes_through_its_work() -> None:
    tensor = torch.ones(10, dtype=torch.float64)
    work = gradwire.torch.all_reduce(tensor, async_op=True)  # must not raise: a hook may be the caller
    for wait in (work.wait, work.report):
        with pytest.raises(UnsupportedError, match="float64"):
            wait()
    with pytest.raises(RuntimeError, match="float64"):
        work.get_future().wait()
    assert isinstance(gradwire.torch.last_error(), UnsupportedError)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)  # every rank made the same mistake: the group goes on
    assert torch.equal(tensor, torch.full((10,), float(WORLD_SIZE)))


def check_what_a_tolerant_call_cannot_be_is_told_by_its_type() -> None:
    tensor, part = torch.ones(10), torch.ones(10 // WORLD_SIZE)
    for call in (
        lambda **asked: gradwire.torch.all_reduce(tensor, **asked),
        lambda **asked: gradwire.torch.reduce_scatter(part, tensor, **asked),
    ):
        with pytest.raises(UnsupportedError, match="by MAX is not supported") as caught:
            call(op=dist.ReduceOp.MAX)
        assert caught.value.fields == {"dtype": "torch.float32", "op": "MAX"}
        for share in (0.0, -1.0, 2.0, math.nan):
            with pytest.raises(ConfigError, match=r"delay_share = .* is not allowed: above 0 to 1"):
                call(delay_share=share)
    for priority in (-1, 256):
        with pytest.raises(ConfigError, match=f"priority = {priority} is not allowed: 0 to 255"):
            gradwire.torch.all_reduce(tensor, priority=priority)
    for priority in (0, 255):
        gradwire.torch.all_reduce(tensor, priority=priority)
    assert torch.equal(tensor, torch.ones(10))


def check_what_a_tolerant_call_writes_needs_memory_of_its_own_where_it_is_copied_too() -> None:
    gaps, base = torch.zeros(20, 2)[:, 0], torch.zeros(30)
    early, late = base[:20].view(4, 5).t(), base[10:].view(4, 5).t()
    for output, residual in ((gaps, gaps), (early, late), (early, base[:20].view(5, 4))):
        with pytest.raises(InvalidRequestError, match="residual and output share memory"):
            gradwire.torch.all_reduce(torch.ones(output.shape), output=output, residual=residual)
    with pytest.raises(InvalidRequestError, match="residual and output share memory"):
        gradwire.torch.reduce_scatter(gaps[: 20 // WORLD_SIZE], torch.ones(20), residual=gaps)
    with pytest.raises(InvalidRequestError, match="residual and tensor share memory"):
        gradwire.torch.all_reduce(early, residual=late)
    assert not gaps.any()
    assert not base.any()
    both = torch.zeros(20, 2)  # every second element each: nothing is shared
    gradwire.torch.all_reduce(torch.ones(20), output=both[:, 0], residual=both[:, 1], preset="reliable")
    assert torch.equal(both, torch.tensor([1.0, 0.0]).expand(20, 2))


def check_tensors_without_dense_host_or_gpu_memory_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="meta"):
        gradwire.torch.all_reduce(torch.ones(3, device="meta"))  # torch itself answers dist.all_reduce of a meta tensor
    with pytest.raises(UnsupportedError, match="sparse"):
        gradwire.torch.all_reduce(torch.eye(3).to_sparse())


def check_sparse_gradients_are_summed() -> None:
    tensor = torch.zeros(4, 3)
    tensor[RANK + 1] = RANK + 1.0
    tensor[0] = 1.0
    sparse = tensor.to_sparse(1)
    work = dist.all_reduce(sparse, async_op=True)
    work.wait()
    expected = torch.zeros(4, 3)
    expected[0] = WORLD_SIZE
    for rank in range(WORLD_SIZE):
        expected[rank + 1] = rank + 1.0
    assert torch.equal(sparse.to_dense(), expected)
    group: Any = dist.group.WORLD
    adapter = group if _compat.backend_class() is None else group._get_backend(torch.device("cpu"))
    sparse = tensor.to_sparse(1)
    adapter.allreduce_sparse([sparse], dist.AllreduceOptions()).wait()  # which torch calls for sparse tensors of a GPU
    assert torch.equal(sparse.to_dense(), expected)
    work = dist.all_reduce(torch.eye(4).to_sparse(), dist.ReduceOp.MAX, async_op=True)
    with pytest.raises(RuntimeError, match="only SUM"):
        work.wait()
    model = DistributedDataParallel(torch.nn.Embedding(8, 2, sparse=True))
    model(torch.tensor([RANK, 5])).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.is_sparse
    expected = torch.zeros(8, 2)
    expected[5] = 1.0
    expected[:WORLD_SIZE] += 1.0 / WORLD_SIZE
    assert torch.equal(gradient.to_dense(), expected)


def check_training_goes_on_in_two_groups_at_once() -> None:
    other = dist.new_group()
    first, second = DistributedDataParallel(Net()), DistributedDataParallel(Net(), process_group=other)
    gradwire.torch.tolerate_loss(first)
    gradwire.torch.tolerate_loss(second)
    for step in range(2):
        (first(batch(step)).square().mean() + second(batch(step)).square().mean()).backward()
    identical_everywhere([p.grad for p in [*first.parameters(), *second.parameters()]])
    assert gradwire.torch.stats(other)["group"]["world_size"] == WORLD_SIZE
