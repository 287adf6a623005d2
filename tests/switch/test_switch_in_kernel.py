"""The written `tc` commands, loaded into a real Linux kernel between two hosts, under overload.

One port of a user-mode-linux switch gets the configuration. A host sends bursts, twenty times faster than the port, in which
every layer's important and unimportant packets and control alternate; the other host notes what arrives, how it is marked and
when. The bursts are separated by a packet of the last queue that is sent until it comes: then nothing is waiting.
"""

import collections
import importlib.util
import itertools
import re
import shutil
import socket
import statistics
import struct
import sys
import time
from pathlib import Path

import pytest
from gradwire.config import Config
from gradwire.lab import Link, iproute, uml_cluster
from gradwire.lab.uml_cluster import UmlCluster
from gradwire.lab.uml_switch import PROGRAM
from gradwire.switch import linux, make_plan
from gradwire.switch.plan import Wish
from sandboxed import in_sandbox

pytestmark = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")

RATE_MBIT, HOST_RATE_MBIT, BUFFER_BYTES = 2.5, 50.0, 256_000
CLASSES = 7
DEVICE = "vec1"  # of the second host, on the switch
METHODS = ["arithmetic", *(["optimal"] if importlib.util.find_spec("scipy") else [])]
PLANS = {
    method: make_plan(RATE_MBIT, BUFFER_BYTES, Config.mlt(classes=CLASSES), wish=Wish(method=method))
    for method in METHODS
}
PLAN = PLANS["arithmetic"]
FASTEST = make_plan(400_000, 512_000, Config.mlt(classes=CLASSES))  # more than tc holds of RED's bandwidth
LARGEST = make_plan(
    1000, 2_454_263_000, Config.mlt(classes=1), queues=2
)  # a threshold just below what the kernel refuses
LEAST_BUFFER_BYTES = 90_841  # what the refusal of a smaller one asks for: thresholds from a single frame on
PAYLOAD_BYTES = 1208  # 1250 on the wire: 4 ms on the port
BURSTS, PACKETS = 3, 20  # in a burst: so many of each layer and importance, and half as many of control
CONTROL, FENCE = CLASSES, CLASSES + 1
CAPABLE, CONGESTION = 0b10, 0b11
FAMILIES = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}
IPV6_NETWORK = "fd00::a{}"
DOZEN = 12
# A module of the switch's kernel: what insmod does, which need not be installed.
LOAD = (
    "import ctypes, os, sys; file = f'/usr/lib/uml/modules/{os.uname().release}/kernel/{sys.argv[1]}.ko';"
    "sys.exit(ctypes.CDLL(None).syscall(313, os.open(file, 0), b'', 0))"
)
_FORCED_BUFFER, _TIMESTAMPS = 33, 35  # SO_RCVBUFFORCE; SO_TIMESTAMPNS


def sockets_of(cluster):
    """One socket for each kind of packet: (layer or control, important)."""
    found = {}
    points = [queue.code_points[0] for queue in PLAN.queues]
    for kind in [*((layer, important) for layer in range(CLASSES) for important in (0, 1)), (CONTROL, 1), (FENCE, 1)]:
        layer, important = kind
        point = points[0] if layer == CONTROL else points[1 + min(layer, CLASSES - 1)]
        with cluster.on_host(0):
            found[kind] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        found[kind].setsockopt(socket.IPPROTO_IP, socket.IP_TOS, point << 2 | CAPABLE * important)
    return found


class Inbox:
    """The receiving host: what arrives, with the kernel's own time."""

    def __init__(self, cluster):
        with cluster.on_host(1):
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((cluster.address(1), 0))
        self.socket.setsockopt(socket.SOL_SOCKET, _FORCED_BUFFER, 1 << 24)
        self.socket.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
        self.socket.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        self.rows = []

    def receive(self, wait_s):
        """One packet, or None: (layer, important, seconds since it was sent, traffic class octet)."""
        self.socket.settimeout(wait_s)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(2048, 256)
        except TimeoutError:
            return None
        values = {(level, kind): value for level, kind, value in ancillary}
        seconds, nanoseconds = struct.unpack("qq", values[socket.SOL_SOCKET, _TIMESTAMPS])
        (octet,) = values[socket.IPPROTO_IP, socket.IP_TOS]
        layer, important, sent = struct.unpack_from("<BBQ", data)
        self.rows.append((layer, important, (seconds * 10**9 + nanoseconds - sent) / 1e9, octet))
        return self.rows[-1]


