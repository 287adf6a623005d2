"""What the doctor makes of the kernel's counts of packets that a host has dropped, and of what cards say of their wires."""

import ctypes
import dataclasses
import socket
import struct
import sys

import pytest
from doctors import GOOD, needs_ipv6
from gradwire.doctor import card, counters
from gradwire.doctor.card import Card
from gradwire.doctor.counters import Counters
from gradwire.doctor.family import family_of
from gradwire.doctor.host import HostFacts, Interface
from gradwire.doctor.host import judge as judge_host
from gradwire.lab import iproute
from sandboxed import in_sandbox

SOFTNET = "0000c5a1 0000000f 00000002 00000000\n0001c5a1 00000001 00000000 00000000\n"
SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors InCsumErrors IgnoredMulti MemErrors
Udp: 61101641 262051 9 61381793 5 6 4 0 0
UdpLite: InDatagrams
UdpLite: 0
"""
SNMP6 = """Ip6InReceives                   \t4
Udp6RcvbufErrors                \t100
Udp6SndbufErrors                \t200
Udp6InCsumErrors                \t300
UdpLite6RcvbufErrors            \t9
"""


def test_the_kernels_files_are_read(tmp_path):
    (tmp_path / "softnet_stat").write_text(SOFTNET)
    (tmp_path / "snmp").write_text(SNMP)
    (tmp_path / "snmp6").write_text(SNMP6)
    (tmp_path / "nf_conntrack_count").write_text("12\n")
    (tmp_path / "nf_conntrack_max").write_text("262144\n")
    found = counters.read(tmp_path, tmp_path)
    assert dataclasses.replace(found, cards={}) == Counters({}, 16, 105, 206, 304, (12, 262144)), "of both families"


def test_what_a_kernel_does_not_count_is_zero(tmp_path):
    assert dataclasses.replace(counters.read(tmp_path, tmp_path), cards={}) == Counters()
    for name in ("softnet_stat", "snmp", "snmp6", "nf_conntrack_count"):
        (tmp_path / name).write_text("nonsense\nnonsense\nx: y\nUdp6RcvbufErrors\n")
    assert dataclasses.replace(counters.read(tmp_path, tmp_path), cards={}) == Counters()


def attribute(kind, content):
    """As rtnetlink has it: length, kind, content, and zeros up to a multiple of four."""
    return struct.pack("HH", 4 + len(content), kind) + content + bytes(-len(content) % 4)


def test_a_links_counts_are_taken_from_its_attributes():
    name, counts = attribute(3, b"eth0\0"), attribute(23, struct.pack("25Q", *range(100, 125)))
    # rx_crc and rx_frame are 112 and 113; rx_over, rx_fifo and rx_missed 111, 114 and 115.
    expected = counters.Card(received=100, sent=101, damaged=225, overrun=340, unsent=105, collisions=109)
    assert counters.card_of(attribute(4, b"1234") + name + attribute(99, b"xyz") + counts) == {"eth0": expected}
    assert counters.card_of(counts + name) == {"eth0": expected}
    assert counters.card_of(name) == counters.card_of(counts) == counters.card_of(b"") == {}
    assert counters.card_of(name + attribute(23, bytes(8))) == {}
    assert counters.card_of(name + struct.pack("HH", 0, 0) + counts) == {"eth0": expected}


def test_the_counts_of_real_links_are_those_of_the_process_namespace(tmp_path):
    def main():
        iproute.ip("link set lo up", "link add gw0 type veth peer name gw1")
        before = counters.read().cards
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(30):
                sender.sendto(b"x", ("127.0.0.1", 9))
        moved = counters.read().cards["lo"].since(before["lo"])
        return sorted(before), moved.sent, moved.received

    names, sent, received = in_sandbox(tmp_path, main)
    assert {"gw0", "gw1", "lo"} <= set(names)
    assert "eth0" not in names
    assert sent >= 30
    assert received >= 30


BEFORE = Counters({"eth0": counters.Card(received=50_000, damaged=40), "eth1": counters.Card()}, 7, 8, 9, 10)


def later(backlog=0, buffer=0, queue=0, checksum=0, **of_card):
    """The counts after 10,000 more packets, and what else is given."""
    grown = {name: value + of_card.get(name, 0) for name, value in vars(BEFORE.cards["eth0"]).items()}
    grown["received"] += 10_000
    cards = {**BEFORE.cards, "eth0": counters.Card(**grown)}
    return Counters(
        cards,
        BEFORE.backlog_dropped + backlog,
        BEFORE.buffer_dropped + buffer,
        BEFORE.queue_dropped + queue,
        BEFORE.wrong_checksum + checksum,
    )


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE, None),
        (later(), None),
        (later(backlog=2), "2 packets between cards and sockets"),
        (later(buffer=3), "3 UDP packets found the buffer of their socket full"),
        (later(checksum=4), "4 UDP packets came with a wrong checksum"),
        (later(queue=5), "5 UDP packets found this host's own queue"),
        (later(damaged=5), "5 packets came damaged to eth0, and 10000 well"),
        (later(overrun=6), "eth0 dropped 6 packets for want of room"),
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


def test_a_card_that_was_not_read_before_has_counted_nothing_during_the_check():
    later_alone = Counters({"eth0": counters.Card(1000, 1000, 50)})
    assert counters.judge(Counters(), later_alone, ["eth0"], 0) == []
    assert counters.judge(later_alone, Counters(), ["eth0"], 0) == []


def test_cards_that_gradwire_does_not_use_do_not_matter():
    assert counters.judge(BEFORE, later(damaged=5, overrun=6), ["eth1", "gone"], 0) == []
    assert counters.judge_now(BEFORE, ["eth1", "gone"], 0) == []


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Counters({"eth0": counters.Card(received=1_000_000, damaged=10)}), []),
        (Counters({"eth0": counters.Card(received=1_000_000, damaged=11)}), [("card", "warning")]),
        (Counters({"eth0": counters.Card(received=1000, damaged=9)}), []),
        (Counters({"eth0": counters.Card(damaged=10)}), [("card", "warning")]),
        (Counters({"eth0": counters.Card(sent=100_000, collisions=100)}), []),
        (Counters({"eth0": counters.Card(sent=100_000, collisions=101)}), [("card", "warning")]),
        (Counters(connections=(899, 1000)), []),
        (Counters(connections=(900, 1000)), [("filter", "warning")]),
        (Counters(connections=(1000, 1000)), [("filter", "problem")]),
        (Counters(connections=(0, 0)), []),
    ],
)
def test_what_counts_since_the_start_say_is_judged(now, expected):
    found = counters.judge_now(now, ["eth0"], 1)
    assert [(finding.check, finding.level) for finding in found] == expected
    assert all(finding.fix and finding.rank == 1 for finding in found)


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_full_buffer_of_a_real_socket_is_counted(address):
    before, family = counters.read(), family_of(address).number
    with (
        socket.socket(family, socket.SOCK_DGRAM) as narrow,
        socket.socket(family, socket.SOCK_DGRAM) as sender,
    ):
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.bind((address, 0))
        for _ in range(100):
            sender.sendto(bytes(1000), narrow.getsockname())
    found = counters.judge(before, counters.read(), [], 0)
    assert any("found the buffer of their socket full" in finding.text for finding in found)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Card(1000), []),
        (Card(), []),
        (Card(100, 1000, half_duplex=True), [("card", "problem")]),
        (Card(100, 1000), [("card", "problem")]),
        (Card(10, 10_000), [("card", "problem")]),
        (Card(100, 100), []),
        (Card(1000, 10_000), []),
        (Card(wireless=True), [("card", "warning")]),
    ],
)
def test_what_a_card_says_of_its_wire_is_judged(facts, expected):
    found = card.judge("eth0", facts, 1)
    assert [(finding.check, finding.level) for finding in found] == expected
    assert all(finding.fix and finding.rank == 1 and "eth0" in finding.text for finding in found)


@pytest.mark.parametrize(
    ("speeds", "levels"),
    [
        ([], []),
        ([1000], []),
        ([None, None], []),
        ([1000, None], []),
        ([10_000, 25_000], []),
        ([1000, 2500], []),
        ([1000, 4000], ["warning"]),
        ([100_000, 1000, None], ["warning"]),
    ],
)
def test_unlike_cards_of_which_nobody_has_chosen_are_told(speeds, levels):
    """Not where speeds are made up, and not where a name in GRADWIRE_INTERFACE, or one host, says which way is taken."""
    used = [Interface(f"eth{n}", f"10.0.{n}.1", 1500, True, "", Card(speed)) for n, speed in enumerate(speeds)]
    unused = Interface("eth9", "10.0.9.1", 1500, False, "", Card(10))
    facts = HostFacts("a", "6.1", 47400, GOOD, interfaces=[*used, unused])

    def found(facts, **options):
        return [finding for finding in judge_host(facts, 2, **options) if finding.check == "card"]

    assert [finding.level for finding in found(facts)] == levels
    assert found(dataclasses.replace(facts, interface_asked="eth0,eth1")) == []
    assert found(facts, meets_here=True) == []
    for finding in found(facts):
        fast = max(range(len(speeds)), key=lambda n: speeds[n] or 0)
        assert f"eth{fast} at {speeds[fast]}, and both are used" in finding.text
        assert f"GRADWIRE_INTERFACE=eth{fast} " in finding.fix
        assert finding.rank == 2


def host(*speeds, used=True):
    cards = [{"name": f"eth{n}", "used": used, "card": {"speed_mbit": speed}} for n, speed in enumerate(speeds)]
    return {"interfaces": cards}


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([host(1000), host(1000)], []),
        ([host(1000), host(None), host()], []),
        ([host(None), host(1000)], []),
        ([host(10_000), host(1000)], []),
        ([host(2500), host(10_000)], ["warning"]),
        ([host(100), host(1000), host(100)], ["warning"]),
        # A slow card beside a fast one on every host is how that cluster is.
        ([host(25_000, 1000), host(1000, 25_000)], []),
        ([host(25_000, 100), host(1000, 25_000)], ["warning"]),
        ([host(100), host(1000, used=False)], []),
    ],
)
def test_a_card_that_is_slower_than_all_of_another_rank_holds_the_job_up(hosts, expected):
    found = card.judge_speeds(hosts, 0)
    assert [finding.level for finding in found] == expected
    assert all("Mbit/s" in finding.text and finding.fix for finding in found)


SUPPORTED_100_HALF, SUPPORTED_1000_FULL, SUPPORTED_10000_FULL = 1 << 2, 1 << 5, 1 << 12


def said(supported, speed_mbit, duplex):
    """What a card answers, by the offsets of struct ethtool_cmd in linux/ethtool.h."""
    answer = bytearray(44)
    struct.pack_into("=I", answer, 4, supported)
    struct.pack_into("=H", answer, 12, speed_mbit & 0xFFFF)
    answer[14] = duplex
    struct.pack_into("=H", answer, 28, speed_mbit >> 16)
    return answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (said(SUPPORTED_1000_FULL, 1000, 1), Card(1000, 1000)),
        (said(SUPPORTED_1000_FULL | SUPPORTED_100_HALF, 100, 0), Card(100, 1000, half_duplex=True)),
        (said(SUPPORTED_10000_FULL, 10_000, 0), Card(10_000, 10_000)),
        (said(1 << 31, 200_000, 1), Card(200_000, 0)),
        (said(SUPPORTED_1000_FULL, 0xFFFF_FFFF, 255), Card()),
        (said(SUPPORTED_1000_FULL, 0, 0), Card()),
        (said(0, 10_000, 1), Card()),
    ],
)
def test_what_a_card_answers_is_read(monkeypatch, answer, expected):
    def ioctl(_control, request, interface):
        assert request == 0x8946
        name, address = struct.unpack("16sP16x", interface)
        assert name.rstrip(b"\0") == b"eth0"
        assert int.from_bytes((ctypes.c_char * 4).from_address(address).raw, sys.byteorder) == 1  # ETHTOOL_GSET
        ctypes.memmove(address, bytes(answer), len(answer))

    monkeypatch.setattr(card.fcntl, "ioctl", ioctl)
    monkeypatch.setattr(card, "_radios", list)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        assert card.examine(control, "eth0") == expected


def test_real_links_without_a_wire_are_asked_and_not_believed(tmp_path):
    def main():
        iproute.ip("link add gw0 type veth peer name gw1", "link set gw0 up", "link set gw1 up")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            answers = [card.settings(control, name) for name in ("gw0", "lo", "no-such-card")]
            return answers, card.examine(control, "gw0") == Card()

    (veth, *others), is_nothing = in_sandbox(tmp_path, main)
    assert list(veth[:2]) == [10_000, 1]
    assert [each[0] for each in others] == [0, 0]
    assert is_nothing
