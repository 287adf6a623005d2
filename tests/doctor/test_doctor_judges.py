"""What the doctor makes of facts, without a network."""

import dataclasses
import socket
import struct

import pytest
from doctors import GOOD, needs_ipv6
from gradwire import _launcher
from gradwire.config import Config
from gradwire.doctor import host, pairs, rails, threads
from gradwire.doctor.family import family_of
from gradwire.doctor.findings import Finding, ordered, suffers
from gradwire.doctor.host import HostFacts
from gradwire.doctor.kept import keep
from gradwire.doctor.pairs import PairFacts
from gradwire.doctor.probe import Answer, Count, End, Prober, _Counting
from gradwire.doctor.rails import Rail
from gradwire.doctor.ways import Plan

HOST = HostFacts("a", "6.1", 47400, GOOD, clock={"source": "tsc", "synchronised": True})
PAIR = PairFacts(0, 1, "10.0.0.2", (0.1, 0.2), 1500, 1500, 1000, paths=1)
RAIL = Rail("10.0.1.1", 1000, 0, 1500, (250, 0))
PLAN = Plan(1000, 0.005)


def levels(findings):
    return {(finding.check, finding.level) for finding in findings if finding.level != "note"}


def with_features(**changes):
    return dataclasses.replace(HOST, features={**GOOD, **changes})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (HOST, set()),
        (with_features(receive_buffer_bytes=425_984), {("buffers", "problem")}),
        (with_features(receive_buffer_bytes=8 << 20), {("buffers", "warning")}),
        (with_features(send_buffer_bytes=425_984), {("buffers", "warning")}),
        (with_features(gso=False, gro=False), {("kernel", "warning")}),
        (with_features(addresses=[]), {("interface", "warning")}),
        (dataclasses.replace(HOST, clock={"source": "hpet", "synchronised": True}), {("clock", "warning")}),
        (dataclasses.replace(HOST, limits={"netdev_max_backlog": 50}), {("buffers", "warning")}),
        (dataclasses.replace(HOST, features=None, error="port 47400 is taken"), {("engine", "problem")}),
        (dataclasses.replace(HOST, own_port=47400), set()),
        (dataclasses.replace(HOST, own_port=47399), {("port", "warning")}),
    ],
)
def test_what_a_host_lacks_is_judged(facts, expected):
    found = host.judge(facts)
    assert levels(found) == expected
    assert all(finding.fix for finding in found if finding.level != "note")


def test_a_rank_whose_own_port_is_taken_is_told_so_and_which_one_it_has(monkeypatch):
    """Not where no launcher numbers the ranks: then the first free one is anybody's."""
    monkeypatch.setenv("LOCAL_RANK", "5")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", 0))
        taken = other.getsockname()[1]
        monkeypatch.setattr(_launcher, "PORT_BASE", taken - 5)
        facts = host.examine(Config(interface="lo"))
        assert facts.own_port == taken != facts.port
        [found] = [finding for finding in host.judge(facts) if finding.check == "port"]
        assert str(taken) in found.text
        assert str(facts.port) in found.text

        monkeypatch.delenv("LOCAL_RANK")
        assert host.examine(Config(interface="lo")).own_port is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"lost": 1}, {("loss", "warning")}),
        ({"lost": 6}, {("loss", "warning")}),
        ({"lost": 20}, {("loss", "problem")}),
        ({"large": (500, 3)}, {("loss", "warning")}),
        ({"lost": 6, "large": (500, 12)}, {("loss", "problem")}),
        ({"lost": 20, "large": (25, 1)}, {("loss", "problem")}),
        ({"burst_lost": 0.3}, {("buffers", "warning")}),
        ({"ip_bytes": 1400}, {("mtu", "problem")}),
        ({"offset_s": -3.0}, {("clock", "warning")}),
        ({"reordered": 5}, set()),
        ({"rails": (Rail("10.0.1.1", 1000, 1000),)}, set()),
        ({"rails": (RAIL,)}, set()),
        ({"rails": (dataclasses.replace(RAIL, lost=999),)}, {("paths", "problem")}),
        ({"rails": (dataclasses.replace(RAIL, lost=6),)}, {("paths", "warning")}),
        ({"rails": (dataclasses.replace(RAIL, large=(250, 250)),)}, {("paths", "problem")}),
        ({"rails": (dataclasses.replace(RAIL, large=(250, 3)),)}, {("paths", "warning")}),
    ],
)
def test_what_lies_between_two_ranks_is_judged(changes, expected):
    found = pairs.judge(dataclasses.replace(PAIR, **changes), Config(), loss_max=0.005)
    assert levels(found) == expected