def send(sockets, kind, to, mark=None):
    """`mark` stands in the place of the importance."""
    layer, important = kind
    content = struct.pack("<BBQ", layer, important if mark is None else mark, time.time_ns())
    sockets[kind].sendto(content.ljust(PAYLOAD_BYTES, b"\0"), to)


def run_bursts(cluster):
    """Counts of what was sent for each kind, and the rows of what arrived."""
    inbox, sockets = Inbox(cluster), sockets_of(cluster)
    to, sent = inbox.socket.getsockname(), collections.Counter()
    for burst in range(BURSTS):
        for number in range(PACKETS):
            kinds = [(layer, important) for layer in range(CLASSES) for important in (0, 1)]
            # Turns rotate, so that no layer is always the first of a turn.
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)] + [(CONTROL, 1)] * (number % 2):
                send(sockets, kind, to)
                sent[kind] += 1
        drain(inbox, sockets, to, burst)
    return sent, inbox.rows


def count_bands(cluster, family):
    """Packets that each band gets when the first queue's code points are sent a dozen times, the second's two dozen, and so on."""
    before = packets_of_bands(cluster)
    with cluster.on_host(0):
        sender = socket.socket(FAMILIES[family], socket.SOCK_DGRAM)
    level, octet = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if family == "IPv6" else (socket.IPPROTO_IP, socket.IP_TOS)
    address = IPV6_NETWORK.format(1) if family == "IPv6" else cluster.address(1)
    for number, queue in enumerate(PLAN.queues):
        points = itertools.cycle(queue.code_points or [0])
        for dozens in range(1, number + 2):  # so few at once find no queue too long
            for point in itertools.islice(points, DOZEN):
                sender.setsockopt(level, octet, point << 2)
                sender.sendto(b"0", (address, 9))
            counts = counted(cluster, before, number, dozens * DOZEN)
    return counts


def counted(cluster, before, band, packets):
    """What the bands have got since `before`, when this one has that many."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        counts = [now - then for now, then in zip(packets_of_bands(cluster), before, strict=True)]
        if counts[band] >= packets:
            return counts
    raise AssertionError(f"band {band} should have {packets}, and the bands have {counts}")


def packets_of_bands(cluster):
    found = re.findall(r"parent 10:(\w+) .*\n Sent \d+ bytes (\d+) pkt", cluster.port_statistics(1))
    packets = {int(band, 16): int(count) for band, count in found}
    return [packets[band] for band in range(1, len(PLAN.queues) + 1)]


def weights_of(cluster, plan):
    """What the kernel says that each queue's average goes by, as log2 of 1/weight, once this plan is loaded."""
    cluster.configure(1, lambda device: linux.commands(plan, device))
    return re.findall(r"\bewma (\d+)", cluster._switch.run(f"tc -d qdisc show dev {DEVICE}"))


def replace_others(cluster):
    """How many disciplines of each kind the port has, once plans of other classes, and then what somebody else had there, are replaced."""
    found = []
    for classes in (4, CLASSES, 4):
        plan = make_plan(RATE_MBIT, BUFFER_BYTES, Config.mlt(classes=classes))
        found.append(kinds_of(cluster, linux.commands(plan, DEVICE)))
    others = [f"tc qdisc del dev {DEVICE} root", f"tc qdisc add dev {DEVICE} root handle 1: pfifo"]
    return [*found, kinds_of(cluster, [*others, *linux.commands(PLAN, DEVICE)])]


