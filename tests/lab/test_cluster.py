"""The cluster's links do what they were set to do; counted at the receivers."""

import select
import socket
import subprocess
import time

import pytest
from gradwire.lab import Cluster, LabError, Link
from gradwire.lab.loss_filter import MODULUS, LossFilter
from gradwire.lab.probe import LossProbe, probe_loss
from sandboxed import (
    check_a_loss_that_is_no_probability_is_refused,
    check_losses_are_as_set_and_of_single_packets,
    in_sandbox,
    until_below,
)


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.2])
def test_losses_are_as_set_and_of_single_packets(tmp_path, loss):
    check_losses_are_as_set_and_of_single_packets(tmp_path, Cluster, loss)


def test_setting_the_loss_again_replaces_it_and_zeroes_the_counters(tmp_path):
    def main():
        with Cluster(2, loss=1.0) as cluster:
            everything = probe_loss(cluster, packets=400).lost
            cluster.set_loss(0)
            counters = cluster.loss_counters()
            return [everything, counters.seen, probe_loss(cluster, packets=400).lost]

    assert in_sandbox(tmp_path, main) == [400, 0, 0]


def test_a_link_carries_its_rate_and_not_more(tmp_path):
    rate_mbit, sent = 40.0, 5_000_000

    def transfer(cluster):
        with cluster.on_host(1):
            inbox = socket.create_server((cluster.address(1), 0))
        with cluster.on_host(0):
            outbox = socket.create_connection(inbox.getsockname())
        connection, _ = inbox.accept()
        with inbox, outbox, connection:
            child = cluster.spawn(1, ["python3", "-c", RECEIVE, str(connection.fileno())], pass_fds=[connection.fileno()],
                                  stdout=subprocess.PIPE)  # fmt: skip
            assert child.stdout.readline() == b"ready\n"
            started = time.monotonic()  # which is the same clock in all processes
            outbox.sendall(bytes(sent))
            outbox.shutdown(socket.SHUT_WR)
            received, ended = child.stdout.readline().split()
        assert int(received) == sent
        return float(ended) - started

    def main():
        with Cluster(2, Link(rate_mbit=rate_mbit)) as cluster:
            return until_below(2 * sent * 8e-6 / rate_mbit, lambda: transfer(cluster))

    seconds = in_sandbox(tmp_path, main)
    # Headers take 66 of 1514 bytes, so 38.3 is the most. The floor leaves room for a machine that is busy with other things.
    assert 0.5 * rate_mbit < sent * 8e-6 / min(seconds) < 0.96 * rate_mbit, seconds


RECEIVE = """
import socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
print("ready", flush=True)
total = 0
while data := connection.recv(1 << 16):
    total += len(data)
print(total, time.monotonic(), flush=True)
"""


def test_two_senders_overflow_a_small_buffer_of_the_port_they_share(tmp_path):
    """Without this, senders that are far too fast would look harmless."""
    packets, payload = 300, bytes(1400)

    def main():
        with Cluster(3, Link(rate_mbit=10, buffer_bytes=30_000)) as cluster:
            with cluster.on_host(2):
                inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            inbox.bind((cluster.address(2), 0))
            outboxes = []
            for host in (0, 1):
                with cluster.on_host(host):
                    outboxes.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            received = 0
            for _ in range(packets):
                for outbox in outboxes:
                    outbox.sendto(payload, inbox.getsockname())
                received += drain(inbox, 0)
            return received + drain(inbox, 1)

    # Both deliver 10 Mbit/s to a port that passes on 10: about half is lost, less what the buffer holds in the end.
    assert 0.4 < in_sandbox(tmp_path, main) / (2 * packets) < 0.75


def test_one_sender_overflows_a_buffer_that_has_more_room_than_its_socket(tmp_path):
    """What waits in the switch would hold it back, were it still charged to it."""
    packets, buffer_bytes = 400, 150 * 1442

    def main():
        with Cluster(2, Link(rate_mbit=2, buffer_bytes=buffer_bytes, host_rate_mbit=200)) as cluster:
            with cluster.on_host(1):
                inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            with cluster.on_host(0):
                outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            inbox.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE
            inbox.bind((cluster.address(1), 0))
            for _ in range(packets):
                outbox.sendto(bytes(1400), inbox.getsockname())
            return [outbox.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), drain(inbox, 1)]

    room, arrived = in_sandbox(tmp_path, main)
    assert room < buffer_bytes
    assert buffer_bytes // 1442 <= arrived < packets


def drain(inbox, wait_s):
    received = 0
    while select.select([inbox], [], [], wait_s)[0]:
        inbox.recv(2048)
        received += 1
    return received


def test_the_congestion_control_of_new_connections_is_as_set(tmp_path):
    def main():
        with Cluster(2) as cluster:
            cluster.set_congestion_control("reno")
            with cluster.on_host(1):
                inbox = socket.create_server((cluster.address(1), 0))
            with cluster.on_host(0):
                outbox = socket.create_connection(inbox.getsockname())
            return outbox.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()

    assert in_sandbox(tmp_path, main) == "reno"


def test_an_unknown_congestion_control_is_refused_by_name(tmp_path):
    def main():
        with Cluster(2) as cluster:
            try:
                cluster.set_congestion_control("imaginary")
            except LabError as error:
                return str(error)

    assert "congestion" in in_sandbox(tmp_path, main)


def test_programs_on_a_host_end_with_the_cluster(tmp_path):
    def main():
        with Cluster(2) as cluster:
            child = cluster.spawn(0, ["sleep", "600"])
        return child.returncode

    assert in_sandbox(tmp_path, main) == -15


def test_counters_before_the_first_setting_are_zero(tmp_path):
    def main():
        counters = LossFilter().counters()
        return [counters.seen, counters.dropped]

    assert in_sandbox(tmp_path, main) == [0, 0]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_loss_that_is_no_probability_is_refused(tmp_path, share):
    check_a_loss_that_is_no_probability_is_refused(tmp_path, Cluster, share)


@pytest.mark.parametrize("values", [{"rate_mbit": 0}, {"buffer_bytes": 100}, {"delay_ms": -1}])
def test_an_impossible_link_is_refused(values):
    with pytest.raises(LabError, match="a link needs"):
        Link(**values)


class TestAgreement:
    """The probe's verdict must be able to fail."""

    def test_single_losses_near_the_rate_agree(self):
        assert LossProbe(8000, 80, 2).agrees_with(0.01)

    def test_no_loss_agrees_with_zero_and_any_loss_does_not(self):
        assert LossProbe(8000, 0, 0).agrees_with(0.0)
        assert not LossProbe(8000, 1, 1).agrees_with(0.0)

    def test_too_few_or_too_many_losses_disagree(self):
        assert not LossProbe(8000, 20, 1).agrees_with(0.01)
        assert not LossProbe(8000, 200, 2).agrees_with(0.01)

    def test_the_right_number_in_one_piece_disagrees(self):
        assert not LossProbe(8000, 80, 40).agrees_with(0.01)


def test_the_filter_can_lose_one_in_a_million():
    assert round(1e-6 * MODULUS) == 1
