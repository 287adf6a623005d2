"""What is owed to a parameter that a rank seldom uses, and no rank in some steps: DDP's rules and a lossy transpose, no network."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from gradwire.torch._residuals import Residuals
from gradwire.torch._unused import Unused

RANKS, ELEMS = 4, 4096


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other, self.head = (torch.nn.Parameter(torch.zeros(size)) for size in (1, ELEMS))


class Rank:
    """One rank's model, as DDP holds it, and what it is owed."""

    def __init__(self, *, has_views: bool, keeps_zeros: bool) -> None:
        self.has_views, self.keeps_zeros = has_views, keeps_zeros
        self.counts = torch.full((2,), 7, dtype=torch.int32)  # before the first step they are anything
        self.module = Model()
        reducer = SimpleNamespace(_get_local_used_map=lambda: self.counts)
        fields = {"reducer": reducer, "gradient_as_bucket_view": has_views, "parameters_to_ignore": set()}
        self.unused = Unused(SimpleNamespace(module=self.module, **fields))
        self.residuals = Residuals(self.module.named_parameters(), self.unused)

    def send(self, gradient: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Its bucket, with what it was owed, and the place for what it will be owed."""
        head, buffer = self.module.head, torch.zeros(ELEMS)
        if gradient is not None:
            buffer.copy_(gradient)
            head.grad = buffer if self.has_views else gradient.clone()
        bucket = SimpleNamespace(parameters=lambda: [head], gradients=lambda: [buffer], buffer=lambda: buffer)
        self.residuals.begin_step()
        self.residuals.feed_back(bucket)
        residual, _ = self.residuals.sent(bucket)
        return buffer, residual

    def end(self, mean: torch.Tensor, users: int) -> torch.Tensor:
        """As the reducer ends a backward pass. Returns what the optimizer applies."""
        self.counts.copy_(torch.tensor([RANKS, users]))
        head = self.module.head
        holds_mean = users > 0 or (self.has_views and head.grad is not None)
        applied = mean.clone() if holds_mean else torch.zeros(ELEMS)
        head.grad = torch.zeros(ELEMS) if self.keeps_zeros and head.grad is not None else None
        return applied


class Job:
    """Ranks that average over a network which loses each value that is not its owner's with the same probability."""

    def __init__(self, loss: float, *, has_views: bool = False, keeps_zeros: bool = False) -> None:
        self.ranks = [Rank(has_views=has_views, keeps_zeros=keeps_zeros) for _ in range(RANKS)]
        self.loss, self.random = loss, torch.Generator().manual_seed(1)
        self.given, self.applied = torch.zeros(ELEMS), torch.zeros(ELEMS)

    def step(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        sent = [rank.send(gradient) for rank, gradient in zip(self.ranks, gradients, strict=True)]
        values, residuals = (torch.stack(parts) for parts in zip(*sent, strict=True))
        lost = torch.rand(RANKS, ELEMS, generator=self.random) < self.loss
        lost[torch.arange(ELEMS) % RANKS, torch.arange(ELEMS)] = False
        mean = (values * ~lost).sum(0) / (~lost).sum(0)
        for (_, residual), owed in zip(sent, torch.where(lost, values - mean, residuals), strict=True):
            residual.copy_(owed)
        users = sum(gradient is not None for gradient in gradients)
        applied = [rank.end(mean, users) for rank in self.ranks]
        assert all(torch.equal(each, applied[0]) for each in applied), "replicas differ"
        self.given += sum(gradient for gradient in gradients if gradient is not None)
        self.applied += RANKS * applied[0]
        return applied[0]

    def owed(self) -> torch.Tensor:
        return sum((rank.residuals.state_dict().get("head", torch.zeros(ELEMS)) for rank in self.ranks), torch.zeros(1))


# test of: auto/error-feedback
@pytest.mark.parametrize("has_views", [False, True])
@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_a_rank_that_seldom_uses_a_parameter_owes_no_more_for_it_than_others(loss: float, has_views: bool) -> None:
    job, one = Job(loss, has_views=has_views), torch.ones(ELEMS)
    for _ in range(300):
        job.step([one, one, one, None])
    applied = job.step([one] * RANKS)
    # N a is what was given, and what was owed before less what is owed after. Of each rank a share `loss` of the values
    # is owed, before and after, and each is at most two gradients, as `u - a` is.
    bound = 2 * loss * 2
    assert abs(applied.mean().item() - 1.0) <= bound, "the mean of the gradients is 1"
    assert job.owed().abs().mean().item() <= RANKS * loss * 2
    assert (job.given - job.applied - job.owed()).abs().max().item() <= 300 * RANKS * torch.finfo(
        torch.float32
    ).eps * 300


# test of: auto/error-feedback
@pytest.mark.parametrize("keeps_zeros", [False, True])
@pytest.mark.parametrize("has_views", [False, True])
def test_every_gradient_counts_once_where_no_rank_uses_the_parameter_in_some_steps(
    has_views: bool, keeps_zeros: bool
) -> None:
    job = Job(0.2, has_views=has_views, keeps_zeros=keeps_zeros)
    users = [range(RANKS), (), (), (0,), (), range(RANKS), (1, 3), (2,), (), ()]
    for step in range(40):
        random = torch.Generator().manual_seed(step)
        # Whole numbers of a size whose sums and means are exact enough to tell one value from none.
        drawn = torch.randint(-8, 9, (RANKS, ELEMS), generator=random).float()
        applied = job.step([drawn[rank] if rank in users[step % len(users)] else None for rank in range(RANKS)])
        if not users[step % len(users)] and not (has_views and keeps_zeros):
            assert not applied.any(), "a gradient that no rank has is untouched"
    assert job.owed().any()
    assert (job.given - job.applied - job.owed()).abs().max().item() < 0.01


def test_what_is_owed_after_a_step_without_the_parameter_is_what_was_owed_before() -> None:
    job = Job(0.2)
    one = torch.ones(ELEMS)
    job.step([one, 2 * one, 3 * one, 4 * one])
    before = [rank.residuals.state_dict()["head"] for rank in job.ranks]
    assert all(part.any() for part in before)
    for _ in range(3):
        job.step([None] * RANKS)
        after = [rank.residuals.state_dict()["head"] for rank in job.ranks]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "in a checkpoint as well"


def test_what_a_step_that_broke_off_left_is_owed() -> None:
    job = Job(0.2)
    job.step([torch.ones(ELEMS), None, None, None])
    rank = job.ranks[0]
    _, residual = rank.send(None)
    residual.fill_(3.0)  # of it no counts have come: those of the step before say nothing of it
    assert rank.residuals.state_dict()["head"].tolist() == [3.0] * ELEMS


@pytest.mark.parametrize("counts", [None, torch.zeros(3)])
def test_a_torch_that_does_not_tell_who_has_used_what_is_named(
    counts: torch.Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    reducer = SimpleNamespace() if counts is None else SimpleNamespace(_get_local_used_map=lambda: counts)
    model = SimpleNamespace(module=Model(), reducer=reducer, gradient_as_bucket_view=False, parameters_to_ignore=())
    with caplog.at_level(logging.WARNING):
        unused = Unused(model)
    assert f"torch {torch.__version__} does not say which parameters no rank used" in caplog.text
    assert not unused.may_be_thrown_away(model.module.head), "nothing is kept for it"
    assert unused.latest() == frozenset()


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (torch.nn.Parameter(torch.zeros(1)) for _ in range(4))
        self.d.requires_grad_(False)


def reduced(layers: Layers) -> tuple[SimpleNamespace, torch.Tensor]:
    """As DDP holds it, and the counts of those that are not frozen now."""
    counts = torch.full((sum(parameter.requires_grad for parameter in layers.parameters()),), 7, dtype=torch.int32)
    reducer = SimpleNamespace(_get_local_used_map=lambda: counts)
    fields = {"gradient_as_bucket_view": False, "parameters_to_ignore": ()}
    return SimpleNamespace(module=layers, reducer=reducer, **fields), counts


@pytest.mark.parametrize("thawed", [False, True])
def test_parameters_that_are_frozen_after_the_model_was_wrapped_are_counted_as_the_reducer_does(
    thawed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layers = Layers()
    model, counts = reduced(layers)
    layers.a.requires_grad_(False)
    layers.d.requires_grad_(thawed)
    with caplog.at_level(logging.WARNING):
        unused = Unused(model)
        for _ in range(2):
            # The buckets have what the reducer has, the last layers first.
            unused.begin([layers.c])
            unused.begin([layers.b, layers.a])
            assert unused.latest() == frozenset(), "no counts have come"
            counts.copy_(torch.tensor([0, 2, 0]))
            assert unused.latest() == {id(layers.a), id(layers.c)}
    assert unused.may_be_thrown_away(layers.a)
    assert not caplog.text


def test_a_bucket_that_is_skipped_is_known_all_the_same() -> None:
    layers = Layers()
    model, counts = reduced(layers)
    unused = Unused(model)
    unused.begin([layers.b, layers.a])
    counts.copy_(torch.tensor([1, 0, 0]))
    assert unused.latest() == {id(layers.b), id(layers.c)}


def test_where_a_bucket_is_skipped_and_parameters_were_frozen_it_is_said_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = Layers()
    model, counts = reduced(layers)
    layers.c.requires_grad_(False)
    unused = Unused(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            unused.begin([layers.b, layers.a])
            counts.copy_(torch.tensor([1, 0, 0]))
            assert unused.latest() == frozenset()
    assert caplog.text.count("of the 3 that DDP reduces only 2 have been used") == 1
    assert "Freeze before DDP(...)" in caplog.text
    unused.begin([layers.c])
    counts.copy_(torch.tensor([1, 0, 1]))
    assert unused.latest() == {id(layers.b)}


def test_no_device_is_asked_whether_anything_is_owed() -> None:
    """What a meta tensor holds cannot be read; of a GPU's it would be read when it has done all that it was told before."""
    module = torch.nn.Linear(8, 8, bias=False, device="meta")
    model = SimpleNamespace(
        module=module,
        reducer=SimpleNamespace(_get_local_used_map=lambda: torch.zeros(1, dtype=torch.int32)),
        gradient_as_bucket_view=False,
        parameters_to_ignore=(),
    )
    residuals, flat = Residuals(module.named_parameters(), Unused(model)), torch.zeros(64, device="meta")
    gradients = [flat.view(8, 8)]
    bucket = SimpleNamespace(parameters=lambda: [module.weight], gradients=lambda: gradients, buffer=lambda: flat)
    residuals.settle()
    assert residuals.feed_back(bucket).shape == flat.shape