def kinds_of(cluster, commands):
    """How many disciplines of each kind the port has after these."""
    cluster.configure(1, lambda _device: commands)
    return dict(sorted(collections.Counter(re.findall(r"qdisc (\w+) ", cluster.port_statistics(1))).items()))


def give_ipv6(cluster):
    """A way from the first host to the second, with fixed neighbours, so that nothing but what is sent comes through."""

    def switch_has(device):
        return [
            *(f'{sys.executable} -c "{LOAD}" {module}' for module in ("lib/crc-ccitt", "net/ipv6/ipv6")),
            "echo 1 > /proc/sys/net/ipv6/conf/all/forwarding",
            f"ip -6 route add {IPV6_NETWORK.format(1)}/128 dev {device}",
            f"ip -6 neigh add {IPV6_NETWORK.format(1)} lladdr {uml_cluster._mac(1)} dev {device} nud permanent",
        ]

    cluster.configure(1, switch_has)
    with cluster.on_host(0):
        Path("/proc/sys/net/ipv6/conf/eth0/disable_ipv6").write_text("0")
        iproute.ip(f"addr add {IPV6_NETWORK.format(0)}/64 dev eth0 nodad")
        port = uml_cluster._port_mac(0)
        iproute.ip(f"neigh add {IPV6_NETWORK.format(1)} lladdr {port} dev eth0 nud permanent")


def tag_frames(cluster):
    """From now on what the switch sends to the second host is of a VLAN; the host does not take it, but each queue counts it."""
    device, tagged = DEVICE, f"{DEVICE}.7"
    modules = ("net/llc/llc", "net/802/stp", "net/802/garp", "net/802/mrp", "net/8021q/8021q")
    cluster.configure(
        1,
        lambda _device: [
            *(f'{sys.executable} -c "{LOAD}" {module}' for module in modules),
            f"ip link add link {device} name {tagged} type vlan id 7",
            f"ip link set {tagged} up",
            f"ip route replace {cluster.address(1)}/32 dev {tagged}",
            f"ip -6 route del {IPV6_NETWORK.format(1)}/128 dev {device}",
            f"ip -6 route add {IPV6_NETWORK.format(1)}/128 dev {tagged}",
            *(
                f"ip neigh add {address} lladdr {uml_cluster._mac(1)} dev {tagged} nud permanent"
                for address in (cluster.address(1), IPV6_NETWORK.format(1))
            ),
        ],
    )


