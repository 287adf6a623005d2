"""What the doctor makes of the kernel's counts of packets that a host has dropped, and of what cards say of their wires."""

import dataclasses
import fcntl
import socket
import struct
from ctypes import addressof, create_string_buffer

import pytest
from gradwire.doctor import card, counters
from gradwire.doctor.card import Card
from gradwire.doctor.counters import Counters
from gradwire.lab import LabError, iproute
from sandboxed import in_sandbox

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 5806272 732     0    0    0    0     0          0         5806272 732     0    0    0    0       0          0
  eth0:79154774 1447767 9    8    7    6     5          4         6900118 1002476 3    2    1    11      12         13
"""
SOFTNET = "0000c5a1 0000000f 00000002 00000000\n0001c5a1 00000001 00000000 00000000\n"
SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors InCsumErrors IgnoredMulti MemErrors
Udp: 61101641 262051 9 61381793 5 0 4 0 0
UdpLite: InDatagrams
UdpLite: 0
"""


def test_the_kernels_files_are_read(tmp_path):
    (tmp_path / "dev").write_text(DEV)
    (tmp_path / "softnet_stat").write_text(SOFTNET)
    (tmp_path / "snmp").write_text(SNMP)
    (tmp_path / "nf_conntrack_count").write_text("12\n")
    (tmp_path / "nf_conntrack_max").write_text("262144\n")
    found = counters.read(tmp_path, tmp_path)
    eth0 = counters.Card(received=1447767, damaged=6, dropped=8, overrun=7, unsent=3, collisions=11)
    assert found == Counters({"lo": counters.Card(received=732), "eth0": eth0}, 16, 5, 4, (12, 262144))


def test_what_a_kernel_does_not_count_is_zero(tmp_path):
    assert counters.read(tmp_path, tmp_path) == Counters()
    for name in ("dev", "softnet_stat", "snmp", "nf_conntrack_count"):
        (tmp_path / name).write_text("nonsense\nnonsense\nx: y\n")
    assert counters.read(tmp_path, tmp_path) == Counters()


BEFORE = Counters({"eth0": counters.Card(received=50_000, damaged=40), "eth1": counters.Card()}, 7, 8, 9)


def later(backlog=0, buffer=0, checksum=0, **of_card):
    """The counts after 10,000 more packets, and what else is given."""
    grown = {name: value + of_card.get(name, 0) for name, value in vars(BEFORE.cards["eth0"]).items()}
    grown["received"] += 10_000
    cards = {**BEFORE.cards, "eth0": counters.Card(**grown)}
    return Counters(
        cards, BEFORE.backlog_dropped + backlog, BEFORE.buffer_dropped + buffer, BEFORE.wrong_checksum + checksum
    )


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE, None),
        (later(), None),
        (later(backlog=2), "2 packets between cards and sockets"),
        (later(buffer=3), "3 UDP packets found the buffer of their socket full"),
        (later(checksum=4), "4 UDP packets came with a wrong checksum"),
        (later(damaged=5), "5 of 10000 packets came damaged to eth0"),
        (later(overrun=6), "eth0 dropped 6 packets"),
        (later(dropped=10), None),
        (later(dropped=11), "eth0 dropped 11 packets"),
        (later(unsent=7), "eth0 could not send 7 packets"),
    ],
)
def test_what_a_host_lost_during_the_check_is_told_with_where(after, expected):
    found = counters.judge(BEFORE, after, ["eth0"], 2)
    assert len(found) == (expected is not None)
    for finding in found:
        assert (finding.check, finding.level, finding.rank) == ("drops", "warning", 2)
        assert expected in finding.text
        assert finding.fix


def test_cards_that_gradwire_does_not_use_do_not_matter():
    assert counters.judge(BEFORE, later(damaged=5, overrun=6), ["eth1", "gone"], 0) == []
    assert counters.judge_now(BEFORE, ["eth1", "gone"], 0) == []


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Counters({"eth0": counters.Card(received=100_000, damaged=1)}), []),
        (Counters({"eth0": counters.Card(received=100_000, damaged=2)}), [("card", "warning")]),
        (Counters({"eth0": counters.Card(damaged=2)}), [("card", "warning")]),
        (Counters({"eth0": counters.Card(received=100_000, collisions=1)}), [("card", "warning")]),
        (Counters(connections=(899, 1000)), []),
        (Counters(connections=(900, 1000)), [("filter", "problem")]),
        (Counters(connections=(0, 0)), []),
    ],
)
def test_what_counts_since_the_start_say_is_judged(now, expected):
    found = counters.judge_now(now, ["eth0"], 1)
    assert [(finding.check, finding.level) for finding in found] == expected
    assert all(finding.fix and finding.rank == 1 for finding in found)


