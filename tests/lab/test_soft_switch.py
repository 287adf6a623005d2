"""The switch that is a program: its links do what they were set to do, as seen from the hosts."""

import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
from gradwire.lab import LabError, Link, soft_switch
from gradwire.lab.probe import probe_loss, probe_round_trip_ms
from gradwire.lab.soft_cluster import SoftCluster
from gradwire.lab.soft_switch import SoftSwitch
from sandboxed import (
    check_a_loss_that_is_no_probability_is_refused,
    check_losses_are_as_set_and_of_single_packets,
    in_sandbox,
    until_below,
)

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.2])
def test_losses_are_as_set_and_of_single_packets(tmp_path, loss):
    check_losses_are_as_set_and_of_single_packets(tmp_path, SoftCluster, loss)


def test_what_a_switch_that_stands_still_passes_on_late_is_not_lost(tmp_path):
    def main():
        with SoftCluster(2) as cluster:
            counted, process = cluster.loss_counters, cluster._switch._process
            go_on = threading.Timer(2.5, process.send_signal, [signal.SIGCONT])

            def counted_and_stopped():
                """The probe asks before it sends."""
                found = counted()
                if go_on.ident is None:
                    process.send_signal(signal.SIGSTOP)
                    go_on.start()
                return found

            cluster.loss_counters = counted_and_stopped
            return probe_loss(cluster, packets=100).lost

    assert in_sandbox(tmp_path, main) == 0


def test_the_round_trip_is_as_set_and_changes_with_the_link(tmp_path):
    def main():
        with SoftCluster(2, Link(delay_ms=2.0)) as cluster:
            near = until_below(20.0, lambda: probe_round_trip_ms(cluster))
            cluster.set_link(Link(delay_ms=20.0))
            return [near, until_below(60.0, lambda: probe_round_trip_ms(cluster, times=10))]

    near, far = in_sandbox(tmp_path, main)
    # Medians; a busy machine makes them longer, and nothing makes them shorter.
    assert 4.0 <= min(near) < 20.0, near
    assert 40.0 <= min(far) < 60.0, far


def send_at_once(cluster, packets: int, payload: int, dropped: Callable[[], int] = lambda: 0) -> tuple[int, float]:
    """Sends packets without a pause; returns how many arrive, and how long after the first was sent the last one does.

    It is over once all have come but those that the switch has dropped, which is known when the last one comes: a buffer that
    drops one still holds others. Else what has not come after five quiet seconds does not come any more.
    """
    with cluster.on_host(1):
        inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with cluster.on_host(0):
        outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inbox, outbox:
        inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        inbox.bind((cluster.address(1), 0))
        began = last = time.monotonic()
        for _ in range(packets):
            outbox.sendto(bytes(payload), inbox.getsockname())
        arrived = 0
        while arrived < packets - dropped() and select.select([inbox], [], [], 5.0)[0]:
            inbox.recv(2048)
            last = time.monotonic()
            arrived += 1
        return arrived, last - began


def test_a_burst_leaves_at_the_rate_of_the_link(tmp_path):
    def main():
        with SoftCluster(2, Link(rate_mbit=10.0, buffer_bytes=1 << 20, host_rate_mbit=1000.0)) as cluster:
            bursts = []

            def burst() -> float:
                """Of 1250 bytes on the wire for each packet: 1 ms each."""
                bursts.append(send_at_once(cluster, packets=100, payload=1208))
                return bursts[-1][1]

            until_below(0.15, burst)
            return bursts

    bursts = in_sandbox(tmp_path, main)
    assert {arrived for arrived, _ in bursts} == {100}
    # Late wake-ups can only lengthen it.
    assert 0.1 <= min(seconds for _, seconds in bursts) < 0.15, bursts


def test_a_burst_beyond_the_buffer_is_dropped(tmp_path):
    def main():
        link = Link(rate_mbit=1.0, buffer_bytes=12_500, host_rate_mbit=1000.0)
        with SoftCluster(2, link) as cluster:
            bursts = []
            for _ in range(5):
                before = cluster.port_counters().overflowed

                def dropped(before=before) -> int:
                    return cluster.port_counters().overflowed - before

                bursts.append(send_at_once(cluster, packets=50, payload=1208, dropped=dropped)[0])
            counters = cluster.port_counters()
            return [bursts, counters.seen, counters.lost, counters.overflowed]

    arrived, seen, lost, overflowed = in_sandbox(tmp_path, main)
    assert (seen, lost, sum(arrived) + overflowed) == (250, 0, 250)
    # Ten wait, and while the burst arrives the first ones leave: on a busy machine it takes its time to arrive.
    assert 10 <= min(arrived) <= 14, arrived


def test_a_switch_without_its_ports_says_so(tmp_path):
    def main():
        try:
            SoftSwitch(["no-such-port"])
        except LabError as error:
            return str(error)

    assert "no-such-port" in in_sandbox(tmp_path, main)


def test_a_switch_that_does_not_answer_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(soft_switch, "ANSWER_SECONDS", 0.5)

    def main():
        with SoftCluster(2) as cluster:
            cluster._switch._process.send_signal(signal.SIGSTOP)
            try:
                cluster.set_loss(0.5)
            except LabError as error:
                return str(error)

    assert in_sandbox(tmp_path, main) == "the switch has not answered for 0.5 s"


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_loss_that_is_no_probability_is_refused(tmp_path, share):
    check_a_loss_that_is_no_probability_is_refused(tmp_path, SoftCluster, share)
