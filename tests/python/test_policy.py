"""Which numbers a tolerant call gets, which reductions exist, and where residuals wait."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gradwire import Config, _native
from gradwire._policy import algorithm_code, policy_numbers, results_may_be_lost
from gradwire.config import PRESETS
from gradwire.errors import ConfigError, UnsupportedError
from gradwire.torch._compat import require_torch
from gradwire.torch._delay import DelayShares
from gradwire.torch._reduction import name_of, reduction
from gradwire.torch._residuals import Residuals
from gradwire.torch._tolerant import timed_policy
from gradwire.torch._work import _unwrap


def defaults(preset: str) -> _native.PolicyNumbers:
    """A preset's own numbers, with what the configuration decides for all presets."""
    numbers = _native.preset_defaults(preset)
    assert numbers is not None
    return {**numbers, "hadamard": "auto"}


def marked(preset: str) -> _native.PolicyNumbers:
    """The same where the configuration has packets told apart, as those of MLT and DLCP do."""
    return {**defaults(preset), "hadamard": "off"}


def test_a_call_that_says_nothing_gets_the_configured_preset() -> None:
    assert policy_numbers(Config.mlt()) == marked("mlt")
    assert policy_numbers(Config.mlt(loss_bound=0.2))["loss_bound"] == 0.2


@pytest.mark.parametrize("setting", [{"floor": 0.5}, {"deadline_ms": 0.0}])
def test_a_setting_that_would_have_ultima_wait_for_ever_is_named(setting: dict[str, float]) -> None:
    (field,) = setting
    with pytest.raises(
        ConfigError, match=f"{field} = 0.* is not allowed with preset ultima.*leave {field} unset"
    ) as raised:
        policy_numbers(Config.ultima(**setting))  # type: ignore[arg-type]
    assert raised.value.fields["field"] == field


@pytest.mark.parametrize("bound", [0.0, 0.3])
def test_mlt_has_one_bound_for_both_stages_unless_two_are_named(bound: float) -> None:
    numbers = policy_numbers(Config.mlt(loss_bound=bound))
    assert numbers["gather_loss_bound"] == bound
    assert results_may_be_lost(numbers) == (bound > 0)
    assert policy_numbers(Config.mlt(loss_bound=bound, gather_loss_bound=0.0))["gather_loss_bound"] == 0.0
    pull = policy_numbers(Config.dlcp())["gather_loss_bound"]
    assert policy_numbers(Config.dlcp(loss_bound=0.3))["gather_loss_bound"] == pull
    tight = policy_numbers(Config.dlcp(loss_bound=0.005))
    assert tight["gather_loss_bound"] == pytest.approx(0.0005), (
        "results that flow are cut where one bound is for both stages"
    )
    none = policy_numbers(Config.dlcp(loss_bound=0.0))
    assert (none["gather_loss_bound"], none["gather_recovery"]) == (0.0, "at_once")


@pytest.mark.parametrize("preset", ["mlt", "dlcp"])
@pytest.mark.parametrize("bound", [0.0, 0.01, 0.3])
def test_where_the_bound_stops_a_transfer_a_deadline_cuts_no_more_unless_a_floor_says_so(
    preset: str, bound: float
) -> None:
    of_config = policy_numbers(Config(preset=preset, loss_bound=bound, step_delay_max_ms=50.0))
    of_call = policy_numbers(Config(), preset, loss_bound=bound, deadline_ms=20.0)
    of_operator = policy_numbers(Config.from_env(environ={"GRADWIRE_LOSS_BOUND": str(bound)}), preset, loss_bound=0.2)
    for numbers in (of_config, of_call, of_operator):
        assert (numbers["loss_bound"], numbers["floor"]) == (bound, 1.0 - bound)
    assert policy_numbers(Config(preset=preset, loss_bound=bound, floor=0.6))["floor"] == 0.6
    assert policy_numbers(Config(loss_bound=bound))["floor"] == 0.5, "deadlines of auto accept less than its bound"


ALL_MAY_BE_MISSING = {"loss_bound": 0.1, "floor": 0.2, "deadline_ms": 5.0, "step_delay_max_ms": 5.0}