def test_a_full_buffer_of_a_real_socket_is_counted():
    before = counters.read()
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as narrow,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.bind(("127.0.0.1", 0))
        for _ in range(100):
            sender.sendto(bytes(1000), narrow.getsockname())
    found = counters.judge(before, counters.read(), [], 0)
    assert any("found the buffer of their socket full" in finding.text for finding in found)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Card(1000), []),
        (Card(), []),
        (Card(100, half_duplex=True), [("card", "problem")]),
        (Card(wireless=True), [("card", "warning")]),
    ],
)
def test_what_a_card_says_of_its_wire_is_judged(facts, expected):
    found = card.judge("eth0", facts, 1)
    assert [(finding.check, finding.level) for finding in found] == expected
    assert all(finding.fix and finding.rank == 1 and "eth0" in finding.text for finding in found)


def host(*speeds, used=True):
    return {"interfaces": [{"name": f"eth{n}", "used": used, "speed_mbit": speed} for n, speed in enumerate(speeds)]}


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([host(1000), host(1000)], []),
        ([host(1000), host(None), host()], []),
        ([host(None), host(1000)], []),
        ([host(10_000), host(1000)], []),
        ([host(2500), host(10_000)], ["warning"]),
        ([host(100), host(1000), host(100)], ["problem"]),
        # A slow card beside a fast one on every host is how that cluster is.
        ([host(25_000, 1000), host(1000, 25_000)], []),
        ([host(25_000, 100), host(1000, 25_000)], ["problem"]),
        ([host(100), host(1000, used=False)], []),
    ],
)
def test_a_card_that_is_slower_than_all_of_another_rank_holds_the_job_up(hosts, expected):
    found = card.judge_speeds(hosts, 0)
    assert [finding.level for finding in found] == expected
    assert all("Mbit/s" in finding.text and finding.fix for finding in found)


_SETTINGS = struct.Struct("<4x4x4xHB13xH14x")


def set_wire(name, speed_mbit, duplex):
    """What `ethtool -s` does, of a tap device: it has no wire, and repeats what it was told of it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        settings = bytearray(_SETTINGS.pack(speed_mbit & 0xFFFF, duplex, speed_mbit >> 16))
        settings[:4] = struct.pack("I", 0x2)  # ETHTOOL_SSET
        buffer = create_string_buffer(bytes(settings), len(settings))
        fcntl.ioctl(control, 0x8946, struct.pack("16sP16x", name.encode(), addressof(buffer)))


def test_a_real_card_is_asked_in_the_namespace_of_the_process(tmp_path):
    def main():
        iproute.ip("link add gw0 type veth peer name gw1", "link set gw0 up", "link set gw1 up")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            found = [card.examine(control, name) for name in ("gw0", "lo", "no-such-card")]
            try:
                iproute.ip("tuntap add dev gw2 mode tap")
                for speed, duplex in ((100, 0), (100_000, 1)):
                    set_wire("gw2", speed, duplex)
                    found.append(card.examine(control, "gw2"))
            except (LabError, OSError) as error:
                found.append(str(error))
        return [dataclasses.asdict(each) if isinstance(each, Card) else each for each in found]

    veth, loopback, nothing, *tap = in_sandbox(tmp_path, main)
    assert veth == {"speed_mbit": 10_000, "half_duplex": False, "wireless": False}
    assert loopback == nothing == {"speed_mbit": None, "half_duplex": False, "wireless": False}
    if len(tap) < 2:
        pytest.skip(f"no tap device here: {tap}")
    assert tap == [
        {"speed_mbit": 100, "half_duplex": True, "wireless": False},
        {"speed_mbit": 100_000, "half_duplex": False, "wireless": False},
    ]