@pytest.mark.parametrize(("lost", "level"), [(1000, "warning"), (999, "problem"), (1, "warning")])
def test_a_way_that_further_paths_would_take_matters_to_a_job_that_has_some(lost, level):
    facts = dataclasses.replace(PAIR, rails=(dataclasses.replace(RAIL, lost=lost),))
    assert levels(pairs.judge(facts, Config(paths=2), loss_max=0.005)) == {("paths", level)}


@pytest.mark.parametrize(("paths", "level"), [(1, "note"), (2, "problem")])
def test_a_rail_that_full_packets_do_not_pass_matters_to_a_job_with_several_paths(paths, level):
    """The engine begins no path there, so whatever else is so there does not matter."""
    rail = dataclasses.replace(RAIL, lost=500, ip_bytes=1300, large=(250, 250), marks=((42, None),))
    [found] = pairs.judge(dataclasses.replace(PAIR, rails=(rail,)), Config.mlt(paths=paths), loss_max=0.005)
    assert (found.check, found.level) == ("mtu", level)
    assert "from 10.0.1.1 packets of 1500 bytes disappear on the way, 1300 arrive" in found.text
    assert "GRADWIRE_MTU=1300" in found.fix


def test_marks_that_one_rail_alone_loses_are_told_with_its_address_and_those_of_all_ways_once():
    octets = pairs.octets_of(Config.mlt())
    well, bleached = [tuple((octet, came(octet)) for octet in octets) for came in (int, lambda octet: octet & 3)]

    def found(first, *marks):
        rails = tuple(dataclasses.replace(RAIL, marks=each) for each in marks)
        return pairs.judge(dataclasses.replace(PAIR, marks=first, rails=rails), Config.mlt(), loss_max=0.005)

    assert found(well, well) == []
    [of_rail] = found(well, bleached)
    assert (of_rail.check, of_rail.level) == ("dscp", "problem")
    assert of_rail.text.startswith("from 10.0.1.1 DSCP 10, 18, 26, 34, 40 arrives as 0")
    [of_all] = found(bleached, bleached, bleached)
    assert of_all.text.startswith("DSCP ")


@pytest.mark.parametrize(
    ("config", "points", "unset"),
    [
        (Config(dscp=46), [46], "GRADWIRE_DSCP=0"),
        (Config(dscp=46, dscp_control=10), [46, 10], "GRADWIRE_DSCP=0 and GRADWIRE_DSCP_CONTROL=0"),
        (Config(dscp_control=10), [0, 10], "GRADWIRE_DSCP_CONTROL=0"),
        (Config.mlt(classes=2), [34, 26, 40], "GRADWIRE_DSCP_CLASSES=off"),
    ],
)
@pytest.mark.parametrize("came", [None, 0])
def test_code_points_matter_whichever_setting_sets_them(config, points, unset, came):
    octets = pairs.octets_of(config)
    assert octets == [point << 2 | 2 for point in points]
    marks = tuple((octet, octet if octet >> 2 == 0 else came if came is None else 2) for octet in octets)
    (found,) = pairs.judge(dataclasses.replace(PAIR, marks=marks), config, loss_max=0.005)
    assert (found.check, found.level) == ("dscp", "problem")
    assert found.fix.endswith(f"or set {unset}")