def drain(inbox, sockets, to, burst):
    """Receives until a packet of the last queue that was sent after this burst is there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        send(sockets, (FENCE, 1), to, burst)
        ask_again = time.monotonic() + 0.2
        while time.monotonic() < ask_again:
            row = inbox.receive(0.2)
            if row is not None and row[:2] == (FENCE, burst):
                return
    raise AssertionError("nothing of the last queue arrives")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    def main():
        link = Link(rate_mbit=RATE_MBIT, host_rate_mbit=HOST_RATE_MBIT)
        with UmlCluster(2, link) as cluster:
            weights = weights_of(cluster, make_plan(RATE_MBIT, LEAST_BUFFER_BYTES, Config.mlt(classes=CLASSES)))
            weights_at_limits = [weights_of(cluster, plan) for plan in (FASTEST, LARGEST)]
            replaced = replace_others(cluster)
            bursts = {method: burst_through(cluster, plan) for method, plan in PLANS.items()}
            give_ipv6(cluster)
            bands = {family: count_bands(cluster, family) for family in FAMILIES}
            tag_frames(cluster)
            bands |= {f"tagged {family}": count_bands(cluster, family) for family in FAMILIES}
            return {"weights": weights, "weights at limits": weights_at_limits, "replaced": replaced, "bursts": bursts,
                    "bands": bands}  # fmt: skip

    return in_sandbox(tmp_path_factory.mktemp("kernel"), main)


def burst_through(cluster, plan):
    """Sends the bursts through a port with this plan, which is loaded twice: the second time replaces the first."""
    for _ in range(2):
        cluster.configure(1, lambda device: linux.commands(plan, device))
    sent, rows = run_bursts(cluster)
    counts = [[*kind, count] for kind, count in sent.items()]
    return {"sent": counts, "rows": rows, "statistics": cluster.port_statistics(1)}


@pytest.fixture(scope="module", params=METHODS)
def burst(outcome, request):
    """What came of the bursts by either way to find thresholds, and how many of each kind were lost."""
    result = outcome["bursts"][request.param]
    sent = {(layer, important): count for layer, important, count in result["sent"]}
    arrived = collections.Counter((layer, important) for layer, important, _, _ in result["rows"])
    result["lost"] = {kind: count - arrived[kind] for kind, count in sent.items()}
    print(request.param, result["lost"], result["statistics"], sep="\n")
    return result


def test_it_was_an_overload(burst):
    lost = sum(burst["lost"].values())
    assert lost > 0.2 * BURSTS * PACKETS * 2 * CLASSES, "hardly anything was dropped: the tests below show nothing"


def test_the_average_of_each_queue_has_the_weight_one_half_down_to_the_least_buffer(outcome):
    assert outcome["weights"] == ["1"] * CLASSES


def test_plans_for_rates_and_buffers_at_the_limits_of_tc_are_loaded_whole(outcome):
    assert outcome["weights at limits"] == [["1"] * CLASSES, ["1"]]


def test_a_plan_replaces_one_of_other_classes_and_what_somebody_else_has_put_there(outcome):
    four, seven = ({"bfifo": 8 // classes, "prio": 1, "red": classes, "tbf": 1} for classes in (4, CLASSES))
    assert outcome["replaced"] == [four, seven, four, seven]


# test of: mlt/switch-queues
def test_control_loses_nothing(burst):
    assert burst["lost"][CONTROL, 1] == 0


# test of: mlt/selective-dropping
def test_important_packets_of_a_layer_outlive_unimportant_ones(burst):
    lost = burst["lost"]
    for layer in range(CLASSES):
        assert lost[layer, 1] < lost[layer, 0], (layer, lost)


def test_important_packets_that_found_a_long_queue_are_marked_and_others_never(burst):
    fields = collections.Counter(
        (important, octet & 3) for layer, important, _, octet in burst["rows"] if layer < CLASSES
    )
    assert fields[1, CONGESTION] > 0
    assert fields[1, CAPABLE] > 0
    assert set(fields) == {(0, 0), (1, CAPABLE), (1, CONGESTION)}


# test of: mlt/selective-dropping
def test_back_layers_outlive_front_layers(burst):
    lost = [burst["lost"][layer, 0] + burst["lost"][layer, 1] for layer in range(CLASSES)]
    front, middle, back = sum(lost[:2]), sum(lost[2:5]) * 2 / 3, sum(lost[5:])
    assert front > middle > back, lost
    assert lost[0] > lost[-1], lost


# test of: mlt/switch-queues
def test_front_layers_wait_least_and_control_less_than_all(burst):
    waits = collections.defaultdict(list)
    for layer, _, seconds, _ in burst["rows"]:
        waits[layer].append(seconds)
    medians = [statistics.median(waits[kind]) for kind in (CONTROL, *range(CLASSES))]
    assert medians == sorted(medians), medians


@pytest.mark.parametrize("family", [*FAMILIES, *(f"tagged {family}" for family in FAMILIES)])
def test_every_code_point_has_its_queue_in_either_family_with_a_tag_and_without(outcome, family):
    """A dozen packets more for each queue than for the one before it; the switch's own kernel sends a few of its own."""
    dozens = [count // DOZEN for count in outcome["bands"][family]]
    assert dozens == list(range(1, len(PLAN.queues) + 1)), outcome["bands"]


def test_code_points_arrive_as_they_were_sent(burst):
    for layer, _, _, octet in burst["rows"]:
        expected = PLAN.queues[0 if layer == CONTROL else 1 + min(layer, CLASSES - 1)].code_points[0]
        assert octet >> 2 == expected
