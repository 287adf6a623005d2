"""What the tests of the doctor in networks share: one doctor for each rank, and what they say."""

import json
import os
import socket
import subprocess
import sys

import pytest

GOOD = {"gso": True, "gro": True, "traffic_class": True, "receive_buffer_bytes": 32 << 20, "send_buffer_bytes": 8 << 20,
        "datagram_bytes": 1472, "addresses": ["10.0.0.1"], "ipv6": False, "loopback": True, "boot_id": "a",
        "network_namespace": 1}  # fmt: skip
DOCTOR = [sys.executable, "-c", "from gradwire.cli import main; main()", "doctor", "--json"]


def has_ipv6():
    """Whether this kernel has it, and its loopback address."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as found:
            found.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


def without_a_job():
    """This environment without what a job, or a test before, has set."""
    others = ("GRADWIRE_", "RANK", "WORLD_SIZE", "LOCAL")
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}


def start_doctor(network, host, arguments, environment, prefix=()):
    """On a host of a network, or of namespaces."""
    pipe, command = subprocess.PIPE, [*prefix, *DOCTOR, *arguments]
    return network.spawn(host, command, env={**without_a_job(), **environment}, stdout=pipe, stderr=pipe, text=True)


def arguments_of(rank, ranks, folder, packets=500):
    return [
        "--rank",
        str(rank),
        "--world-size",
        str(ranks),
        "--packets",
        str(packets),
        "--store",
        f"file://{folder}/meeting",
    ]


def report_of(children, timeout_s=300):
    """The report of rank 0 and everybody's status."""
    outputs = [child.communicate(timeout=timeout_s) for child in children]
    statuses, errors = [child.returncode for child in children], [error for _, error in outputs]
    report = json.loads(outputs[0][0]) if outputs[0][0] else {"errors": errors}
    return {**report, "statuses": statuses}


def run_doctors(network, folder, environment, *, packets=500, prefix=(), more=(), hosts=None):
    """One for each host, or for each of these in their order; the report of rank 0 and everybody's status."""
    hosts = list(range(network.layout.hosts)) if hosts is None else hosts
    children = [
        start_doctor(
            network, host, [*arguments_of(rank, len(hosts), folder, packets), *more],
            {**({"LOCAL_RANK": str(hosts[:rank].count(host))} if hosts.count(host) > 1 else {}), **environment}, prefix,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    return report_of(children)


def told(report, *levels):
    """What was found at these levels: (check, rank, peer). Not what this machine gives all its namespaces alike."""
    found = [f for f in report["findings"] if f["level"] in levels]
    own = [f for f in found if f["check"] != "processor" and "between cards and sockets" not in f["text"]]
    return {(f["check"], f["rank"], f["peer"]) for f in own}


def lost_on_rails(pair):
    """Of each rail its address, small packets sent and lost, and the same of full ones."""
    return [(rail["source"], rail["sent"], rail["lost"], rail["large"]) for rail in pair["rails"]]


def texts(report, check):
    return [f"{f['text']} / {f['fix']}" for f in report["findings"] if f["check"] == check]