def test_each_local_address_is_tried_towards_the_peers_in_its_network():
    assert rails.nearest("10.9.0.1", ["10.9.1.2", "10.9.0.2"]) == "10.9.0.2"
    assert rails.nearest("10.9.1.1", ["10.9.0.2", "fd00::2", "10.9.1.2"]) == "10.9.1.2"
    assert rails.nearest("fd00:1::1", ["fd00::2", "fd00:1::2"]) == "fd00:1::2"
    assert rails.nearest("172.16.0.1", ["10.9.0.2", "10.9.1.2"]) == "10.9.0.2", "the best one where none is near"


def notes(findings):
    return {(finding.check, finding.text) for finding in findings if finding.level == "note"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reordered": 5}, {("reordering", "5 of 1000 packets came after a later one; gradwire does not mind")}),
        ({"rtt_ms": (50.0, 80.0)}, set()),
        (
            {"rtt_ms": (50.1, 80.0)},
            {("rtt", "50.1 ms: long ways need more in flight; results take at least two of these")},
        ),
        ({"offset_s": 0.5}, set()),
    ],
)
def test_what_is_only_good_to_know_between_two_ranks_is_a_note(changes, expected):
    found = pairs.judge(dataclasses.replace(PAIR, **changes), Config(), loss_max=0.005)
    assert notes(found) == expected
    assert levels(found) == set()


@pytest.mark.parametrize(("synchronised", "told"), [(True, False), (False, True), (None, False)])
def test_a_clock_that_is_known_to_be_alone_is_a_note(synchronised, told):
    (*found,) = host.judge(dataclasses.replace(HOST, clock={"source": "tsc", "synchronised": synchronised}))
    text = "the wall clock is not synchronised: logs of ranks are hard to compare"
    assert notes(found) == ({("clock", text)} if told else set())


@pytest.mark.parametrize(("status", "synchronised"), [(0x2001, True), (0x41, False)])
def test_the_kernels_word_about_its_clock_is_one_bit(monkeypatch, status, synchronised):
    """STA_UNSYNC, 0x40, of the status after one int and four longs."""

    class Libc:
        @staticmethod
        def adjtimex(state):
            struct.pack_into("i4xllll i", state, 0, 0, -1, -1, -1, -1, status)
            return 0

    monkeypatch.setattr(host.ctypes, "CDLL", lambda *_args, **_options: Libc)
    assert host._synchronised() is synchronised


UP, LOOPBACK = 0x1, 0x8
ONE, OTHERS = "10.0.0.1", "10.0.0.2"
OF_LINK = "fe80::1"


@pytest.mark.parametrize(
    ("asked", "address", "reason"),
    [
        ("", ONE, "it is up and has an address"),
        ("", "fd00::1", "it is up and has an address"),
        ("", "127.0.0.1", "there is no other to use"),
        ("", "::1", "there is no other to use"),
        ("lo", "127.0.0.1", "GRADWIRE_INTERFACE=lo names it"),
        ("eth0", ONE, "GRADWIRE_INTERFACE=eth0 names it"),
        ("^eth1", ONE, "GRADWIRE_INTERFACE=^eth1 does not leave it out"),
    ],
)
def test_each_reason_why_an_interface_is_used(asked, address, reason):
    assert host._used_reason(Config(interface=asked), address) == reason


@pytest.mark.parametrize(
    ("asked", "name", "addresses", "flags", "reason"),
    [
        ("eth1", "eth0", [ONE], 0, "it is down"),
        ("eth1", "eth0", [], UP, "it has no address"),
        ("", "eth0", [OF_LINK], UP, "it has no address but one of its link alone"),
        ("", "eth0", ["fd00::1"], UP, "it has no IPv4 address, and others have one"),
        ("", "lo", ["127.0.0.1"], UP | LOOPBACK, "it reaches this host only"),
        ("", "lo", ["::1"], UP | LOOPBACK, "it reaches this host only"),
        ("eth0", "eth1", [ONE], UP, "GRADWIRE_INTERFACE=eth0 leaves it out"),
        ("", "virbr0", [ONE], UP, "a bridge of containers has the same address on every host"),
        ("", "eth1", [ONE], UP, "another address was chosen"),
        ("", "eth1", ["169.254.1.1"], UP, "it has no address but one of its link alone"),
        ("", "br-0123456789ab", [ONE], UP, "a bridge of containers has the same address on every host"),
        ("", "br-ex", [ONE], UP, "another address was chosen"),
    ],
)
def test_each_reason_why_an_interface_is_not_used(asked, name, addresses, flags, reason):
    assert host._unused_reason(Config(interface=asked), name, addresses, flags, [OTHERS]) == reason