def test_under_reliable_everything_is_waited_for_whatever_is_said_elsewhere() -> None:
    chosen = {"GRADWIRE_PRESET": "reliable"}
    of_operator = Config.from_env(Config.dlcp(**ALL_MAY_BE_MISSING, gather_loss_bound=0.05), chosen)
    assert policy_numbers(of_operator) == defaults("reliable")
    asked = {**ALL_MAY_BE_MISSING, "gather_loss_bound": 0.05}
    assert policy_numbers(Config.from_env(environ=chosen), "mlt", **asked) == defaults("reliable")
    bounded = {f"GRADWIRE_{name.upper()}": str(value) for name, value in ALL_MAY_BE_MISSING.items()}
    for config, preset in ((Config.reliable(), None), (Config(), "reliable")):
        assert policy_numbers(Config.from_env(config, bounded), preset) == defaults("reliable"), "the operator's bound"
    assert policy_numbers(Config(**ALL_MAY_BE_MISSING), "reliable") == defaults("reliable"), (
        "the bound of another preset"
    )
    assert policy_numbers(Config.reliable(deadline_ms=5.0), step_delay_max_ms=5.0) == defaults("reliable")


def test_a_bound_beside_reliable_is_refused_where_one_place_gives_both() -> None:
    for name, value in (("loss_bound", 0.1), ("floor", 0.5)):
        both = {"GRADWIRE_PRESET": "reliable", f"GRADWIRE_{name.upper()}": str(value)}
        for give in (lambda: Config.reliable(**{name: value}), lambda: Config.from_env(environ=both)):  # noqa: B023
            with pytest.raises(ConfigError, match=f"{name} = {value} is not allowed with preset reliable") as raised:
                give()
            assert raised.value.fields["field"] == name
    for config, preset in ((Config(), "reliable"), (Config.reliable(), None)):
        with pytest.raises(ConfigError, match=r"loss_bound = 0\.1 is not allowed with preset reliable"):
            policy_numbers(config, preset, loss_bound=0.1)
    for config in (Config(), Config.from_env(environ={"GRADWIRE_LOSS_BOUND": "0.1"})):
        with pytest.raises(ConfigError, match="loss_bound"):
            policy_numbers(config, "reliable", loss_bound="none")  # type: ignore[arg-type]
    whole = policy_numbers(Config.reliable(loss_bound=0.0, floor=1.0), loss_bound=0.0)
    assert whole == defaults("reliable")


def test_what_the_program_says_beside_a_preset_of_the_operators_that_loses_no_results_is_left_out() -> None:
    for preset in ("auto", "ltp"):
        config = Config.from_env(Config.mlt(gather_loss_bound=0.05), {"GRADWIRE_PRESET": preset})
        assert policy_numbers(config, "dlcp", gather_loss_bound=0.02)["gather_loss_bound"] == 0.0
        both = {"GRADWIRE_PRESET": preset, "GRADWIRE_GATHER_LOSS_BOUND": "0.05"}
        with pytest.raises(ConfigError, match="replicas identical"):
            policy_numbers(Config.from_env(environ=both))


def test_a_call_that_names_a_preset_starts_from_that_presets_own_numbers() -> None:
    config = Config.mlt(loss_bound=0.3, deadline_ms=5.0)
    assert policy_numbers(config, "reliable") == marked("reliable")
    assert policy_numbers(config, "auto", loss_bound=0.1)["loss_bound"] == 0.1


def test_a_call_that_names_the_configured_preset_has_its_bounds() -> None:
    config = Config.mlt(loss_bound=0.3, deadline_ms=5.0)
    assert policy_numbers(config, "mlt") == policy_numbers(config)
    assert policy_numbers(config, "mlt", loss_bound=0.1)["loss_bound"] == 0.1


def test_the_operator_wins_over_the_call() -> None:
    config = Config.from_env(
        environ={"GRADWIRE_LOSS_BOUND": "0.0", "GRADWIRE_PRESET": "reliable", "GRADWIRE_ALGORITHM": "ring"}
    )
    numbers = policy_numbers(config, "mlt", loss_bound=0.5)
    assert numbers == {**defaults("reliable"), "loss_bound": 0.0}
    assert algorithm_code(config, "transpose") == algorithm_code(Config(algorithm="ring"))


