"""The plan of a port: which code points go where, and what is refused."""

import itertools
import json

import pytest
from gradwire.config import Config
from gradwire.switch import SwitchError, linux, make_plan
from gradwire.switch.layers import class_shares, read_layers
from gradwire.switch.plan import FRAME_BYTES, Wish

RATE, BUFFER = 1000.0, 256_000


def plan_of(classes=7, queues=8, **options):
    return make_plan(RATE, BUFFER, Config.mlt(classes=classes), queues=queues, **options)


# test of: mlt/switch-queues
@pytest.mark.parametrize("classes", range(1, 8))
def test_code_points_are_those_that_the_transport_is_given(classes):
    config = Config.mlt(classes=classes)
    queues = make_plan(RATE, BUFFER, config).queues
    assert [queue.code_points[0] for queue in queues[1 : classes + 1]] == config.code_points()
    assert queues[0].code_points[0] == config.control_code_point()
    assert queues[0].name == "control"


def test_what_the_job_is_told_to_set_gives_the_same_code_points():
    plan = plan_of(classes=5)
    config = Config.from_env(Config.auto(), plan.environment)
    assert config.code_points() == [queue.code_points[0] for queue in plan.queues[1:6]]
    assert config.control_code_point() == plan.queues[0].code_points[0]
    assert config.marks_importance()


def test_a_job_that_sets_no_code_points_gets_a_plan_for_those_it_would_set():
    plan = make_plan(RATE, BUFFER, Config.auto(classes=4))
    assert [queue.code_points for queue in plan.queues[1:5]] == [(34,), (26,), (18,), (10,)]


def test_with_four_classes_on_the_wire_a_switch_for_seven_keeps_their_order():
    """A job that was not told about the number of classes still meets queues in the right order."""
    table = plan_of(classes=7).queue_of_code_points()
    numbers = [table[point] for point in Config.mlt(classes=4).code_points()]
    assert numbers == sorted(set(numbers), reverse=True)


def test_every_code_point_has_a_queue_and_others_have_the_last():
    for classes in range(1, 8):
        plan = plan_of(classes=classes)
        table = plan.queue_of_code_points()
        assert sorted(table) == list(range(64))
        assert table[0] == min(number for number, _ in plan.numbered())
        assert table[48] == table[56] == 7


def test_the_queues_together_hold_the_buffer_and_no_more():
    for classes, method in itertools.product(range(1, 8), ("arithmetic", "optimal")):
        if method == "optimal":
            pytest.importorskip("scipy")
        plan = plan_of(classes=classes, wish=Wish(method=method))
        total = sum(queue.limit_bytes for queue in plan.queues)
        assert BUFFER - 100 < total <= BUFFER
        data = [queue for queue in plan.queues if queue.threshold_bytes is not None]
        assert len(data) == classes
        lows = [queue.threshold_bytes for queue in data]
        assert lows == sorted(lows), "front layers are dropped first"
        assert all(queue.threshold_bytes + FRAME_BYTES <= queue.limit_bytes for queue in data)


def test_the_first_threshold_and_the_step_are_taken():
    plan = plan_of(wish=Wish(first_bytes=5_000, step=1.0))
    assert [queue.threshold_bytes for queue in plan.queues[1:]] == [5_000 * n for n in range(1, 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wish": Wish(first_bytes=100_000)}, "at most"),
        ({"wish": Wish(first_bytes=100)}, "at least a frame"),
        ({"wish": Wish(small_share=1.0)}, "between 0 and 1"),
        ({"wish": Wish(method="best")}, "arithmetic or optimal"),
        ({"queues": 7}, "set classes to 6"),
        ({"queues": 9}, "2 to 8"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_remedy(arguments, message):
    with pytest.raises(SwitchError, match=message):
        plan_of(**arguments)


def test_a_small_buffer_and_a_taken_code_point_are_refused():
    with pytest.raises(SwitchError, match="at least"):
        make_plan(RATE, 20_000, Config.mlt(classes=7))
    with pytest.raises(SwitchError, match="code points of their own"):
        make_plan(RATE, BUFFER, Config.mlt(classes=2, dscp_classes="34,48"))


def test_layers_are_spread_over_the_classes_as_the_transport_does():
    native = pytest.importorskip("gradwire._native")
    for layers, classes in itertools.product((1, 3, 8, 50, 161), range(1, 8)):
        expected = [0.0] * classes
        for number in range(layers):
            expected[native.layer_class(number, layers, classes)] += 1 / layers
        assert class_shares([10] * layers, classes) == pytest.approx(expected)


def test_layer_sizes_come_from_a_list_a_file_or_a_checkpoint(tmp_path):
    torch = pytest.importorskip("torch")
    assert read_layers("1,2,3") == [1, 2, 3]
    (tmp_path / "list.json").write_text("[4, 5]")
    (tmp_path / "named.json").write_text(json.dumps({"conv": 6, "linear": 7}))
    assert read_layers(str(tmp_path / "list.json")) == [4, 5]
    assert read_layers(str(tmp_path / "named.json")) == [6, 7]
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    torch.save({"epoch": 3, "model": model.state_dict(), "optimizer": {}}, tmp_path / "nested.pt")
    expected = [4 * (4 * 8 + 8), 4 * (8 * 2 + 2)]
    assert read_layers(str(tmp_path / "bare.pt")) == expected
    assert read_layers(str(tmp_path / "nested.pt")) == expected


@pytest.mark.parametrize("content", ["nonsense", "{}", '"text"', "[-1, 2]", "[0]", '["a"]'])
def test_a_file_without_sizes_is_refused(tmp_path, content):
    path = tmp_path / "sizes.json"
    path.write_text(content)
    with pytest.raises(SwitchError):
        read_layers(str(path))


def test_no_file_and_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(SwitchError, match="no such file"):
        read_layers(str(tmp_path / "missing.pt"))
    pytest.importorskip("torch")
    (tmp_path / "broken.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(SwitchError, match="not a torch checkpoint"):
        read_layers(str(tmp_path / "broken.pt"))


def test_the_script_for_linux_names_every_queue_and_code_point_once():
    lines = linux.commands(plan_of(classes=3), "eth7")
    filters = [line.split("dsfield ")[1].split()[0] for line in lines if " u32 " in line]
    assert sorted(int(value, 16) >> 2 for value in filters) == sorted([40, 48, 56, 34, 26, 18])
    assert sum(" red " in line for line in lines) == 3
    assert all("eth7" in line for line in lines)
