"""What a step owes, without a network."""

import logging
from types import SimpleNamespace

import pytest
import torch
from gradwire.torch import _wrapped
from gradwire.torch._finite import FiniteResults, Verdict
from gradwire.torch._residuals import Residuals


class Bucket:
    """As DDP hands it over, with parameters of four elements each."""

    def __init__(self, *parameters: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        self._parameters, self._buffer = list(parameters), torch.zeros(4 * len(parameters), dtype=dtype)

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        return list(self._buffer.split(4))

    def buffer(self) -> torch.Tensor:
        return self._buffer


def test_what_is_owed_follows_the_scale_of_the_loss() -> None:
    parameter = torch.zeros(4)
    residuals = Residuals([("known", parameter), ("loaded", torch.zeros(2))])
    residuals.load_state_dict({"loaded": torch.full((2,), 3.0)})
    residuals.feed_back(Bucket(parameter)).fill_(8.0)
    residuals.rescale(0.5)
    assert residuals.state_dict()["known"].tolist() == [4.0] * 4
    assert residuals.state_dict()["loaded"].tolist() == [1.5] * 2
    bucket = Bucket(parameter)
    residuals.feed_back(bucket)
    assert bucket.buffer().tolist() == [4.0] * 4, "the next gradient gets it in its own units"


def test_what_is_owed_follows_the_scale_while_the_buckets_of_a_new_layout_come() -> None:
    a, b, c, d = (torch.zeros(4) for _ in range(4))
    residuals = Residuals([("a", a), ("b", b), ("c", c), ("d", d)])
    for former in (Bucket(a, b), Bucket(c, d)):
        residuals.feed_back(former).fill_(8.0)
    residuals.feed_back(Bucket(b, c))  # those of a and d have not come yet
    residuals.rescale(0.5)
    assert {name: part.tolist() for name, part in residuals.state_dict().items()} == dict.fromkeys("abcd", [4.0] * 4)


def test_what_was_added_is_still_owed_until_it_is_sent() -> None:
    parameter = torch.zeros(4)
    residuals = Residuals([("known", parameter)])
    residuals.feed_back(Bucket(parameter)).fill_(8.0)
    for _ in range(2):  # the first of which is not sent
        bucket = Bucket(parameter)
        residuals.begin_step()
        residuals.feed_back(bucket)
        assert bucket.buffer().tolist() == [8.0] * 4
    residuals.sent(bucket)
    assert residuals.state_dict()["known"].tolist() == [0.0] * 4


def is_finite(answer: bool, *, on_device: bool) -> Verdict:
    verdict = Verdict([torch.tensor(True), torch.tensor(answer)])
    assert verdict.known is answer
    verdict.known = None if on_device else answer  # as if nobody had asked
    return verdict


def step(residuals: Residuals, *buckets: Bucket, leaves: float) -> None:
    residuals.begin_step()
    for bucket in buckets:
        residuals.feed_back(bucket)
        owed, ended = residuals.sent(bucket)
        owed.fill_(leaves)
        ended(owed.count_nonzero().item())


@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_that_is_not_finite_leaves_nothing_in_any_bucket_and_what_it_was_fed_is_not_fed_again(
    on_device: bool,
) -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    residuals = Residuals([("a", a), ("b", b)])
    for _ in range(2):  # the first one was fed nothing
        step(residuals, Bucket(a), Bucket(b), leaves=9.0)
        residuals.settle(is_finite(False, on_device=on_device))
        assert residuals.state_dict()["a"].tolist() == residuals.state_dict()["b"].tolist() == [0.0] * 4
    step(residuals, Bucket(a), Bucket(b), leaves=8.0)
    residuals.settle(is_finite(True, on_device=on_device))
    first, second = Bucket(a), Bucket(b)
    step(residuals, first, second, leaves=float("inf"))
    assert first.buffer().tolist() == second.buffer().tolist() == [8.0] * 4
    residuals.settle(is_finite(False, on_device=on_device))
    for _ in range(2):  # twice is as good as once
        assert residuals.state_dict()["a"].tolist() == residuals.state_dict()["b"].tolist() == [0.0] * 4
        residuals.forget_step()
    step(residuals, Bucket(a), Bucket(b), leaves=7.0)
    residuals.forget_step()
    assert residuals.state_dict()["a"].tolist() == [0.0] * 4


@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_not_finite_is_fed_to_one_step_alone(on_device: bool) -> None:
    parameter = torch.zeros(4)
    residuals = Residuals([("known", parameter)])
    residuals.load_state_dict({"known": torch.tensor([float("inf"), float("nan"), -float("inf"), 3.0])})
    step(residuals, Bucket(parameter), leaves=0.0)
    residuals.settle(is_finite(False, on_device=on_device))
    assert residuals.state_dict()["known"].tolist() == [0.0] * 4


def test_what_a_parameter_is_owed_that_nobody_uses_waits_also_while_nothing_is_lost() -> None:
    used, seldom = torch.zeros(4), torch.zeros(4)
    nobodys = SimpleNamespace(
        begin=lambda _parameters: None,
        may_be_thrown_away=lambda parameter: parameter is seldom,
        latest=lambda: {id(seldom)},
    )
    residuals = Residuals([("used", used), ("seldom", seldom)], nobodys)
    residuals.load_state_dict({"used": torch.full((4,), 3.0), "seldom": torch.full((4,), 5.0)})
    for leaves, answer in [(0.0, True), (9.0, False), (0.0, True)]:
        step(residuals, Bucket(used, seldom), leaves=leaves)
        residuals.settle(is_finite(answer, on_device=False))
    residuals.forget_step()
    assert residuals.state_dict()["used"].tolist() == [0.0] * 4
    assert residuals.state_dict()["seldom"].tolist() == [5.0] * 4


def test_what_a_bucket_without_a_part_in_the_step_is_owed_is_left_alone() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    residuals = Residuals([("a", a), ("b", b)])
    step(residuals, Bucket(a), leaves=8.0)
    step(residuals, Bucket(b), leaves=9.0)
    residuals.settle(is_finite(False, on_device=False))
    assert residuals.state_dict()["a"].tolist() == [8.0] * 4
    assert residuals.state_dict()["b"].tolist() == [0.0] * 4


def test_where_nothing_may_be_thrown_away_nothing_is_kept() -> None:
    parameter = torch.zeros(4)
    residuals = Residuals([("known", parameter)])
    memory = set()
    for _ in range(3):
        residuals.begin_step()
        residuals.feed_back(Bucket(parameter))
        owed, ended = residuals.sent(Bucket(parameter))
        memory.add(owed.data_ptr())
        ended(1)
    assert len(memory) == 1


def test_what_has_not_ended_well_counts_as_thrown_away() -> None:
    results = FiniteResults()
    results.expect(torch.ones(4))()
    results.expect(torch.ones(4))
    verdict = results.verdict()
    assert verdict is not None
    assert verdict.known is False


def test_what_torch_compile_was_given_is_looked_for_only_where_its_result_is_not_sharded_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = torch.compile(torch.nn.Linear(2, 2))
    monkeypatch.setattr(_wrapped, "is_sharded", lambda module: module is compiled)
    assert _wrapped.unwrapped(compiled) is compiled


def test_a_parameter_that_was_renamed_is_no_error_of_a_checkpoint() -> None:
    assert list(Residuals([("weight", torch.zeros(4))]).nothing_of(["weight_orig", "weight"])) == ["weight"]


def test_one_value_tells_that_a_step_is_not_finite() -> None:
    for value in (float("inf"), float("-inf"), float("nan")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            finite = FiniteResults()
            results = [torch.full((1000,), 6e4, dtype=dtype), torch.zeros(0), torch.zeros(1000, dtype=dtype)]
            looks = [finite.expect(result) for result in results]
            for look in looks:
                look()
            verdict = finite.verdict()
            assert verdict is not None
            assert verdict.known is True
            looks = [finite.expect(result) for result in results]
            results[2][500] = value
            for look in looks:
                look()
            verdict = finite.verdict()
            assert verdict is not None
            assert verdict.known is False
            assert not verdict.on(torch.device("cpu"))
            assert finite.verdict() is None


def test_halves_that_no_gradient_overflowed_are_finite_with_what_they_are_owed() -> None:
    parameter = torch.zeros(4)
    residuals = Residuals([("known", parameter)])
    values = torch.tensor([40_000.0, -40_000.0, float("inf"), 3.0])
    gradients, owed = (Bucket(parameter, dtype=torch.float16) for _ in range(2))
    residuals.feed_back(owed).copy_(values.nan_to_num(posinf=2.0))
    gradients.buffer().copy_(values)
    residuals.feed_back(gradients)
    assert gradients.buffer().tolist() == [65_504.0, -65_504.0, float("inf"), 6.0]


def test_a_scale_of_nothing_forgets_what_is_not_finite_too() -> None:
    residuals = Residuals([("loaded", torch.zeros(2))])
    residuals.load_state_dict({"loaded": torch.tensor([float("inf"), 1.0])})
    residuals.rescale(0.0)
    assert residuals.state_dict()["loaded"].tolist() == [0.0, 0.0]


class Laid(Bucket):
    """Of one parameter, whose gradients are in its own memory order; `gradients` takes them for row by row, as that of DDP."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameters, self._buffer = [parameter], torch.zeros(parameter.numel())

    def gradients(self) -> list[torch.Tensor]:
        return [self._buffer.view(self._parameters[0].shape)]

    def gradient(self) -> torch.Tensor:
        """What DDP gives the parameter of it."""
        (parameter,) = self._parameters
        return self._buffer.as_strided(parameter.shape, parameter.stride())


@pytest.mark.parametrize("before", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("after", [torch.contiguous_format, torch.channels_last])
def test_what_is_owed_is_for_the_same_elements_in_another_memory_order(
    before: torch.memory_format, after: torch.memory_format
) -> None:
    owed = torch.arange(48.0).view(4, 3, 2, 2)
    former, later = (torch.zeros(4, 3, 2, 2).to(memory_format=order) for order in (before, after))
    saved, loaded = Residuals([("weight", former)]), Residuals([("weight", later)])
    bucket = Laid(former)
    bucket.gradient().copy_(owed)
    saved.feed_back(Laid(former)).copy_(bucket.buffer())
    state = saved.state_dict()
    assert torch.equal(state["weight"], owed)
    loaded.load_state_dict(state)
    added = Laid(later)
    loaded.feed_back(added)
    assert torch.equal(added.gradient(), owed)
    assert torch.equal(loaded.state_dict()["weight"], owed)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_flat_residual_of_an_earlier_version_is_in_the_memory_order_of_the_gradient(
    order: torch.memory_format,
) -> None:
    parameter = torch.zeros(4, 3, 2, 2).to(memory_format=order)
    residuals = Residuals([("weight", parameter)])
    residuals.load_state_dict({"weight": torch.arange(48.0)})
    assert residuals.state_dict()["weight"].shape == (48,), "until its bucket has come nobody knows of what order it is"
    bucket = Laid(parameter)
    residuals.feed_back(bucket)
    assert torch.equal(bucket.buffer(), torch.arange(48.0))


@pytest.mark.parametrize("saved", [torch.ones(1), torch.ones(5), torch.ones(2, 2)])
def test_what_a_parameter_of_another_size_was_owed_is_not_used(
    saved: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.zeros(4)
    residuals = Residuals([("head.weight", parameter), ("same", torch.zeros(2))])
    with caplog.at_level(logging.WARNING):
        residuals.load_state_dict({"head.weight": saved, "same": torch.ones(2)})
    assert [record.getMessage() for record in caplog.records] == [
        f"the residual of head.weight is {tuple(saved.shape)}, its gradient (4,): not used"
    ]
    bucket = Bucket(parameter)
    residuals.feed_back(bucket)
    assert bucket.buffer().tolist() == [0.0] * 4
    assert residuals.state_dict()["same"].tolist() == [1.0] * 2


def test_what_is_owed_to_a_parameter_that_the_model_has_not_is_told_and_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    residuals = Residuals([("_orig_mod.weight", torch.zeros(2))])
    with caplog.at_level(logging.WARNING):
        residuals.load_state_dict({"weight": torch.ones(2), "_orig_mod.weight": torch.ones(2)})
    assert [record.getMessage() for record in caplog.records] == [
        "residuals of parameters that the model has not are not used: weight"
    ]
    assert list(residuals.state_dict()) == ["_orig_mod.weight"]


# Twice the most that float16 holds.
TOO_MUCH = 131_008.0


def test_what_halves_owe_stays_finite_when_the_scale_of_the_loss_grows() -> None:
    parameter = torch.zeros(4)
    residuals = Residuals([("known", parameter)])
    bucket = Bucket(parameter, dtype=torch.float16)
    residuals.feed_back(bucket).copy_(torch.tensor([40_000.0, -40_000.0, float("inf"), 3.0]))
    residuals.rescale(2.0)
    assert residuals.state_dict()["known"].tolist() == [65_504.0, -65_504.0, float("inf"), 6.0]


def test_what_is_loaded_into_halves_stays_finite() -> None:
    parameter = torch.zeros(4)
    residuals = Residuals([("known", parameter)])
    residuals.load_state_dict({"known": torch.tensor([TOO_MUCH, -TOO_MUCH, float("inf"), 3.0])})
    bucket = Bucket(parameter, dtype=torch.float16)
    residuals.feed_back(bucket)
    assert bucket.buffer().tolist() == [65_504.0, -65_504.0, float("inf"), 3.0]