def test_a_deadline_of_zero_means_never_and_any_other_beats_a_measured_one() -> None:
    never = policy_numbers(Config.auto(), deadline_ms=0.0)
    assert (never["deadline_s"], never["deadline_factor"]) == (None, None)
    fixed = policy_numbers(Config.auto(deadline_ms=30.0))
    assert (fixed["deadline_s"], fixed["deadline_factor"]) == (0.03, None)


def test_a_rotation_is_that_of_the_call_unless_the_operator_says_otherwise() -> None:
    assert policy_numbers(Config())["hadamard"] == "auto"
    assert policy_numbers(Config(hadamard="off"), hadamard="on")["hadamard"] == "on"
    pinned = Config.from_env(environ={"GRADWIRE_HADAMARD": "off"})
    assert policy_numbers(pinned, hadamard="on")["hadamard"] == "off"
    left_to_us = Config.from_env(environ={"GRADWIRE_HADAMARD": "auto"})
    assert policy_numbers(left_to_us, hadamard="off")["hadamard"] == "off", "auto is no wish"
    assert policy_numbers(left_to_us, hadamard="on")["hadamard"] == "auto"
    with pytest.raises(ConfigError, match="hadamard"):
        policy_numbers(Config(), hadamard="sometimes")


def test_where_the_network_is_told_what_matters_only_who_asks_for_it_has_gradients_rotated() -> None:
    """Rotated they are all alike. What a receiver has cut counts as loss, so `auto` would rotate on a network that loses nothing."""
    for config in (Config.mlt(), Config.dlcp(), Config(importance="magnitude")):
        assert policy_numbers(config)["hadamard"] == "off"
        assert policy_numbers(config, hadamard="on")["hadamard"] == "on"
    assert policy_numbers(Config.mlt(importance="off"))["hadamard"] == "auto"


def test_under_mlt_and_dlcp_of_a_call_only_who_asks_for_it_has_gradients_rotated() -> None:
    for preset in ("mlt", "dlcp"):
        assert policy_numbers(Config(), preset)["hadamard"] == "off"
        assert policy_numbers(Config(), preset, hadamard="on")["hadamard"] == "on"
        assert policy_numbers(Config(hadamard="on"), preset)["hadamard"] == "on"
        assert policy_numbers(Config(importance="off"), preset)["hadamard"] == "auto"
    assert policy_numbers(Config(), "ltp")["hadamard"] == "auto"


def test_arguments_of_a_call_are_checked_like_the_configuration() -> None:
    with pytest.raises(ConfigError, match="loss_bound"):
        policy_numbers(Config(), loss_bound=2.0)
    with pytest.raises(ConfigError, match="algorithm"):
        algorithm_code(Config(), "tree")


def test_a_torch_that_is_too_old_is_refused_with_both_versions() -> None:
    with pytest.raises(UnsupportedError, match=r"2\.4\.1.*2\.9") as caught:
        require_torch("2.4.1")
    assert (caught.value.found, caught.value.floor) == ("2.4.1", "2.9")
    require_torch("2.9.0")
    require_torch("3.0.0a0+git1234")


def test_reductions_that_mean_nothing_for_a_dtype_are_refused() -> None:
    for dtype, op in (
        (torch.float32, dist.ReduceOp.BAND),
        (torch.complex64, dist.ReduceOp.MAX),
        (torch.float8_e4m3fn, dist.ReduceOp.SUM),
    ):
        with pytest.raises(UnsupportedError) as caught:
            reduction(torch.zeros(2, dtype=dtype), op)
        assert caught.value.dtype == str(dtype)
    assert reduction(torch.zeros(2), None)["reduce"] == 0
    assert reduction(torch.zeros(2, dtype=torch.uint32), dist.ReduceOp.MIN)["dtype"] == 12


def test_a_future_carries_an_error_as_a_value_and_raises_it_on_the_way_out() -> None:
    base: torch.futures.Future[object] = torch.futures.Future()
    outcome = base.then(_unwrap)
    base.set_result(UnsupportedError("no"))
    with pytest.raises(RuntimeError, match="no"):
        outcome.wait()


def bucket(*parameters: torch.Tensor) -> SimpleNamespace:
    """What Residuals needs of a GradBucket."""
    flat = torch.zeros(sum(p.numel() for p in parameters))
    parts = flat.split([p.numel() for p in parameters])
    return SimpleNamespace(buffer=lambda: flat, parameters=lambda: list(parameters), gradients=lambda: list(parts))


