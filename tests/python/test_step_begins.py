"""With which bucket a step begins, without a network; DDP's own order of things is in e2e/bodies/{conservation,tolerant_options}.py."""

from types import SimpleNamespace

import torch
from gradwire.torch._begins import StepBegins

A, B, C = (torch.zeros(1) for _ in range(3))


def steps(begins: StepBegins, *buckets: tuple[torch.Tensor, ...]) -> list[bool]:
    return [begins.begins_with(SimpleNamespace(parameters=lambda bucket=bucket: [*bucket])) for bucket in buckets]


def test_a_step_has_each_parameter_once_whatever_bucket_it_is_in() -> None:
    begins = StepBegins(None)
    assert steps(begins, (C,), (B,), (A,)) == [True, False, False]
    assert steps(begins, (A, C), (B,)) == [True, False], "buckets that DDP has made anew"
    assert steps(begins, (A, C), (B,)) == [True, False]
    assert steps(begins, (A, C)) == [True], "a step that breaks off"
    assert steps(begins, (A, C), (B,)) == [True, False]


def test_steps_without_a_bucket_in_common_are_told_by_what_ddp_counts() -> None:
    counts = torch.zeros(3, dtype=torch.int32)
    begins = StepBegins(counts)
    for buckets in (((A,),), ((B,), (C,)), ((A,), (B,)), ((C,),), ((C,),)):
        assert steps(begins, *buckets) == [True, False][: len(buckets)]
        counts.copy_(torch.ones(3))  # behind the last bucket
    assert steps(begins, (A,)) == [True]
    assert steps(begins, (A,)) == [True], "it broke off, and nothing was counted"