@pytest.mark.parametrize(
    ("asked", "addresses", "reason"),
    [
        ("", [OF_LINK], "it has no address but one of its link alone"),
        ("fd00::/8", [ONE], "GRADWIRE_INTERFACE=fd00::/8 leaves it out"),
        ("eth0", [ONE, "fd00::2"], "GRADWIRE_INTERFACE=eth0 leaves it out"),
    ],
)
def test_beside_ipv6_addresses_an_interface_needs_no_ipv4_one(asked, addresses, reason):
    assert host._unused_reason(Config(interface=asked), "eth1", addresses, UP, ["fd00::1"]) == reason


def test_ipv6_addresses_are_read_by_interface(tmp_path):
    (tmp_path / "if_inet6").write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000002 04 40 00 82     eth0\n"
    )
    found = host._ipv6_addresses(tmp_path / "if_inet6")
    assert dict(found) == {"eth0": ["fe80::fc:ff:fe00:1", "fd00::2"], "lo": ["::1"]}
    assert host._ipv6_addresses(tmp_path / "a kernel without")["eth0"] == []


def test_loopback_alone_matters_only_to_ranks_elsewhere():
    facts = with_features(addresses=[])
    assert levels(host.judge(facts, meets_here=True)) == set()
    assert levels(host.judge(facts)) == {("interface", "warning")}


LARGE = {pairs.LARGE_TEST: Count(250, 0, 0)}


class Mute:
    """In place of a `Prober`: a peer that answers probes and has counted these tests only."""

    rank = 0

    def __init__(self, counts):
        self.counts = counts

    def find(self, ends, _tries):
        return ends[0]

    def ask(self, _to, _size_bytes=0, octet=0, **_options):
        return Answer(0.001, octet, 0.0)

    def ask_for_certain(self, _to, _tries, *, octet=0, **_options):
        return Answer(0.001, octet, 0.0)

    def count(self, _to, test, _packets, **_options):
        return self.counts.get(test)


@pytest.mark.parametrize(
    ("counts", "lost", "burst_lost", "expected"),
    [
        (
            {pairs.LOSS_TEST: Count(980, 3, 0), **LARGE, pairs.BURST_TEST: Count(192, 0, 0)},
            20,
            0.0,
            {("loss", "problem")},
        ),
        ({pairs.LOSS_TEST: Count(1000, 0, 0), pairs.BURST_TEST: Count(192, 0, 0)}, 0, 0.0, {("loss", "problem")}),
        ({pairs.BURST_TEST: Count(192, 0, 0)}, 1000, 0.0, {("loss", "problem")}),
        ({pairs.LOSS_TEST: Count(1000, 0, 0), **LARGE}, 0, 1.0, {("buffers", "warning")}),
        ({}, 1000, 1.0, {("loss", "problem")}),
    ],
)
def test_a_count_that_never_comes_is_the_loss_of_everything(counts, lost, burst_lost, expected):
    peer = pairs.Peer(1, ["10.0.0.2"], 47400)
    facts = pairs.measure(Mute(counts), peer, Config(), ip_bytes=1500, sources=(), plan=PLAN)
    assert (facts.sent, facts.lost, facts.burst_lost) == (1000, lost, pytest.approx(burst_lost))
    assert levels(pairs.judge(facts, Config(), loss_max=0.005)) == expected


@pytest.mark.parametrize(
    ("spacing_ns", "rate_mbit"), [(None, None), (120_000, 100.0), (20_000, 600.0), (1, 600.0), (0, 600.0)]
)
def test_the_rate_is_told_up_to_what_cards_let_tell(spacing_ns, rate_mbit):
    counts = {pairs.LOSS_TEST: Count(1000, 0, 0), pairs.BURST_TEST: Count(192, 0, 0, spacing_ns)}
    facts = pairs.measure(
        Mute(counts), pairs.Peer(1, ["10.0.0.2"], 47400), Config(), ip_bytes=1500, sources=(), plan=PLAN
    )
    assert facts.rate_mbit == rate_mbit
    assert pairs.rate_most(1500) == 600.0