def fed_back(residuals: Residuals, of: SimpleNamespace) -> list[float]:
    """What is added to the gradients of a bucket."""
    residuals.begin_step()
    residuals.feed_back(of)
    residuals.sent(of)
    added: list[float] = of.buffer().tolist()
    return added


def test_residuals_follow_their_parameters_into_other_buckets() -> None:
    a, b, c = (torch.zeros(n) for n in (2, 3, 4))
    residuals = Residuals([("a", a), ("b", b), ("c", c)])
    first = residuals.feed_back(bucket(a, b, c))
    assert residuals.feed_back(bucket(a, b, c)) is first
    first.copy_(torch.arange(9.0))
    assert fed_back(residuals, bucket(c)) == [5.0, 6.0, 7.0, 8.0]
    assert fed_back(residuals, bucket(b, a)) == [2.0, 3.0, 4.0, 0.0, 1.0]
    assert fed_back(residuals, bucket(b, a)) == [0.0] * 5, "once"
    assert len(residuals._buffers) == 2


def test_residuals_are_restored_by_name_and_taken_once() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    saved = Residuals([("a", a), ("b", b)])
    saved.feed_back(bucket(a, b)).fill_(7.0)
    restored = Residuals([("a", a), ("b", b)])
    restored.load_state_dict(saved.state_dict())
    assert restored.state_dict().keys() == {"a", "b"}
    assert fed_back(restored, bucket(b)) == [7.0, 7.0, 7.0]
    assert restored.state_dict()["b"].tolist() == [0.0, 0.0, 0.0]
    assert fed_back(restored, bucket(a)) == [7.0, 7.0]


def test_names_of_reductions_are_torchs() -> None:
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        assert name_of(getattr(dist.ReduceOp, name)) == name
        assert name_of(dist.ReduceOp(getattr(dist.ReduceOp, name))) == name
    assert name_of(dist._make_nccl_premul_sum(2.0)) == "PREMUL_SUM"


def test_options_of_one_preset_go_with_it_and_with_no_other() -> None:
    config = Config(
        data_percentage=90.0,
        deadline_margin_ms=100.0,
        epoch_transfers=50,
        critical_packets=2,
        quiet_percentage=5.0,
        warm_up_rounds=7,
    )
    ltp = policy_numbers(config, "ltp")
    assert (ltp["data_share"], ltp["deadline_margin_s"]) == (0.9, 0.1)
    assert (ltp["epoch_transfers"], ltp["critical_packets"]) == (50, 2)
    ultima = policy_numbers(config, "ultima")
    assert (ultima["quiet_share"], ultima["warm_up_rounds"], ultima["critical_packets"]) == (0.05, 7, 0)
    for name in ("auto", "reliable"):
        assert policy_numbers(config, name) == defaults(name)
    for name in ("mlt", "dlcp"):
        assert policy_numbers(config, name) == marked(name)


def test_the_most_that_a_step_is_delayed_leaves_the_deadline_derived() -> None:
    numbers = policy_numbers(Config.auto(step_delay_max_ms=250.0))
    assert (numbers["deadline_max_s"], numbers["deadline_factor"]) == (0.25, 4.0)
    assert policy_numbers(Config(), step_delay_max_ms=50.0)["deadline_max_s"] == 0.05
    assert policy_numbers(Config(), step_delay_max_ms=50.0, delay_share=0.25)["deadline_max_s"] == 0.0125
    assert policy_numbers(Config(), delay_share=0.25)["deadline_max_s"] is None
    with pytest.raises(ConfigError, match="step_delay_max_ms"):
        policy_numbers(Config(), step_delay_max_ms=-1.0)


def step(shares: DelayShares, buckets: int) -> list[float]:
    shares.begin()
    return [shares.next(is_last=index == buckets - 1) for index in range(buckets)]


# test of: auto/step-delay
@pytest.mark.parametrize("counts", [(1, 1), (4, 4, 4), (1, 7, 7), (9, 3, 3), (2, 40, 1, 1)])
def test_the_buckets_of_a_step_share_its_delay_and_never_get_more(counts: tuple[int, ...]) -> None:
    shares = DelayShares()
    for before, buckets in zip((0, *counts), counts, strict=False):
        parts = step(shares, buckets)
        assert sum(parts) <= 1 + 1e-12
        assert min(parts) > 0
        if buckets == before:
            assert parts == pytest.approx([1 / buckets] * buckets), "known buckets have equal parts"


