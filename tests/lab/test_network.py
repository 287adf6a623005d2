"""The network of `gradwire lab`: rails, and ports that change while it runs; counted at the receivers."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gradwire.lab import LabError, switches
from gradwire.lab.errors import WrongRequest
from gradwire.lab.iproute import BUCKET_BYTES
from gradwire.lab.loss_filter import LossFilter
from gradwire.lab.network import Layout, Network
from gradwire.lab.switches import Port
from gradwire.lab.uml_switch import PROGRAM
from sandboxed import has_netem, in_sandbox

HAS_UML, HAS_COMPILER = shutil.which(PROGRAM) is not None, shutil.which("cc") is not None
KINDS = [
    "nft",
    pytest.param("soft", marks=pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")),
    pytest.param("uml", marks=pytest.mark.skipif(not HAS_UML, reason=f"{PROGRAM} is not installed")),
    pytest.param("netem", marks=pytest.mark.skipif(not has_netem(), reason="this kernel has no netem")),
]
DELAYING = KINDS[1:]
PACKETS = 2_000


class Probe:
    """Numbered packets from host 0 to host 1, slowly enough that no buffer overflows."""

    def __init__(self, network, local_rail=0, remote_rail=0, sender=0, receiver=1):
        self.network, self.port = network, (receiver, local_rail)
        with network.on_host(receiver):
            self.inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with network.on_host(sender):
            self.outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.inbox.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE
        self.inbox.bind((network.address(receiver, remote_rail), 0))
        self.outbox.bind((network.address(sender, local_rail), 0))
        self.to = self.inbox.getsockname()
        self.sent = 0

    def arrived(self, packets, payload=20, quiet_s=20.0):
        """One byte for each packet sent, 1 where it arrived.

        It is over when the port has counted all of them, and those that it passed are here. `quiet_s` is for ports that count not all:
        a busy machine may hold packets for a while.
        """
        self.inbox.settimeout(0)
        found, first, before = bytearray(packets), self.sent, self._counted()
        self.sent += packets  # no two packets have one number, so that a late one counts for no other
        for index in range(packets):
            self.outbox.sendto((first + index).to_bytes(4, "little").ljust(payload, b"\0"), self.to)
            if index % 20 == 19:
                time.sleep(0.002)  # paces; nothing is waited for
            self._take(found, first)
        self.inbox.settimeout(0.5)
        end = time.monotonic() + quiet_s
        while not all(found) and time.monotonic() < end:
            if self._take(found, first):
                end = time.monotonic() + quiet_s
            passed, lost = (now - then for now, then in zip(self._counted(), before, strict=True))
            if passed + lost >= packets and sum(found) >= passed:
                break
        return bytes(found)

    def _counted(self):
        """What the port has passed and lost."""
        (row,) = (row for row in self.network.statistics() if (row["host"], row["rail"]) == self.port)
        return row["passed"], row["lost"]

    def _take(self, found, first):
        """Marks what comes until none does in time; whether there was any."""
        some = False
        try:
            while not all(found):
                index = int.from_bytes(self.inbox.recv(9000)[:4], "little") - first
                if 0 <= index < len(found):
                    found[index], some = 1, True
        except (BlockingIOError, TimeoutError):
            pass
        return some

    def round_trip_ms(self, enough_ms):
        """The least of eight, or of as many as it takes to see one this short, for a minute: a busy machine only makes them longer."""
        self.inbox.settimeout(30)
        self.outbox.settimeout(30)
        samples, end = [], time.monotonic() + 60
        while len(samples) < 8 or (min(samples) * 1e3 >= enough_ms and time.monotonic() < end):
            started = time.perf_counter()
            self.outbox.sendto(b"ping", self.to)
            _, sender = self.inbox.recvfrom(16)
            self.inbox.sendto(b"pong", sender)
            self.outbox.recv(16)
            samples.append(time.perf_counter() - started)
        return min(samples) * 1e3


@pytest.mark.parametrize("kind", KINDS)
def test_loss_of_one_port_is_set_while_it_runs_and_hits_only_that_port(tmp_path, kind):
    def main():
        with Network(Layout(hosts=3, switch=kind)) as network:
            one, other = Probe(network), Probe(network, receiver=2)
            before = sum(one.arrived(200))
            network.set([1], [], loss=0.25)
            lossy, clean = sum(one.arrived(PACKETS)), sum(other.arrived(400))
            lost = {row["host"]: row["lost"] for row in network.statistics()}
            network.set([1], [], loss=0.0)
            return [before, PACKETS - lossy, clean, sum(one.arrived(200)), lost[1], lost[2]]

    before, lost, clean, after, counted, counted_other = in_sandbox(tmp_path, main)
    assert (before, clean, after) == (200, 400, 200)
    assert abs(lost - PACKETS / 4) < 5 * (PACKETS * 0.25 * 0.75) ** 0.5
    assert (counted, counted_other) == (lost, 0)


def test_the_packet_filter_is_read_and_written_once_for_all_ports_of_a_rail(tmp_path):
    """Once for each port, of 120 of them, took minutes."""

    def main():
        asked = []

        class Counted(LossFilter):
            def _counts(self):
                asked.append("read")
                return super()._counts()

            def _replace(self, *rules):
                asked.append("written")
                super()._replace(*rules)

        switches.LossFilter = Counted
        with Network(Layout(hosts=4, rails=2, switch="nft", port=Port(loss=0.5))) as network:
            asked.clear()
            network.set([], [], loss=1.0)
            at_once = asked.copy()
            probe = Probe(network)
            lost = [50 - sum(probe.arrived(50))]
            network.set([2, 3], [], loss=0.25)  # of others
            lost.append(50 - sum(probe.arrived(50)))
            return [at_once, lost, [row["lost"] for row in network.statistics()]]

    at_once, lost, counted = in_sandbox(tmp_path, main)
    assert at_once == ["read", "written"] * 2
    assert (lost, counted) == ([50, 50], [0, 0, 100, 0, 0, 0, 0, 0])


def test_frames_that_cross_a_bridge_meet_no_packet_filters_of_ip(tmp_path):
    def main():
        with Network(Layout(hosts=2, switch="nft")):
            asked = Path("/proc/sys/net/bridge").glob("bridge-nf-call-*")  # none where the kernel has no such filters
            return [path.read_text().strip() for path in asked]

    assert set(in_sandbox(tmp_path, main)) <= {"0"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_in_a_port_holds_its_sender_back_no_more_and_what_finds_it_full_is_lost(tmp_path, kind):
    """From a socket whose own buffer has less room than the port: it would never fill the port if what waits there were charged to it."""
    packets, payload, buffer_bytes = 400, 1400, 150 * 1442

    def main():
        port = Port(rate_mbit=2, buffer_bytes=buffer_bytes)
        with Network(Layout(hosts=2, switch=kind, port=port, host_rate_mbit=200)) as network:
            probe = Probe(network)
            room = probe.outbox.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            arrived = sum(probe.arrived(packets, payload))
            lost = {row["host"]: row["lost"] for row in network.statistics()}
            return [room, arrived, lost[1]]

    room, arrived, lost = in_sandbox(tmp_path, main)
    assert room < buffer_bytes
    assert arrived >= buffer_bytes // (payload + 42)
    assert (arrived + lost, lost > 0) == (packets, True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_is_of_bytes_so_that_it_holds_many_small_packets(tmp_path, kind):
    # Three of four find it full, unless a busy machine takes four seconds to send them.
    packets, frame_bytes, buffer_bytes = 1000, 142, 32 * 1024

    def main():
        port = Port(rate_mbit=0.2, buffer_bytes=buffer_bytes, delay_ms=0 if kind == "nft" else 1)
        with Network(Layout(hosts=2, switch=kind, port=port, host_rate_mbit=100)) as network:
            return sum(Probe(network).arrived(packets, frame_bytes - 42))

    assert buffer_bytes // frame_bytes <= in_sandbox(tmp_path, main) < packets


@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[2:]])  # `soft` refuses
def test_a_buffer_is_of_bytes_so_that_it_holds_few_large_packets(tmp_path, kind):
    """Three, and a bucket of four lets as many through at once."""

    def main():
        port = Port(rate_mbit=0.5, buffer_bytes=32 * 1024)
        with Network(Layout(hosts=2, switch=kind, port=port, mtu_bytes=9000, host_rate_mbit=100)) as network:
            return sum(Probe(network).arrived(20, payload=8972))

    assert 3 <= in_sandbox(tmp_path, main) < 20


@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[2:]])
def test_a_port_takes_the_largest_numbers_that_are_not_refused(tmp_path, kind):
    def main():
        wide = Port(rate_mbit=0.1, buffer_bytes=(1 << 32) - 1, bucket_bytes=(1 << 32) - 1)
        with Network(Layout(hosts=1, switch=kind, port=wide)) as network:
            network.set([0], [], rate_mbit=100_000)
            if kind != "nft":
                network.set([0], [], buffer_bytes=1 << 20, delay_ms=343)
            return network.ports()[0, 0].rate_mbit

    assert in_sandbox(tmp_path, main) == 100_000


def fill(network, packets, payload=1200):
    """Sends packets from host 0 to host 1; returns the receiver when the switch has them all: what host 2 gets came after them."""
    probe, last = Probe(network), Probe(network, receiver=2)
    for _ in range(packets):
        probe.outbox.sendto(bytes(payload), probe.to)
    assert last.arrived(1) == b"\1"
    probe.inbox.settimeout(60)
    return probe


@pytest.mark.parametrize("change", [{}, {"loss": 1.0}])
@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_in_a_port_stays_when_it_is_set(tmp_path, kind, change):
    """Losses are of those that come afterwards. Each packet would take 100 s; where a bucket's first ones leave at once, and the
    kernel looks again only when the next one would have left, a second."""

    def main():
        with Network(Layout(hosts=3, switch=kind, host_rate_mbit=100)) as network:
            network.set([1], [], rate_mbit=0.0001 if kind == "soft" else 0.01)
            probe = fill(network, 20)
            network.set([1], [], rate_mbit=100, **change)
            return len([probe.inbox.recv(2000) for _ in range(20)])

    assert in_sandbox(tmp_path, main) == 20


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_what_waits_in_the_small_program_is_lost_and_counted_when_a_port_is_cut(tmp_path):
    """Of twenty packets, of which each takes a second; the next one comes after the cut is healed, and behind any of them."""

    def main():
        with Network(Layout(hosts=3, switch="soft", host_rate_mbit=100)) as network:
            network.set([1], [], rate_mbit=0.01)
            probe = fill(network, 20)
            network.set([1], [], is_cut=True)
            network.set([1], [], is_cut=False, rate_mbit=100)
            probe.outbox.sendto(b"next", probe.to)
            arrived = 0
            while probe.inbox.recv(2000) != b"next":
                arrived += 1
            return [arrived, *((row["passed"], row["lost"]) for row in network.statistics() if row["host"] == 1)]

    arrived, (passed, lost) = in_sandbox(tmp_path, main)
    assert arrived < 20
    assert (passed, lost) == (arrived + 1, 20 - arrived)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_is_silent_in_both_directions_until_it_is_healed(tmp_path, kind):
    def main():
        with Network(Layout(hosts=3, switch=kind)) as network:
            there, back, others = Probe(network), Probe(network, sender=1, receiver=0), Probe(network, receiver=2)
            network.set([1], [], is_cut=True)
            # A port that is cut need not count what never comes to it: that nothing comes is all there is to wait for.
            during = [sum(probe.arrived(60, quiet_s=1.5)) for probe in (there, back)]
            during.append(sum(others.arrived(60)))
            network.set([1], [], is_cut=False)
            return during + [sum(probe.arrived(60)) for probe in (there, back, others)]

    assert in_sandbox(tmp_path, main) == [0, 0, 60, 60, 60, 60]


@pytest.mark.parametrize("kind", DELAYING)
def test_delay_is_set_while_it_runs(tmp_path, kind):
    def main():
        with Network(Layout(hosts=2, switch=kind, port=Port(delay_ms=2.0))) as network:
            probe = Probe(network)
            near = probe.round_trip_ms(12.0)
            network.set([0], [], delay_ms=20.0)  # one of the two ports that a round trip crosses
            return [near, probe.round_trip_ms(40.0)]

    near, far = in_sandbox(tmp_path, main)
    assert 4.0 <= near < 12.0
    assert 22.0 <= far < 40.0


@pytest.mark.parametrize("kind", DELAYING)
def test_losses_in_bursts_have_the_share_and_the_length_that_were_asked_for(tmp_path, kind):
    share, burst = 0.2, 5.0

    def main():
        with Network(Layout(hosts=2, switch=kind, port=Port(loss=share, burst=burst))) as network:
            return Probe(network).arrived(PACKETS).hex()

    arrived = bytes.fromhex(in_sandbox(tmp_path, main))
    runs = [len(run) for run in arrived.split(b"\1") if run]
    # Runs are geometric with mean 5, so some 80 of them; five standard deviations of their mean.
    assert abs(sum(runs) / len(runs) - burst) < 5 * (burst * (burst - 1)) ** 0.5 / len(runs) ** 0.5
    assert abs(sum(runs) / PACKETS - share) < 5 * (share * (1 - share) * 2 * burst / PACKETS) ** 0.5


def test_bursts_and_delays_without_netem_are_refused(tmp_path):
    def main():
        texts = []
        for port in (Port(delay_ms=1.0), Port(loss=0.1, burst=3.0)):
            try:
                with Network(Layout(hosts=2, switch="nft", port=port)):
                    texts.append("built")
            except LabError as error:
                texts.append(str(error))
        return texts

    assert all("--switch uml" in text for text in in_sandbox(tmp_path, main))


@pytest.mark.parametrize("kind", KINDS)
def test_a_senders_local_address_decides_the_rail(tmp_path, kind):
    """Also where the receiver has only told one address: a gray rail then loses what takes it, and nothing else."""

    def main():
        with Network(Layout(hosts=2, rails=2, switch=kind)) as network:
            network.set([1], [1], loss=1.0)
            shares = [sum(Probe(network, local, remote).arrived(100)) for local in (0, 1) for remote in (0, 1)]
            rows = {(row["host"], row["rail"]): row for row in network.statistics()}
            return [shares, rows[1, 0]["lost"], rows[1, 1]["lost"], rows[1, 0]["rx_packets"]]

    assert in_sandbox(tmp_path, main) == [[100, 100, 0, 0], 0, 200, 200]


@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[2:]])  # `soft` refuses
def test_a_larger_mtu_carries_larger_packets(tmp_path, kind):
    def main():
        with Network(Layout(hosts=2, switch=kind, mtu_bytes=4000)) as network:
            probe = Probe(network)
            probe.outbox.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO: never in parts
            arrived = sum(probe.arrived(10, payload=3900))
            try:
                probe.outbox.sendto(bytes(3980), probe.to)
            except OSError as error:
                return [arrived, error.strerror]

    assert in_sandbox(tmp_path, main) == [10, "Message too long"]


def test_signals_reach_every_process_of_a_host_and_no_other(tmp_path):
    def main():
        with Network(Layout(hosts=2, switch="nft")) as network:
            nested = network.spawn(0, ["sh", "-c", "sleep 600 & wait"], start_new_session=True)
            other = network.spawn(1, ["sleep", "600"])
            while network.signal(0, 0) < 2:
                assert nested.poll() is None
            stopped = network.signal(0, signal.SIGSTOP)
            network.signal(0, signal.SIGCONT)
            killed = network.signal(0, signal.SIGKILL)
            return [stopped, killed, nested.wait(10), other.poll()]

    assert in_sandbox(tmp_path, main) == [2, 2, -9, None]


FORKING = """
import os, signal
for _ in range(300):  # they are looked up first, as they have the lower numbers, and meanwhile the last one goes on
    if os.fork() == 0:
        signal.pause()