def test_silent_ports_of_network_threads_are_told_by_direction_unless_they_are_others_at_each_start():
    ports = threads.Ports(own=[47464, 47528, 47592, None], peers=[47465, 47529, 47593, None])
    heard = [False, True, False, False]
    there, back = threads.judge(3, 5, ports, answered=[False, False, True, False], heard=heard)
    assert (there.rank, there.peer, back.rank, back.peer) == (3, 5, 3, 5)
    assert "nothing arrives at UDP port 47465 of" in there.text
    assert "rank 5's host" in there.fix
    assert "no answer comes back to UDP port 47528 of" in back.text
    assert "rank 3's host" in back.fix
    assert threads.judge(3, 5, ports, answered=[True] * 4, heard=heard) == []


def threads_of(ports, **more):
    return {"threads": dataclasses.asdict(threads.Threads(ports, **more)), "boot": "a", "interfaces": []}


def test_ports_that_network_threads_do_not_get_are_told_as_far_as_a_job_uses_them():
    mine = threads_of([47400, 47464, 50000, 50001])["threads"]
    assert threads.told(mine) == [47464, None, None]
    (taken,) = threads.judge_ports(mine, 2, 1)
    assert "UDP port 47528 of" in taken.text
    assert threads.judge_ports(mine, 1, 1) == []
    any_port = threads_of([40000, 40001], is_fixed=False)["threads"]
    assert (threads.told(any_port), threads.judge_ports(any_port, 1, 1)) == ([None], [])
    (beyond,) = threads.judge_ports(threads_of([65500, 40001])["threads"], 1, 1)
    assert "a lower GRADWIRE_PORT" in beyond.fix


def test_a_job_uses_as_many_network_threads_as_each_rank_has_cores_unless_all_have_asked():
    four = [47400, 47464, 47528, 47592]
    one = threads_of(four, cores=(8, 8))
    assert threads.used([one]) == 3
    assert threads.used([one] * 4) == 1, "eight cores for four ranks"
    assert threads.used([one] * 4 + [threads_of(four, cores=(1, 8)) | {"boot": "b"}]) == 0
    assert threads.used([threads_of(four, cores=(1, 1), is_asked=True)] * 4) == 3
    assert threads.used([threads_of(four, cores=(1, 1), is_asked=True), one]) == 0
    assert threads.used([one, threads_of([47400], cores=(8, 8))]) == 0
    assert threads.used([threads_of(four, cores=(999, 99999))] * 129) == 0


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ([[1000], [1000], [10_000]], "note"),
        ([[1000], [10_000]], "note"),
        ([[1000], [10_000], [10_000]], "warning"),
        ([[1000, 1000, 1000], [1000, 1000, 1000]], "warning"),
        ([[1000], [None]], "warning"),
        ([[1000, None], [1000]], "warning"),
        ([[], []], "warning"),
    ],
)
def test_what_further_threads_lack_is_a_note_where_cards_say_that_links_are_too_slow_for_them(cards, expected):
    def on_host(boot, speeds, **more):
        used = [{"used": True, "name": "eth0", "card": {"speed_mbit": speed}} for speed in speeds]
        unused = {"used": False, "name": "lo", "card": {"speed_mbit": None}}
        return threads_of([47400, 50000], **more) | {"boot": boot, "interfaces": [*used, unused]}

    hosts = [on_host(f"boot {at}", speeds) for at, speeds in enumerate(cards)]
    assert threads.level_of(hosts) == expected
    assert threads.level_of([on_host("one boot", speeds) for speeds in cards]) == "warning", "no card is between them"
    assert threads.level_of([on_host(f"{at}", speeds, is_asked=True) for at, speeds in enumerate(cards)]) == "warning"
    (taken,) = threads.judge_ports(hosts[0]["threads"], 1, 0, expected)
    (shut,) = threads.judge(0, 1, threads.Ports([47464], [47464]), answered=[False], heard=[False], level=expected)
    assert (taken.level, shut.level) == (expected, expected)


