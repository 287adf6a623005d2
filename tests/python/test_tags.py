"""What the network is told about a bucket: its class from its layers, and the options that reach the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradwire import Config
from gradwire._runtime import group_settings
from gradwire.errors import ConfigError, InvalidRequestError
from gradwire.torch._tags import LayerPriority, split, tag_options
from torch import nn


def bucket_of(*parameters: nn.Parameter) -> SimpleNamespace:
    return SimpleNamespace(parameters=lambda: list(parameters))


def model_of(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def test_a_bucket_has_the_class_of_its_front_most_layer() -> None:
    # test of: mlt/layer-priority
    model = model_of(8)
    rule = LayerPriority(model, classes=4)
    for number, layer in enumerate(model):
        assert rule(bucket_of(layer.weight, layer.bias)) == number * 4 // 8
    assert rule(bucket_of(model[7].weight, model[3].bias, model[6].weight)) == 1


def test_parameters_have_the_class_of_their_front_most_layer_by_name() -> None:
    # test of: mlt/layer-priority
    rule = LayerPriority(model_of(8), classes=4)
    assert [rule.of_parameters([f"{number}.bias"]) for number in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rule.of_parameters(["7.weight", "3.bias", "6.weight"]) == 1
    assert rule.of_parameters([]) == 0


def test_modules_without_parameters_are_no_layers_and_a_shared_one_counts_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    model[3].weight = model[0].weight
    rule = LayerPriority(model, classes=3)
    assert rule.layers == 3
    assert [rule(bucket_of(model[i].bias)) for i in (0, 2, 3)] == [0, 1, 2]
    assert rule(bucket_of(model[3].weight)) == 0


def test_a_class_that_does_not_exist_is_refused() -> None:
    config = Config(classes=2)
    assert tag_options(config, 1, None) == {"traffic_class": 1}
    for wrong in (2, -1, True, 1.0):
        with pytest.raises(ConfigError, match="0 to 1"):
            tag_options(config, wrong, None)  # type: ignore[arg-type]


def test_importance_comes_from_the_mask_or_else_from_the_configuration() -> None:
    magnitude = Config(importance="magnitude", importance_sample_rate=0.001)
    assert tag_options(Config(), None, None) == {}
    assert tag_options(magnitude, None, None) == {"sample_rate": 0.001}
    assert tag_options(magnitude, None, torch.tensor([0.0, 2.0])) == {"important": [False, True]}
    with pytest.raises(InvalidRequestError, match="2 dimensions"):
        tag_options(magnitude, None, torch.zeros(2, 2))


def test_mlt_and_dlcp_tag_as_their_papers_do_unless_the_configuration_says_otherwise() -> None:
    # test of: mlt/magnitude-drop, dlcp/magnitude-drop, mlt/layer-priority
    for config, rate in ((Config.mlt(), 0.05), (Config.dlcp(), 0.001)):
        assert config.code_points() == [34, 26, 18, 10]
        assert config.control_code_point() == 40
        assert tag_options(config, 2, None) == {"traffic_class": 2, "sample_rate": rate}
    quiet = Config.mlt(dscp_classes="off", importance="off", dscp=8)
    assert quiet.code_points() == []
    assert quiet.control_code_point() == 8
    assert not quiet.marks_importance()
    assert tag_options(Config.dlcp(importance_sample_rate=0.2), None, None) == {"sample_rate": 0.2}
    assert Config.from_env(Config.mlt(), {"GRADWIRE_IMPORTANCE": "off"}).marks_importance() is False
    for preset in ("auto", "ltp", "ultima", "reliable"):
        config = Config(preset=preset)
        assert not config.code_points()
        assert not config.marks_importance()
    assert tag_options(Config(importance="magnitude"), None, None) == {"sample_rate": 0.05}


def test_a_priority_function_may_return_a_class_alone_or_with_a_mask() -> None:
    assert split(3, Config()) == (3, None)
    assert split((1, [True, False]), Config()) == (1, [True, False])
    with pytest.raises(ConfigError, match="traffic_class = 4"):
        split(4, Config())
    with pytest.raises(InvalidRequestError, match="2 dimensions"):
        split((1, torch.zeros(2, 2)), Config())


def test_only_listed_code_points_say_that_the_network_has_a_queue_for_each() -> None:
    assert Config().class_queues() == Config.mlt().class_queues() == Config(dscp_classes="auto").class_queues() == 0
    assert Config(dscp_classes="34,26,18,10", dscp_control=40).class_queues() == 4
    assert Config(dscp_classes="34,34,18,10", dscp_control=40).class_queues() == 0, "two classes share one"


def test_ranks_must_agree_about_queues_and_not_about_what_only_marks_packets() -> None:
    def agreed(dscp_classes: str | None, **more: Any) -> dict[str, Any]:
        return group_settings(Config(preset="mlt", dscp_classes=dscp_classes, dscp_control=40, **more))

    assert agreed(None) == agreed("auto") == agreed("off") == agreed("34,34,18,10")
    listed = agreed("34,26,18,10")
    assert listed == agreed(" 34, 26,018,10")
    assert listed != agreed("34,26,20,10")
    assert listed != agreed(None)
    # A dedicated server takes them as they are.
    two = agreed("34,10", classes=2)
    assert group_settings(Config(**two, dscp_control=40)) == two


def test_ranks_must_agree_whether_callbacks_run_on_their_callers() -> None:
    assert group_settings(Config(sync_futures=True)) != group_settings(Config())


def test_code_points_are_one_for_each_class_and_off_by_default() -> None:
    assert Config().code_points() == []
    assert Config(dscp=8).control_code_point() == 8
    for classes in range(1, 9):
        points = Config(dscp_classes="auto", classes=classes).code_points()
        assert len(set(points)) == len(points) == classes
        assert all(point < Config(dscp_classes="auto").control_code_point() for point in points)
    assert Config(dscp_classes="8, 0", classes=2, dscp_control=46).code_points() == [8, 0]
    for wrong in ("8", "8,64,0,0", "8,x,0,0", "", "8,-1,0,0"):
        with pytest.raises(ConfigError, match="dscp_classes"):
            Config(dscp_classes=wrong)