# test of: auto/step-delay
def test_a_step_of_which_the_last_bucket_is_not_known_gets_no_more_than_its_delay() -> None:
    shares = DelayShares()
    for is_last in ((False, False, False), (False, True), (False,), (True,), (False, False, True)):
        shares.begin()
        parts = [shares.next(is_last=last) for last in is_last]
        assert sum(parts) <= 1 + 1e-12
        assert min(parts) > 0


def test_results_may_be_lost_only_where_a_preset_says_so() -> None:
    for name in PRESETS:
        assert results_may_be_lost(policy_numbers(Config(), name)) == (name in ("mlt", "dlcp", "ultima")), name
        assert not results_may_be_lost(policy_numbers(Config(preset=name, gather_loss_bound=0.0))), name
    mlt, dlcp, ultima = (policy_numbers(Config(), name) for name in ("mlt", "dlcp", "ultima"))
    assert 0.0 < dlcp["gather_loss_bound"] < dlcp["loss_bound"]
    assert mlt["gather_loss_bound"] == mlt["loss_bound"]
    assert (ultima["gather_loss_bound"], ultima["gather_recovery"]) == (0.0, "never")
    bounded = policy_numbers(Config(), "ultima", gather_loss_bound=0.05)
    assert (bounded["gather_loss_bound"], bounded["gather_recovery"]) == (pytest.approx(0.05), "when_asked")
    asked = policy_numbers(Config(gather_fill="local"), "mlt", gather_loss_bound=0.02)
    assert (asked["gather_loss_bound"], asked["gather_fill"]) == (0.02, "local")
    for name in ("auto", "ltp", "reliable"):
        with pytest.raises(ConfigError, match="replicas identical"):
            policy_numbers(Config(), name, gather_loss_bound=0.02)


def test_a_preset_that_a_setting_contradicts_is_refused() -> None:
    for settings in ({"floor": 0.5}, {"deadline_ms": 0.0}):
        with pytest.raises(ConfigError, match="ultima"):
            policy_numbers(Config(), "ultima", **settings)
    assert policy_numbers(Config(), "ultima", deadline_ms=20.0)["deadline_s"] == 0.02


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_percentage", 120.0),
        ("deadline_margin_ms", -1.0),
        ("epoch_transfers", 0),
        ("critical_packets", -1),
        ("quiet_percentage", 0.0),
        ("warm_up_rounds", 0),
        ("gather_loss_bound", 0.9),
        ("gather_fill", "noise"),
    ],
)
def test_an_option_out_of_its_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Config(**{name: value})


def test_what_a_call_asked_before_gives_the_same_numbers_of_which_each_has_its_own():
    config = Config(loss_bound=0.02)
    first = timed_policy(config, None, deadline=None, step_delay_max=None, loss_bound=None)
    first["loss_bound"] = 0.5
    assert timed_policy(config, None, deadline=None, step_delay_max=None, loss_bound=None)["loss_bound"] == 0.02
    assert timed_policy(Config(), None, deadline=None, step_delay_max=None, loss_bound=0.04)["loss_bound"] == 0.04
    assert timed_policy(config, None, deadline=None, step_delay_max=None, loss_bound=0.03)["loss_bound"] == 0.03
    assert dataclasses.replace(config, loss_bound=0.07).policies == {}


def test_a_value_that_was_refused_is_refused_again_also_where_an_equal_one_was_allowed():
    config = Config()
    timed_policy(config, None, deadline=None, step_delay_max=None, loss_bound=0.0)
    for wrong in (False, [0.1], 2.0, 2.0):
        with pytest.raises(ConfigError, match="loss_bound"):
            timed_policy(config, None, deadline=None, step_delay_max=None, loss_bound=wrong)


def test_a_bound_that_changes_with_each_step_is_not_kept_for_ever():
    config = Config()
    for step in range(1000):
        timed_policy(config, None, deadline=None, step_delay_max=None, loss_bound=step / 2000)
    assert len(config.policies) <= 256