def test_a_port_that_somebody_has_taken_since_is_a_problem_only_of_the_first_network_thread():
    def bound(*ports):
        with keep(ports, "0.0.0.0") as kept:
            probers, findings = kept.probers(len(ports) - 1, 3, 7)
        found = [prober.port for prober in probers]
        for prober in probers:
            prober.close()
        return found, levels(findings)

    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken,
    ):
        free.bind(("0.0.0.0", 0))
        taken.bind(("0.0.0.0", 0))
        here, not_here = free.getsockname()[1], taken.getsockname()[1]
        free.close()
        assert bound(here, not_here, 0) == ([here], {("threads", "warning")})
        assert bound(not_here, here) == ([], {("engine", "problem")})
        assert bound(here) == ([here], set())
        with keep([here, not_here], "0.0.0.0") as kept:
            [prober], findings = kept.probers(0, 3, 7)
            prober.close()
        assert findings == [], "nobody asks the port that is lost"


def test_only_problems_make_training_suffer_and_they_come_first():
    problem, warning, note = (Finding(level, "x", "y") for level in ("problem", "warning", "note"))
    assert suffers([note, problem])
    assert not suffers([note, warning])
    assert ordered([note, warning, problem]) == [problem, warning, note]


def test_reordered_and_copied_packets_are_counted_apart_from_lost_ones():
    counting = _Counting()
    for number in (0, 1, 3, 2, 3, 6, 5):
        counting.add(number, 0, 1)
    assert counting.counts()[:3] == (6, 2, 1)


MS = 1_000_000
TOGETHER = [5 * MS] * 40


def evenly(spacing_ns, packets=40):
    return [spacing_ns * place for place in range(packets)]


@pytest.mark.parametrize(
    ("calls", "spacing_ns"),
    [
        ([], None),
        ([evenly(MS, 5)], None),
        ([evenly(MS)], MS),
        ([evenly(MS), evenly(9 * MS), evenly(3 * MS)], 3 * MS),
        ([evenly(MS), evenly(2 * MS)], MS),
        # What a card collected came at once; one such call, of a receiver that stood still, is not the median.
        ([TOGETHER], 0),
        ([evenly(MS), TOGETHER, evenly(MS)], MS),
        ([list(reversed(evenly(MS)))], 0),
        ([evenly(1 << 33)], (1 << 32) - 2),
    ],
)
def test_the_rate_of_a_way_is_that_of_packets_that_left_in_one_call(calls, spacing_ns):
    counting, number = _Counting(), 0
    for call, times in enumerate(calls):
        for came_ns in times:
            counting.add(number, call + 1, 10**18 + came_ns)
            number += 1
    for came_ns in evenly(7 * MS):
        counting.add(number, 0, came_ns)
        number += 1
    for _ in evenly(7 * MS):
        counting.add(number, 200, None)
        number += 1
    unknown = (1 << 32) - 1
    assert counting.counts()[3] == (unknown if spacing_ns is None else spacing_ns)
    assert counting.counts()[3] == (unknown if spacing_ns is None else spacing_ns), "asked again"


def test_packets_that_were_lost_took_their_time():
    counting = _Counting()
    for place in (0, 9, 38):
        counting.add(place, 1, place * MS)
    assert counting.counts()[3] == MS


def test_a_rank_that_is_at_the_address_of_another_is_not_taken_for_it():
    """As behind bridges of containers, which have the same addresses on every host."""
    with Prober(0, 3, token=1, address="127.0.0.1") as one:
        for other in (2, 3):
            end = End("127.0.0.1", one.port, other)
            assert (one.ask(end, wait_s=0.1) is not None) == (other == 3)
            found = one.count(end, 1, 20, size_bytes=200, batch=10, pause_s=0)
            assert (found is not None) == (other == 3)
        assert one.heard == {3}


SO_NO_CHECK = 11  # without checksums the kernel refuses to cut packets apart


