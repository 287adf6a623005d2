"""Each preset through Python, on loopback: the reduction, its report, and DDP with a tolerant model."""

from __future__ import annotations

from datetime import timedelta

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire._policy import GATHER_PRESETS
from gradwire.config import PRESETS
from gradwire.errors import ConfigError, UnsupportedError
from rank import RANK, WORLD_SIZE
from torch.nn.parallel import DistributedDataParallel

ELEMS = 150_001
ROUNDS = 4
UNTOUCHED = -7.0  # no difference between a value and a mean
# What test_presets.py sets in the environment.
WARM_UP_ROUNDS = 3
REASONS = {"all_arrived", "bound_met", "soft_threshold", "early_timeout", "deadline"}

MEAN = sum(range(WORLD_SIZE)) / WORLD_SIZE


def check_every_preset_averages_what_counted_and_says_what_ended_the_wait() -> None:
    for preset in PRESETS:
        for number in range(ROUNDS):
            tensor = torch.full((ELEMS,), float(RANK))
            residual = torch.full((ELEMS,), UNTOUCHED)
            work = gradwire.torch.all_reduce(
                tensor, preset=preset, residual=residual, step_delay_max=timedelta(seconds=5)
            )
            report = work.report()
            assert report.warm_up == (preset == "ultima" and number < WARM_UP_ROUNDS), (preset, number)
            assert {report.reduce_ended_by, report.gather_ended_by} <= REASONS, (preset, report)
            assert report.replicas_identical == (report.warm_up or preset not in GATHER_PRESETS), preset
            # Whoever's value did not count somewhere has in its residual what it still owes.
            assert int((residual != UNTOUCHED).sum()) == report.elems_uncounted
            counted = torch.ones(ELEMS, dtype=torch.bool)
            for start, end in report.filled:
                assert not report.replicas_identical
                counted[start:end] = False
            possible = {MEAN, *(float(rank) for rank in range(WORLD_SIZE))}
            assert set(tensor[counted].unique().tolist()) <= possible, preset
            assert not bool(tensor[~counted].any()), "zero is filled in"
            if preset == "reliable":
                assert torch.equal(tensor, torch.full((ELEMS,), MEAN))


def check_a_model_trains_under_every_preset_and_replicas_agree_where_promised() -> None:
    for preset in PRESETS:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(300, 300))
        tolerance = gradwire.torch.tolerate_loss(model, preset=preset)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(RANK)
        for _ in range(ROUNDS):
            optimizer.zero_grad()
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
        assert len(tolerance.steps) == ROUNDS
        weight = model.module.weight.detach().clone()
        rows = [torch.empty_like(weight) for _ in range(WORLD_SIZE)]
        dist.all_gather(rows, weight)
        if preset not in GATHER_PRESETS:
            assert all(torch.equal(row, rows[0]) for row in rows), preset


def check_a_preset_that_does_not_exist_or_is_contradicted_is_an_error() -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    for arguments in ({"preset": "tcp"}, {"preset": "ltp", "gather_loss_bound": 0.1}):
        with pytest.raises(ConfigError):
            gradwire.torch.tolerate_loss(model, **arguments)


def check_whole_numbers_cannot_be_lossy() -> None:
    for preset in PRESETS:
        with pytest.raises(UnsupportedError, match="int32"):
            gradwire.torch.all_reduce(torch.ones(10, dtype=torch.int32), preset=preset)
