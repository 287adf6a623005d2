"""FSDP2 on two and on four ranks, without and with 1 % of packets lost; see bodies/sharded.py, sharded_example.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch

EXACT = (
    "check_training_is_as_with_gloo",
    "check_tolerance_that_loses_nothing_is_as_with_gloo",
    "check_a_step_sends_half_of_what_an_all_reduce_of_its_gradients_would",
    "check_shards_are_replicated_in_two_dimensions",
    "check_gradients_can_be_divided_by_a_factor_of_ones_own",
    "check_what_cannot_tolerate_loss_is_refused",
    "check_a_module_on_several_meshes_is_refused_before_any_other_is_changed",
    "check_models_that_are_replicated_alone_are_refused",
    "check_each_module_sends_in_the_class_of_its_front_most_layer",
    "check_a_function_of_the_users_own_decides_the_class_of_each_module_and_what_of_it_is_important",
    "check_a_function_of_the_users_own_that_raises_on_one_rank_fails_the_step_on_all",
    "check_what_is_for_ddp_alone_is_refused",
    "check_residuals_are_saved_for_each_rank",
)
LOSSY = (
    "check_training_with_loss_ends_close_to_gloo",
    "check_parameters_stay_exact",
    "check_every_gradient_counts_once_however_often_it_was_lost",
)
ONE_PERCENT = {"GRADWIRE_CHAOS": "loss=1%,seed=5", "GRADWIRE_MTU": "1500"}


@pytest.fixture(scope="module", params=[2, 4])
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("sharded", request.param, tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module", params=[2, 4])
def lossy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("sharded", request.param, tmp_path_factory.mktemp("sharded"), env=ONE_PERCENT)


@pytest.fixture(scope="module", params=[(2, False), (4, False), (2, True), (4, True)], ids=str)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    world_size, is_lossy = request.param
    env = ONE_PERCENT if is_lossy else {}
    return launch("sharded_example", world_size, tmp_path_factory.mktemp("example"), env=env, timeout_s=300.0)


@pytest.mark.parametrize("check", EXACT)
def test_sharded(exact: Outcome, check: str) -> None:
    exact.require(check)


@pytest.mark.parametrize("check", LOSSY)
def test_sharded_with_loss(lossy: Outcome, check: str) -> None:
    lossy.require(check)


@pytest.mark.parametrize("check", checks_of("sharded_example"))
def test_the_sharded_example(example: Outcome, check: str) -> None:
    example.require(check)
    example.require_clean_exit()


def test_every_rank_ends_cleanly(exact: Outcome, lossy: Outcome) -> None:
    exact.require_clean_exit()
    lossy.require_clean_exit()