@pytest.mark.parametrize(("refused", "size_bytes"), [(False, 1500), (False, 9000), (True, 1500)])
def test_packets_of_one_call_are_counted_one_by_one_also_where_the_kernel_refuses_it(refused, size_bytes):
    with Prober(0, 0, token=1, address="127.0.0.1") as one, Prober(0, 1, token=1, address="127.0.0.1") as other:
        if refused:
            one.socket.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
        settings = {"size_bytes": size_bytes, "batch": 12, "pause_s": 0.02}
        found = one.count(End("127.0.0.1", other.port, 1), 1, 100, **settings, joined=True)
        plain = one.count(End("127.0.0.1", other.port, 1), 2, 100, **settings)
    assert (
        (found.arrived, found.reordered, found.duplicated)
        == (plain.arrived, plain.reordered, plain.duplicated)
        == (100, 0, 0)
    )
    assert plain.spacing_ns is None
    assert (found.spacing_ns is None) == refused


def test_a_hop_that_did_not_answer_makes_no_path_of_its_own():
    one, other = {1: "10.0.0.1", 2: "10.1.0.1", 3: "10.3.0.1"}, {1: "10.0.0.1", 2: "10.2.0.1", 3: "10.3.0.1"}
    assert pairs._distinct([one, other, one, {}]) == 2
    assert pairs._distinct([{1: "10.0.0.1", 3: "10.3.0.1"}, {2: "10.1.0.1"}, {1: "10.0.0.1", 2: "10.1.0.1"}]) == 1
    assert pairs._distinct([{1: "10.0.0.1"}, {2: "10.0.0.1"}]) == 1
    assert pairs._distinct([{}] * 8) == 1


def test_ways_are_told_apart_by_each_two_of_them():
    """Two routers at each of two hops make four ways; a flow that is like one of them adds none."""
    ways = [{1: first, 2: second} for first in ("a", "b") for second in ("c", "d")]
    assert pairs._distinct([{1: "a"}, *ways, {2: "d"}]) == 4


def test_the_octets_tried_are_those_of_the_job():
    assert pairs.octets_of(Config.mlt(classes=2)) == [34 << 2 | 2, 26 << 2 | 2, 40 << 2 | 2]
    assert pairs.octets_of(Config.auto()) == pairs.octets_of(Config.mlt())


@pytest.mark.parametrize(("address", "header_bytes"), [("127.0.0.1", 28), pytest.param("::1", 48, marks=needs_ipv6)])
def test_probes_of_both_families_have_their_size_and_traffic_class(address, header_bytes):
    with (
        Prober(0, 0, token=1, address=address) as one,
        socket.socket(family_of(address).number, socket.SOCK_DGRAM) as sink,
    ):
        sink.bind((address, 0))
        sink.settimeout(5)
        for asked_bytes, expected_bytes in ((0, 32 + header_bytes), (1400, 1400), (9000, 9000)):
            assert one.ask(End(address, sink.getsockname()[1], 1), asked_bytes, wait_s=0) is None
            assert len(sink.recv(1 << 16)) + header_bytes == expected_bytes
        with Prober(0, 1, token=1, address=address) as other:
            answer = one.ask(End(address, other.port, 1), octet=0xBB)
            assert answer.octet == 0xBB
            for joined in (False, True):
                end = End(address, other.port, 1)
                found = one.count(end, 1 + joined, 100, size_bytes=1500, batch=20, pause_s=0.02, joined=joined)
                assert found.arrived == 100


def test_packets_of_another_run_are_ignored():
    with Prober(0, 0, token=1, address="127.0.0.1") as one, Prober(0, 1, token=2, address="127.0.0.1") as other:
        assert one.ask(End("127.0.0.1", other.port, 1), wait_s=0.1) is None
        assert other.heard == set()
        other.token = 1
        assert one.ask(End("127.0.0.1", other.port, 1), octet=0x28) is not None
        assert other.heard == {0}
        assert one.count(End("127.0.0.1", other.port, 1), 1, 50, size_bytes=200, batch=10, pause_s=0).arrived == 50
