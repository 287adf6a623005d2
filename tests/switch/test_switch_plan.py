"""The plan of a port: which code points go where, and what is refused."""

import itertools
import json
import re

import pytest
from gradwire.config import Config
from gradwire.switch import SwitchError, linux, make_plan
from gradwire.switch.layers import buckets, class_shares, read_layers
from gradwire.switch.plan import FRAME_BYTES, Wish
from gradwire.switch.thresholds import HEADROOM_PACKETS

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


@pytest.mark.parametrize("queues", range(2, 9))
def test_fewer_queues_than_a_switch_has_are_its_highest(queues):
    plan = plan_of(classes=queues - 1, queues=queues)
    assert [number for number, _ in plan.numbered()] == list(range(7, 7 - queues, -1))
    assert set(plan.queue_of_code_points().values()) == set(range(8 - queues, 8))


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
        # Both are cut to whole bytes: important packets have half of each queue to themselves.
        assert all(2 * queue.threshold_bytes <= queue.limit_bytes + 2 for queue in data)


def test_the_first_threshold_and_the_step_are_taken():
    plan = plan_of(wish=Wish(first_bytes=4_900, step=1.0))
    assert [queue.threshold_bytes for queue in plan.queues[1:]] == [4_900 * n for n in range(1, 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wish": Wish(first_bytes=100_000)}, "at most"),
        ({"wish": Wish(first_bytes=100)}, "at least a frame"),
        ({"wish": Wish(small_share=1.0)}, "between 0 and 1"),
        ({"wish": Wish(method="best")}, "arithmetic or optimal"),
        ({"wish": Wish(mtu_bytes=500)}, "576 to 9216"),
        ({"wish": Wish(mtu_bytes=9000)}, "MTU of 9000.*540841 at least"),
        ({"wish": Wish(bucket_mb=-1)}, "0 MB"),
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
        make_plan(RATE, BUFFER, Config.mlt(classes=2, dscp_classes="34,48", dscp_control=40))


def points_of_control(**settings):
    return make_plan(RATE, BUFFER, Config(classes=3, **settings)).queues[0].code_points


@pytest.mark.parametrize("preset", ["auto", "mlt"])
@pytest.mark.parametrize(
    ("settings", "whose"),
    [
        ({"dscp_classes": "10,12,14"}, "best effort"),
        ({"dscp_classes": "10,12,14", "dscp_control": 0}, "best effort"),
        ({"dscp_classes": "auto", "dscp_control": 0}, "best effort"),
        ({"dscp_control": 0}, "best effort"),
        ({"dscp_classes": "10,12,14", "dscp": 12}, "class 1"),
        ({"dscp_classes": "10,40,14", "dscp_control": 40}, "class 1"),
        ({"dscp_classes": "10,12,14", "dscp_control": 56}, "routing"),
    ],
)
def test_control_needs_a_code_point_that_nobody_else_has_and_is_told_one(preset, settings, whose):
    """Its queue is served before all others: whatever shares the code point goes before every gradient."""
    with pytest.raises(SwitchError, match=f"control has code point .*{whose}.*GRADWIRE_DSCP_CONTROL=") as caught:
        points_of_control(preset=preset, **settings)
    advice = int(re.search(r"GRADWIRE_DSCP_CONTROL=(\d+)", str(caught.value))[1])
    assert points_of_control(preset=preset, **{**settings, "dscp_control": advice}) == (advice, 48, 56)


@pytest.mark.parametrize(
    ("points", "control", "whose"),
    [
        ("10,0,14", 40, "class 1 has code point 0, .*best effort"),
        ("0,12,14", 34, "class 0 has code point 0, .*best effort"),
        ("10,12,10", 40, "class 2 has code point 10, .*class 0"),
        ("10,12,48", 40, "class 2 has code point 48, .*routing"),
    ],
)
def test_each_class_needs_a_code_point_that_nobody_else_has_and_is_told_some(points, control, whose):
    with pytest.raises(SwitchError, match=f"{whose}.*GRADWIRE_DSCP_CLASSES=") as caught:
        points_of_control(dscp_classes=points, dscp_control=control)
    advice = re.search(r"GRADWIRE_DSCP_CLASSES=([\d,]*\d)", str(caught.value))[1]
    assert points_of_control(dscp_classes=advice, dscp_control=control) == (control, 48, 56)


@pytest.mark.parametrize(("mtu", "buffer"), [(1500, BUFFER), (9000, 6 * BUFFER)])
def test_every_threshold_leaves_room_for_important_packets_above_it(mtu, buffer):
    """Up to the largest first threshold, which the refusal of a larger one names, and down to the smallest buffer."""
    frame = mtu + 14
    headroom = HEADROOM_PACKETS * frame - 1  # both ends are cut to whole bytes
    for classes, step in itertools.product((1, 3, 7), (0.0, 0.1, 0.5, 2.0)):

        def planned(first, classes=classes, step=step):
            wish = Wish(step=step, first_bytes=first, mtu_bytes=mtu)
            return make_plan(RATE, buffer, Config.mlt(classes=classes), wish=wish)

        with pytest.raises(SwitchError, match="at most") as caught:
            planned(10 * buffer)
        most = int(re.search(r"at most (\d+) ", str(caught.value))[1])
        with pytest.raises(SwitchError, match="at most"):
            planned(most + 1)
        for first in (most, frame, None):
            plan = planned(first)
            data = [queue for queue in plan.queues if queue.threshold_bytes is not None]
            assert all(queue.limit_bytes - queue.threshold_bytes >= headroom for queue in data), (classes, step, first)
            assert first is None or data[0].threshold_bytes == first


def test_the_buffer_that_a_refusal_asks_for_is_enough_and_leaves_the_same_room():
    for classes, step in itertools.product(range(1, 8), (0.0, 0.1, 0.5, 1 / 3, 2.0)):
        with pytest.raises(SwitchError, match="at least") as caught:
            make_plan(RATE, 4_000, Config.mlt(classes=classes), wish=Wish(step=step))
        least = int(re.search(r"(\d+) at least", str(caught.value))[1])
        plan = make_plan(RATE, least, Config.mlt(classes=classes), wish=Wish(step=step))
        data = [queue for queue in plan.queues if queue.threshold_bytes is not None]
        assert min(queue.limit_bytes - queue.threshold_bytes for queue in data) >= HEADROOM_PACKETS * FRAME_BYTES - 1
        with pytest.raises(SwitchError, match="at least"):  # parts of a buffer are whole bytes: not to the last one
            make_plan(RATE, least - 20, Config.mlt(classes=classes), wish=Wish(step=step))


@pytest.mark.parametrize("small_share", [0.2, 0.5, 0.9])
def test_a_cost_is_that_of_one_packet_however_many_there_are_of_its_kind(small_share):
    """As options and docs say it: 1 for a small one of the front, more for large ones and for the back."""
    plan = plan_of(classes=3, layers=[1, 2, 5], wish=Wish(small_share=small_share, large_cost=7, back_cost=3))
    lost = 0.0
    for queue, of_its_layer in zip(plan.queues[1:4], (1, 2, 3), strict=True):
        lost += queue.share * small_share * of_its_layer * queue.small_loss
        lost += queue.share * (1 - small_share) * 7 * of_its_layer * queue.large_loss
    assert plan.cost == pytest.approx(lost)


def test_sizes_of_layers_move_optimal_thresholds_and_only_the_expected_losses_of_arithmetic_ones():
    def ends(method, layers):
        plan = plan_of(classes=3, layers=layers, wish=Wish(method=method, bucket_mb=0))
        return [(queue.threshold_bytes, queue.limit_bytes) for queue in plan.queues], plan.queues[1].small_loss

    (alike, loss), (uneven, other_loss) = ends("arithmetic", [1, 1, 1]), ends("arithmetic", [1, 1, 8])
    assert alike == uneven
    assert loss != other_loss
    pytest.importorskip("scipy")
    assert ends("optimal", [1, 1, 1])[0] != ends("optimal", [1, 1, 8])[0]


def test_layers_are_spread_over_the_classes_as_the_transport_does():
    native = pytest.importorskip("gradwire._native")
    for layers, classes in itertools.product((1, 3, 8, 50, 161), range(1, 8)):
        expected = [0.0] * classes
        for number in range(layers):
            expected[native.layer_class(number, layers, classes)] += 1 / layers
        assert class_shares([10] * layers, classes, bucket_mb=0) == pytest.approx(expected)


def test_optimal_thresholds_leave_room_for_frames_of_the_mtu():
    pytest.importorskip("scipy")
    for mtu, buffer in ((1500, 57_000), (9000, 340_000)):  # not much more than is asked for at least
        plan = make_plan(RATE, buffer, Config.mlt(classes=7), wish=Wish(method="optimal", mtu_bytes=mtu))
        data = [queue for queue in plan.queues if queue.threshold_bytes is not None]
        frame = mtu + 14
        assert plan.frame_bytes == frame
        assert all(queue.threshold_bytes >= frame for queue in data)
        assert min(queue.limit_bytes - queue.threshold_bytes for queue in data) >= HEADROOM_PACKETS * frame - 2


def test_a_jumbo_frame_has_room_in_the_token_bucket_whatever_the_mtu():
    """`tc` drops each packet that is longer than the bucket."""
    found = []
    for mtu in (576, 1500, 9000):
        plan = make_plan(2.5, 1_000_000, Config.mlt(classes=2), wish=Wish(mtu_bytes=mtu))
        text = "\n".join(linux.commands(plan, "eth0"))
        found.append(int(re.search(r"tbf rate \w+ burst (\d+)", text)[1]))
        spans = [int(high) - int(low) for low, high in re.findall(r" min (\d+) max (\d+)", text)]
        assert spans == [mtu + 14] * 2
    assert found == [9216 + 18, 9216 + 18, 4 * 9014]


def test_without_buckets_of_its_own_a_layer_goes_by_itself_and_buckets_go_with_their_front_layer():
    """DDP's first bucket is full with 1 MB, the others with 25; with a `bucket_cap_mb` all are alike."""
    megabyte = 1 << 20
    layers = [megabyte * size for size in (3, 20, 10, 4, 22, 5, 0, 2)]
    assert buckets(layers) == [(7, 2 * megabyte), (4, 27 * megabyte), (1, 34 * megabyte), (0, 3 * megabyte)]
    assert buckets(layers, 25) == [(4, 29 * megabyte), (1, 34 * megabyte), (0, 3 * megabyte)]
    assert buckets(layers, 1000) == [(0, sum(layers))]
    assert buckets(layers, 0) == [(number, layers[number]) for number in reversed(range(8))]
    assert class_shares(layers, 4) == pytest.approx([37 / 66, 0, 27 / 66, 2 / 66])
    assert class_shares(layers, 4, 0) == pytest.approx([23 / 66, 14 / 66, 27 / 66, 2 / 66])


@pytest.mark.parametrize("method", ["arithmetic", "optimal"])
def test_a_plan_is_for_the_buckets_that_are_sent(method):
    """All of a model that fits into one bucket has the class of its front layer, and thresholds and losses are for that."""
    if method == "optimal":
        pytest.importorskip("scipy")

    def planned(bucket_mb):
        return plan_of(classes=3, layers=[100, 200, 700], wish=Wish(method=method, bucket_mb=bucket_mb)).queues[1:4]

    together, apart = planned(None), planned(0)
    assert [queue.share for queue in together] == [1, 0, 0]
    assert [queue.share for queue in apart] == pytest.approx([0.1, 0.2, 0.7])
    assert [queue.small_loss for queue in together][1:] == [0, 0]
    assert together[0].small_loss > apart[0].small_loss
    if method == "optimal":
        assert together[0].limit_bytes > apart[0].limit_bytes


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


def test_the_script_for_linux_names_every_queue_and_every_code_point_once_for_each_family():
    lines = linux.commands(plan_of(classes=3), "eth7")
    families = [
        " ip prio 1 u32 match ip dsfield ",
        " ipv6 prio 2 u32 match ip6 priority ",
        " 802.1Q prio 3 u32 match u8 0x40 0xf0 at 0 match ip dsfield ",
        " 802.1Q prio 3 u32 match u8 0x60 0xf0 at 0 match ip6 priority ",
    ]
    for family in families:
        filters = [line.split(family)[1].split()[0] for line in lines if family in line]
        assert sorted(int(value, 16) >> 2 for value in filters) == sorted([40, 48, 56, 34, 26, 18])
    assert sum(" u32 " in line for line in lines) == len(families) * 6
    assert sum(" red " in line for line in lines) == 3
    assert all("eth7" in line for line in lines)


def weight_log(burst, low, size):
    """`tc_red_eval_ewma` of iproute2 (tc/tc_red.c): log2 of 1/weight, or None where `tc` refuses the numbers."""
    rest = burst + 1 - low / size
    for log in range(1, 32) if rest >= 1 else ():
        weight = 2.0**-log
        if rest <= (1 - (1 - weight) ** burst) / weight:
            return log
    return None


def test_the_average_of_red_has_the_largest_weight_whatever_the_threshold():
    """From one frame on, which is the least threshold of a plan, past all where a whole number of frames is near."""
    for mtu, buffer in ((9000, 5_000_000), (576, 4_000_000)):
        plan = make_plan(RATE, buffer, Config.mlt(classes=7), wish=Wish(mtu_bytes=mtu, first_bytes=mtu + 15))
        found = re.findall(r" min (\d+) max \d+ avpkt (\d+) burst (\d+) ", "\n".join(linux.commands(plan, "eth0")))
        assert [weight_log(int(burst), int(low), int(size)) for low, size, burst in found] == [1] * 7, found
    firsts = [
        *range(FRAME_BYTES, 2 * FRAME_BYTES),
        *(n * FRAME_BYTES + more for n in range(2, 60) for more in (-1, 0, 1)),
    ]
    for first in firsts:
        lines = linux.commands(make_plan(RATE, 4_000_000, Config.mlt(classes=2), wish=Wish(first_bytes=first)), "eth0")
        found = re.findall(r" min (\d+) max \d+ avpkt (\d+) burst (\d+) ", "\n".join(lines))
        assert len(found) == 2
        assert [weight_log(int(burst), int(low), int(size)) for low, size, burst in found] == [1, 1], found