if os.fork() == 0:
    print("up", flush=True)
    for _ in range(5000):
        if os.fork() == 0:
            signal.pause()
signal.pause()
"""


def test_a_host_is_killed_although_its_programs_start_others_all_the_time(tmp_path):
    def main():
        with Network(Layout(hosts=1, switch="nft")) as network:
            child = network.spawn(0, [sys.executable, "-c", FORKING], stdout=subprocess.PIPE)
            assert child.stdout.readline() == b"up\n"
            killed = network.signal(0, signal.SIGKILL)
            end = time.monotonic() + 30
            while network.signal(0, 0) and time.monotonic() < end:  # who is killed ends when it runs next
                os.sched_yield()
            return [killed, network.signal(0, 0)]

    killed, left = in_sandbox(tmp_path, main)
    assert (killed > 300, left) == (True, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": 0},
        {"hosts": 99},
        {"rails": 0},
        {"mtu_bytes": 100},
        {"mtu_bytes": 9000, "switch": "soft"},
        {"mtu_bytes": 9000, "port": Port(buffer_bytes=9013)},
        {"switch": "soft", "port": Port(bucket_bytes=1 << 16)},
        {"switch": "nft", "port": Port(delay_ms=1.0)},
    ],
)
def test_an_impossible_layout_is_refused(wrong):
    with pytest.raises(WrongRequest):
        Layout(**wrong)


@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[2:]])
def test_a_bucket_lets_packets_through_at_once_that_a_full_buffer_would_lose(tmp_path, kind):
    """Sixty packets come to a port of 1 Mbit/s that holds eight."""

    def main():
        found = []
        for bucket in (BUCKET_BYTES, 128 * 1024):
            port = Port(rate_mbit=1, buffer_bytes=12_000, bucket_bytes=bucket)
            with Network(Layout(hosts=2, port=port, switch=kind, host_rate_mbit=1000)) as network:
                found.append(sum(Probe(network).arrived(60, payload=1400)))
        return found

    few, all_of_them = in_sandbox(tmp_path, main)
    assert few < 30
    assert all_of_them == 60


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": 1.5},
        {"loss": float("nan")},
        {"burst": 0.5},
        {"burst": 4.0, "loss": 0.81},
        {"rate_mbit": 0},
        {"buffer_bytes": 9},
        {"bucket_bytes": 1514},
        {"bucket_bytes": 1 << 32},
        {"buffer_bytes": 1 << 32},
        {"rate_mbit": 100_000, "delay_ms": 10_000},
    ],
)
def test_an_impossible_port_is_refused(wrong):
    with pytest.raises(WrongRequest):
        Port(**wrong)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_the_small_program_says_that_it_has_no_bucket(tmp_path):
    def main():
        try:
            Network(Layout(hosts=1, port=Port(bucket_bytes=1 << 16), switch="soft")).close()
        except LabError as error:
            return str(error)

    assert "no token bucket: its kind must be uml" in in_sandbox(tmp_path, main)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_the_small_program_refuses_a_link_of_which_it_cannot_hold_what_is_under_way(tmp_path):
    """24.8 MB, buffer and delay together."""

    def main():
        with Network(Layout(hosts=1, switch="soft", port=Port(rate_mbit=10_000, delay_ms=19))) as network:
            try:
                network.set([0], [], delay_ms=20.0)
            except LabError as error:
                return [str(error), network.ports()[0, 0].delay_ms]

    text, delay_ms = in_sandbox(tmp_path, main)
    assert "holds 16384 packets for each port, and buffer and delay at this rate are 16686" in text
    assert delay_ms == 19


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_each_small_program_loses_packets_of_its_own_choice(tmp_path):
    def main():
        with Network(Layout(hosts=2, rails=2, switch="soft", port=Port(loss=0.2))) as network:
            return [Probe(network, rail, rail).arrived(400).hex() for rail in (0, 1)]

    one, other = in_sandbox(tmp_path, main)
    assert one != other


def test_a_host_that_is_not_there_is_named(tmp_path):
    def main():
        with Network(Layout(hosts=2, switch="nft")) as network:
            try:
                network.set([7], [], loss=0.1)
            except LabError as error:
                return str(error)

    assert in_sandbox(tmp_path, main) == "there is no host 7: they are 0 to 1"


def test_auto_takes_what_can_do_everything(monkeypatch):
    monkeypatch.setattr(switches.netem, "available", lambda: False)
    monkeypatch.setattr(switches.shutil, "which", {}.get)
    assert switches.choose("auto") == "nft"
    monkeypatch.setattr(switches.shutil, "which", lambda name: name if name == "cc" else None)
    assert switches.choose("auto") == "soft"
    assert switches.choose("auto", 9000) == "nft", "soft would cut what is longer than 1500 bytes"
    monkeypatch.setattr(switches.shutil, "which", lambda name: name)
    assert switches.choose("auto") == "uml"
    monkeypatch.setattr(switches.netem, "available", lambda: True)
    assert switches.choose("auto") == "netem"
    with pytest.raises(LabError, match="not magic"):
        switches.choose("magic")


def test_programs_that_do_not_listen_end_with_the_network_and_those_that_have_ended_are_forgotten(tmp_path):
    def main():
        with Network(Layout(hosts=1, switch="nft")) as network:
            for _ in range(3):
                network.spawn(0, ["true"]).wait()
            deaf = [network.spawn(0, ["sh", "-c", "trap '' TERM; echo up; sleep 600 & wait; wait"], stdout=subprocess.PIPE)
                    for _ in range(2)]  # fmt: skip
            assert all(child.stdout.readline() == b"up\n" for child in deaf)
            held = len(network._namespaces._children)
        return [held, [child.returncode for child in deaf]]

    assert in_sandbox(tmp_path, main) == [2, [-signal.SIGKILL] * 2]


def test_what_runs_on_a_host_ends_with_the_network(tmp_path):
    def main():
        with Network(Layout(hosts=1, switch="nft")) as network:
            child = network.spawn(0, ["sleep", "600"], stdout=subprocess.DEVNULL)
        return child.returncode

    assert in_sandbox(tmp_path, main) == -signal.SIGTERM
