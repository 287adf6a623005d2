"""A slow rank is named in one warning with the cause: computation, the network, a receiver that takes nothing."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from gradwire.lab import iproute
from gradwire.lab.network import Layout, Network
from gradwire.lab.switches import Port
from launch import Outcome, in_lab
from observed import Job

WARNING = re.compile(r"WARNING straggler: rank (\d) \((\w+)\), seen by rank (\d)")


def warnings(job: Job, rank: int) -> list[tuple[str, ...]]:
    return WARNING.findall(job.output(rank))


def computes_longer(job: Job, rank: int) -> list[tuple[str, ...]]:
    """What a rank has warned of the slow one. A busy machine may hold up another one as well, which is then named too."""
    return [told for told in warnings(job, rank) if told[:2] == ("2", "compute")]


# test of: report/straggler
def test_a_rank_that_computes_longer_is_named_once_and_by_one_rank(tmp_path: Path) -> None:
    with Job(tmp_path, 3, slow=(2, 1.0), GRADWIRE_STRAGGLER_WARNING_S="4") as job:
        job.wait_for(lambda: computes_longer(job, 0), "the warning of the next rank")
        job.wait_for(lambda: "INFO straggler: rank 2 (compute)" in job.output(1), "the same at another rank")
    job.require_clean_exit()
    assert computes_longer(job, 0) == [("2", "compute", "0")], job.transcript()
    assert computes_longer(job, 1) == [], "others only say it to those who ask"
    assert warnings(job, 2) == [], "the slow rank waits for nobody"


def test_a_rank_that_is_stopped_in_a_collective_takes_nothing(tmp_path: Path) -> None:
    # It may have taken everything before it was stopped: then two heartbeats, a second each, have to be missing.
    with Job(tmp_path, 3, GRADWIRE_STRAGGLER_WARNING_S="4", GRADWIRE_PEER_TIMEOUT_S="300") as job:
        job.until_it_reduces()
        job.processes[1].send_signal(signal.SIGSTOP)
        job.wait_for(lambda: warnings(job, 0) and warnings(job, 2), "the warning")
        job.processes[1].send_signal(signal.SIGCONT)
    job.require_clean_exit()
    for rank in (0, 2):
        told = warnings(job, rank)
        assert told[0] == ("1", "receiver", str(rank)), job.transcript()
        assert len(told) == 1, job.transcript()
    assert warnings(job, 1) == [], "it stood still itself: " + job.transcript()
    assert "WARNING this process stood still for" in job.output(1), job.transcript()


def test_without_the_setting_nobody_is_named_and_every_collective_is_counted(tmp_path: Path) -> None:
    with Job(tmp_path, 2, slow=(1, 0.2), GRADWIRE_STRAGGLER_WARNING_S="0") as job:
        job.until_it_reduces()
    job.require_clean_exit()
    for rank in range(2):
        counted = re.search(r"counted (\d+) of (\d+)", job.output(rank))
        assert counted is not None
        assert counted[1] == counted[2], job.transcript()
        assert "straggler:" not in job.output(rank)


SLOW_MBIT = 6


def test_each_direction_of_a_slow_link_is_told_once(tmp_path: Path) -> None:
    def shape_uplink(network: Network, host: int, rate_mbit: float) -> None:
        with network.on_host(host):
            iproute.tc(f"qdisc change dev eth0 root handle 1: tbf rate {rate_mbit}mbit burst 6056 limit 1500000")

    def main() -> Outcome:
        settings = {"GRADWIRE_STRAGGLER_WARNING_S": "3"}
        with Network(Layout(hosts=3, port=Port(rate_mbit=100), switch="nft")) as network:
            shape_uplink(network, 2, SLOW_MBIT)
            where = f"{network.address(0)}:29400"
            with Job(tmp_path, 3, elems=500_000, spawn=network.spawn, rendezvous=where, **settings) as job:
                for rank in (0, 1):
                    job.wait_for(lambda rank=rank: ("2", "network", str(rank)) in warnings(job, rank), "late bytes")
                shape_uplink(network, 2, 100)
                network.set([2], [0], rate_mbit=SLOW_MBIT)
                for rank in (0, 1):
                    job.wait_for(
                        lambda rank=rank: ("2", "receiver", str(rank)) in warnings(job, rank), "a slow receiver"
                    )
            job.require_clean_exit()
            for rank in (0, 1):
                about = [(late, cause) for late, cause, _ in warnings(job, rank) if late == "2"]
                # A slow way out delays what confirms the way in as well, so that one can be named with the other, before or after it.
                assert sorted(about) == [("2", "network"), ("2", "receiver")], job.transcript()
            return Outcome([0] * 3, [], [])

    in_lab(tmp_path, main)
