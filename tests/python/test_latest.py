"""The averages that `gather_fill="previous"` keeps, without a network."""

from types import SimpleNamespace

import pytest
import torch
from gradwire.torch._finite import Verdict
from gradwire.torch._latest import LatestResults

PARAMETER = torch.zeros(4)


def result_of(latest: LatestResults) -> torch.Tensor:
    """Of the only bucket of a model."""
    buffer = torch.zeros(4)
    return latest.of(
        SimpleNamespace(index=lambda: 0, parameters=lambda: [PARAMETER], buffer=lambda: buffer, is_last=lambda: True)
    )


def bucket_of(*parameters: torch.Tensor) -> SimpleNamespace:
    """As in a static graph's first step: of index 0, and not the last."""
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    return SimpleNamespace(
        index=lambda: 0, parameters=lambda: [*parameters], buffer=lambda: buffer, is_last=lambda: False
    )


def test_buckets_of_one_index_keep_their_own_averages_until_their_parameters_move() -> None:
    a, b, c = (torch.zeros(size) for size in (2, 3, 4))
    latest = LatestResults()
    latest.of(bucket_of(a)).fill_(1.0)
    latest.of(bucket_of(b)).fill_(2.0)
    latest.of(bucket_of(c)).fill_(3.0)
    assert latest.of(bucket_of(a)).tolist() == [1.0] * 2
    assert latest.of(bucket_of(b)).tolist() == [2.0] * 3
    assert latest.of(bucket_of(b, a)).tolist() == [0.0] * 5
    assert latest.of(bucket_of(c)).tolist() == [3.0] * 4
    assert latest.of(bucket_of(a)).tolist() == [0.0] * 2, "what it was in another bucket is gone"


def test_an_average_that_was_not_finite_fills_in_nothing() -> None:
    latest = LatestResults()
    result_of(latest).copy_(torch.tensor([float("inf"), -float("inf"), float("nan"), 3.0]))
    assert result_of(latest).tolist() == [0.0, 0.0, 0.0, 3.0]


def test_averages_follow_the_scale_of_the_loss() -> None:
    latest = LatestResults()
    result_of(latest).fill_(8.0)
    latest.rescale(0.5)
    assert result_of(latest).tolist() == [4.0] * 4
    result_of(latest)[0] = float("inf")
    latest.rescale(0.0)
    assert result_of(latest).tolist() == [0.0] * 4


@pytest.mark.parametrize("on_device", [False, True])
def test_averages_of_a_step_that_is_thrown_away_fill_in_nothing(on_device: bool) -> None:
    for answer, kept in ((True, 8.0), (False, 0.0)):
        latest = LatestResults()
        result_of(latest).fill_(8.0)
        verdict = Verdict([torch.tensor(answer)])
        verdict.known = None if on_device else answer  # as if nobody had asked
        latest.settle(verdict)
        assert result_of(latest).tolist() == [kept] * 4
