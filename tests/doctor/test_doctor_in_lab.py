"""`gradwire doctor` between two hosts with faults made on purpose: each is found, named and told from its like."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from doctors import DOCTOR, lost_on_rails, run_doctors, texts, told
from gradwire.lab import iproute
from gradwire.lab.network import Layout, Network
from gradwire.lab.switches import Port
from gradwire.lab.uml_switch import PROGRAM
from sandboxed import in_sandbox

PORT = 47400
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="the program nft is not installed")


def on_host(network, host, ruleset):
    """Loads nftables rules of one chain on a host, for what comes to it."""
    table = f"table ip faults {{\n chain c {{\n type filter hook prerouting priority -150;\n {ruleset}\n}}\n}}\n"
    with network.on_host(host):
        subprocess.run(["nft", "-f", "-"], input=table, text=True, check=True)


def nothing(_network):
    """No fault."""


def diagnose(tmp_path, *, fault=nothing, port=None, switch="nft", environment=None, hosts=2, **options):
    """Builds the hosts, makes the fault and runs the doctors."""

    def main():
        layout = Layout(hosts=hosts, switch=switch, port=port or Port(), rails=options.pop("rails", 1),
                        host_rate_mbit=options.pop("host_rate_mbit", None))  # fmt: skip
        with Network(layout) as network:
            fault(network)
            return run_doctors(network, tmp_path, environment or {}, **options)

    return in_sandbox(tmp_path, main)


def test_a_healthy_network_passes(tmp_path):
    report = diagnose(tmp_path, packets=2000)
    assert report["statuses"] == [0, 0], report
    assert told(report, "problem", "warning") == set()
    assert not report["training_would_suffer"]
    for pair in report["pairs"]:
        assert (pair["ip_bytes"], pair["lost"], pair["reordered"], pair["paths"], pair["sent"]) == (1500, 0, 0, 1, 2000)
        assert 0 < pair["rtt_ms"][0] <= pair["rtt_ms"][1]
        assert abs(pair["offset_s"]) < 0.1
    hosts = report["hosts"]
    assert [host["port"] for host in hosts] == [PORT, PORT]
    assert all(host["features"]["gso"] and host["features"]["gro"] for host in hosts)
    (used,) = [i for i in hosts[1]["interfaces"] if i["used"]]
    assert (used["name"], used["address"], used["mtu"]) == ("eth0", "10.77.0.2", 1500)
    assert used["card"]["speed_mbit"] is None, "a veth has no wire"
    assert all(host["counters_after"]["cards"]["eth0"]["received"] > 2000 for host in hosts)
    assert all(host["processor"]["cores"] == len(os.sched_getaffinity(0)) for host in hosts)


NARROW = """
import socket, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as narrow, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.bind(("127.0.0.1", 0))
    while True:
        sender.sendto(bytes(1000), narrow.getsockname())
        time.sleep(0.01)  # how much it sends, and no wait for anything: a hundred packets a second are enough
"""


def test_what_a_host_drops_itself_is_told_with_where(tmp_path):
    def drop(network):
        """A program of host 1 does not read what comes to it; the sandbox ends it."""
        network.spawn(1, [sys.executable, "-c", NARROW], env=dict(os.environ))

    report = diagnose(tmp_path, fault=drop)
    assert report["statuses"] == [0, 0]
    assert told(report, "problem", "warning") == {("drops", 1, None)}
    (text,) = [text for text in texts(report, "drops") if "socket" in text and "between cards" not in text]
    assert "found the buffer of their socket full during the check / sysctl -w net.core.rmem_max" in text


def test_a_port_that_has_fallen_back_to_a_lower_rate_is_told(tmp_path):
    def slow_down(network):
        network.set([1], [], rate_mbit=10.0)

    report = diagnose(tmp_path, fault=slow_down)
    assert report["statuses"] == [0, 0]
    assert told(report, "problem", "warning") == {("rate", 0, 1)}
    rates = {(pair["rank"], pair["peer"]): pair["rate_mbit"] for pair in report["pairs"]}
    assert 8 < rates[0, 1] < 13  # four packets of a burst leave at once
    assert 80 < rates[1, 0] < 130


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_round_trip_is_that_of_the_links(tmp_path):
    for number in range(5):  # a busy machine makes them longer, but not each of them
        folder = tmp_path / str(number)
        folder.mkdir()
        report = diagnose(folder, switch="soft", port=Port(delay_ms=3.0))
        assert report["statuses"] == [0, 0]
        least = [pair["rtt_ms"][0] for pair in report["pairs"]]
        assert all(rtt_ms >= 6.0 for rtt_ms in least)
        if max(least) < 12.0:
            break
    assert max(least) < 12.0


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("delay_ms", [26.0, 130.0])
def test_a_long_way_is_noted_and_measured_like_any_other(tmp_path, delay_ms):
    """Also one that is longer than an answer is waited for at first."""
    report = diagnose(
        tmp_path, switch="soft", port=Port(delay_ms=delay_ms), packets=200,
        environment={"GRADWIRE_NETWORK_THREADS": "2"},
    )  # fmt: skip
    assert report["statuses"] == [0, 0]
    assert {("rtt", 0, 1), ("rtt", 1, 0)} <= told(report, "note")
    assert not told(report, "problem", "warning")
    for pair in report["pairs"]:
        assert (pair["ip_bytes"], pair["lost"], pair["paths"], pair["threads"]) == (1500, 0, 1, [True])
        assert all(sent == came for sent, came in pair["marks"])


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")
def test_packets_that_overtake_each_other_are_noted_and_not_taken_for_lost(tmp_path):
    def shuffle(network):
        """Every fifth packet to host 1 does not wait as the others do."""
        network._switches[0]._switch.run(
            "tc qdisc replace dev vec1 parent 1: handle 2: netem limit 1000 delay 4ms reorder 20%"
        )

    report = diagnose(tmp_path, switch="uml", fault=shuffle)
    assert {f[1:] for f in told(report, "note") if f[0] == "reordering"} == {(0, 1)}
    assert [(pair["reordered"] > 0, pair["lost"]) for pair in report["pairs"]] == [(True, 0), (False, 0)]


def test_loss_is_found_in_the_direction_that_has_it(tmp_path):
    report = diagnose(tmp_path, fault=lambda network: network.set([1], [], loss=0.04), packets=2000)
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {("loss", 0, 1)}
    (pair,) = [pair for pair in report["pairs"] if pair["rank"] == 0]
    assert 40 < pair["lost"] < 130
    assert pair["ip_bytes"] == 1500


def test_of_three_ranks_each_asks_both_others_in_turns(tmp_path):
    """Rank r asks r + 1 and then r + 2; the link of host 2 is bad, and both who ask it say so."""
    report = diagnose(tmp_path, hosts=3, fault=lambda network: network.set([2], [], loss=0.1), packets=1000)
    assert [(pair["rank"], pair["peer"]) for pair in report["pairs"]] == [
        (0, 1),
        (0, 2),
        (1, 2),
        (1, 0),
        (2, 0),
        (2, 1),
    ]
    assert told(report, "problem") == {("loss", 0, 2), ("loss", 1, 2)}
    assert report["statuses"] == [1, 1, 1]
    assert len(report["hosts"]) == 3


def test_loss_below_the_bound_is_a_warning(tmp_path):
    report = diagnose(
        tmp_path, fault=lambda network: network.set([1], [], loss=0.04), packets=2000, more=("--loss-max", "10")
    )
    assert report["statuses"] == [0, 0]
    assert ("loss", 0, 1) in told(report, "warning")


@needs_nft
def test_an_mtu_black_hole_is_found_with_the_size_that_passes(tmp_path):
    report = diagnose(tmp_path, fault=lambda network: on_host(network, 1, "ip length > 1402 drop"))
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {("mtu", 0, 1)}
    sizes = {pair["rank"]: pair["ip_bytes"] for pair in report["pairs"]}
    assert sizes == {0: 1402, 1: 1500}
    assert "GRADWIRE_MTU=1402" in texts(report, "mtu")[0]


@needs_nft
@pytest.mark.parametrize(("preset", "level"), [("mlt", "problem"), ("auto", "note")])
def test_bleached_code_points_matter_to_a_job_that_sets_them(tmp_path, preset, level):
    report = diagnose(
        tmp_path,
        fault=lambda network: on_host(network, 1, "udp dport 1-65535 ip dscp set cs0"),
        environment={"GRADWIRE_PRESET": preset},
    )
    assert told(report, level) & {("dscp", 0, 1), ("dscp", 1, 0)} == {("dscp", 0, 1)}
    assert report["statuses"] == [int(preset == "mlt")] * 2
    assert "DSCP 10, 18, 26, 34, 40 arrives as 0" in texts(report, "dscp")[0]
    assert not texts(report, "ecn")


@needs_nft
def test_a_cleared_ecn_field_is_told_from_bleached_code_points(tmp_path):
    report = diagnose(
        tmp_path,
        fault=lambda network: on_host(network, 1, "ip ecn set not-ect"),
        environment={"GRADWIRE_PRESET": "mlt"},
    )
    assert told(report, "problem") == {("ecn", 0, 1)}
    assert report["statuses"] == [1, 1]


@needs_nft
def test_a_filter_that_drops_code_points_is_found(tmp_path):
    report = diagnose(
        tmp_path, fault=lambda network: on_host(network, 1, "ip dscp cs5 drop"), environment={"GRADWIRE_PRESET": "mlt"}
    )
    assert told(report, "problem") == {("dscp", 0, 1)}
    assert "nothing with DSCP 40 arrives" in texts(report, "dscp")[0]


@needs_nft
def test_a_blocked_port_is_found_from_both_sides(tmp_path):
    report = diagnose(tmp_path, fault=lambda network: on_host(network, 1, f"udp dport {PORT} drop"))
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {("reachability", 0, 1), ("reachability", 1, 0)}
    there, back = texts(report, "reachability")
    assert f"nothing arrives at UDP port {PORT} of 10.77.0.2" in there
    assert f"no answer comes back to UDP port {PORT} here" in back
    assert "rank 1's host" in there
    assert "rank 1's host" in back


def test_all_ports_of_network_threads_are_asked(tmp_path):
    report = diagnose(tmp_path, environment={"GRADWIRE_NETWORK_THREADS": "3"})
    assert report["statuses"] == [0, 0]
    assert told(report, "problem", "warning") == set()
    assert [host["threads"]["ports"] for host in report["hosts"]] == [[PORT, PORT + 64, PORT + 128]] * 2
    assert [pair["threads"] for pair in report["pairs"]] == [[True, True]] * 2


@needs_nft
def test_a_blocked_port_of_a_further_thread_is_found_from_both_sides(tmp_path):
    report = diagnose(
        tmp_path,
        fault=lambda network: on_host(network, 1, f"udp dport {PORT + 64} drop"),
        environment={"GRADWIRE_NETWORK_THREADS": "2"},
    )
    assert report["statuses"] == [0, 0], "training would be slower, and go on"
    assert told(report, "problem", "warning") == {("threads", 0, 1), ("threads", 1, 0)}
    there, back = texts(report, "threads")
    assert f"nothing arrives at UDP port {PORT + 64} of a further network thread" in there
    assert f"no answer comes back to UDP port {PORT + 64}" in back
    assert "rank 1's host" in there
    assert "rank 1's host" in back


def test_a_taken_port_of_a_further_thread_is_named(tmp_path):
    def take(network):
        with network.on_host(1):
            taken.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        taken[0].bind(("0.0.0.0", PORT + 64))

    taken = []
    report = diagnose(tmp_path, fault=take, environment={"GRADWIRE_NETWORK_THREADS": "2"})
    assert report["statuses"] == [0, 0]
    assert told(report, "problem", "warning") == {("threads", 1, None)}
    assert f"UDP port {PORT + 64} of further network threads cannot be had here" in texts(report, "threads")[0]
    assert [pair["threads"] for pair in report["pairs"]] == [[True], [True]]


def test_a_small_buffer_of_the_switch_is_found(tmp_path):
    report = diagnose(tmp_path, port=Port(rate_mbit=50, buffer_bytes=12_000), host_rate_mbit=2000.0)
    assert {("buffers", 0, 1), ("buffers", 1, 0)} <= told(report, "warning")
    assert not told(report, "problem")


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs setpriv and root")
def test_a_small_buffer_of_the_kernel_comes_with_the_line_that_fixes_it(tmp_path):
    """Without the right to force it, the kernel's limit counts."""
    limit = int(Path("/proc/sys/net/core/rmem_max").read_text())
    if limit >= 16 << 20:
        pytest.skip("this machine's limit is large enough")
    report = diagnose(tmp_path, prefix=("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"))
    assert {("buffers", 0, None), ("buffers", 1, None)} <= told(report, "warning", "problem")
    assert any("sysctl -w net.core.rmem_max=16777216" in text for text in texts(report, "buffers"))


def test_a_gray_rail_is_found_and_named(tmp_path):
    def fault(network):
        network.set([1], [1], loss=0.1)

    report = diagnose(tmp_path, rails=2, fault=fault, packets=1000, environment={"GRADWIRE_PATHS": "2"})
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {("paths", 0, 1)}
    assert "from 10.77.1.1" in texts(report, "paths")[0]
    assert all(pair["paths"] == 2 for pair in report["pairs"])


def test_a_rail_whose_switch_is_too_narrow_is_no_path_and_named_with_the_size_that_passes(tmp_path):
    def narrow(_network):
        iproute.ip("link set p1x0 mtu 1300", "link set p1x1 mtu 1300")

    report = diagnose(tmp_path, rails=2, fault=narrow, environment={"GRADWIRE_PATHS": "2"})
    assert report["statuses"] == [1, 1]
    assert told(report, "problem", "warning") == {("mtu", 0, 1), ("mtu", 1, 0)}
    sizes = [pair["rails"][0]["ip_bytes"] for pair in report["pairs"]]
    assert sizes == [1304, 1304], "a bridge leaves room for the four bytes of a VLAN's tag"
    there, back = texts(report, "mtu")
    assert "from 10.77.1.1 packets of 1500 bytes disappear on the way, 1304 arrive" in there
    assert "from 10.77.1.2" in back
    assert [pair["paths"] for pair in report["pairs"]] == [1, 1]


@needs_nft
def test_a_rail_that_loses_full_packets_alone_is_found_and_named(tmp_path):
    def damage(network):
        on_host(network, 1, 'iifname "eth1" ip length > 1000 numgen random mod 10 < 2 drop')

    report = diagnose(tmp_path, rails=2, fault=damage, packets=1000, environment={"GRADWIRE_PATHS": "2"})
    assert told(report, "problem") == {("paths", 0, 1)}
    assert "packets of full size lost" in texts(report, "paths")[0]
    [(source, _, lost, (_, large_lost))] = lost_on_rails(report["pairs"][0])
    assert (source, lost) == ("10.77.1.1", 0)
    assert large_lost > 0
    assert [pair["paths"] for pair in report["pairs"]] == [2, 2]


@needs_nft
@pytest.mark.parametrize(
    ("fault", "check", "text"),
    [
        ("ip dscp set cs0", "dscp", "from 10.77.1.1 DSCP 10, 18, 26, 34, 40 arrives as 0"),
        ("ip ecn set not-ect", "ecn", "from 10.77.1.1 the ECN field arrives cleared"),
        ("ip dscp cs5 drop", "dscp", "from 10.77.1.1 nothing with DSCP 40 arrives"),
    ],
)
def test_marks_that_a_rail_alone_loses_are_found_and_named(tmp_path, fault, check, text):
    def clear(network):
        on_host(network, 1, f'iifname "eth1" meta l4proto udp {fault}')

    report = diagnose(tmp_path, rails=2, fault=clear, environment={"GRADWIRE_PRESET": "mlt", "GRADWIRE_PATHS": "2"})
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {(check, 0, 1)}
    assert text in texts(report, check)[0]


@pytest.mark.parametrize("rail", [0, 1])
@pytest.mark.parametrize(("paths", "level"), [("1", "note"), ("2", "warning")])
def test_a_dead_rail_is_no_path_and_named(tmp_path, rail, paths, level):
    def fault(network):
        network.set([0], [rail], is_cut=True)

    report = diagnose(tmp_path, rails=2, fault=fault, environment={"GRADWIRE_PATHS": paths})
    assert {pair["paths"] for pair in report["pairs"]} == {1}
    assert [[rail["source"] for rail in pair["rails"]] for pair in report["pairs"]] == [
        [f"10.77.{rail}.1"],
        [f"10.77.{rail}.2"],
    ]
    assert {one for one in told(report, level) if one[0] == "paths"} == {("paths", 0, 1), ("paths", 1, 0)}
    assert told(report, "problem") == set()
    assert report["statuses"] == [0, 0]


@needs_nft
@pytest.mark.parametrize("rail", [0, 1])
def test_a_rail_that_is_dead_in_one_direction_is_named_in_that_direction(tmp_path, rail):
    def fault(network):
        on_host(network, 1, f'iifname "eth{rail}" meta l4proto udp drop')

    report = diagnose(tmp_path, rails=2, fault=fault, environment={"GRADWIRE_PATHS": "2"})
    assert told(report, "problem") == set(), "each reaches the other by the other rail"
    rails = [(pair["rank"], rail) for pair in report["pairs"] for rail in pair["rails"]]
    assert [(rank, rail["source"]) for rank, rail in rails if rail["sent"] == rail["lost"]] == [(0, f"10.77.{rail}.1")]
    assert [pair["paths"] for pair in report["pairs"]] == [1, 2]


@needs_nft
def test_rails_of_hosts_that_let_only_the_jobs_port_in_are_healthy(tmp_path):
    """Without a table of connections, by which answers to another port would come in."""

    def shut(network):
        for host in (0, 1):
            on_host(network, host, f"udp dport {PORT} accept; meta l4proto udp drop")

    report = diagnose(tmp_path, rails=2, fault=shut, environment={"GRADWIRE_NETWORK_THREADS": "1"})
    assert report["statuses"] == [0, 0], report
    assert told(report, "problem", "warning") == set()
    assert [lost_on_rails(pair) for pair in report["pairs"]] == [
        [("10.77.1.1", 500, 0, [125, 0])],
        [("10.77.1.2", 500, 0, [125, 0])],
    ]
    assert [pair["paths"] for pair in report["pairs"]] == [2, 2]


def test_a_taken_port_is_named(tmp_path):
    def take(network):
        with network.on_host(1):
            taken.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        taken[0].bind(("0.0.0.0", PORT))

    taken = []
    report = diagnose(tmp_path, fault=take, environment={"GRADWIRE_PORT": str(PORT)})
    assert report["statuses"] == [1, 1]
    assert ("engine", 1, None) in told(report, "problem")
    assert "ss -ulpn" in texts(report, "engine")[0]


def test_a_rank_that_does_not_come_is_named(tmp_path):
    def main():
        with Network(Layout(hosts=2, switch="nft")) as network:
            child = network.spawn(
                0, [*DOCTOR, "--rank", "0", "--world-size", "2", "--store", f"file://{tmp_path}/meeting", "--wait", "1"],
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            return [child.communicate(timeout=300)[1], child.returncode]

    error, status = in_sandbox(tmp_path, main)
    assert status == 3
    waiting, end = error.splitlines()
    assert waiting == "gradwire doctor: rank 0 of 2 waits up to 1 s for the others", (
        "a log has it, which is no terminal"
    )
    assert "rank 1 has not come" in end


OTHERS = {  # beside eth0 and eth1, which are up and have addresses
    "lo": "it reaches this host only",
    "docker0": "a bridge of containers has the same address on every host",
    "down0": "it is down",
    "bare0": "it has no address",
}


@pytest.mark.parametrize(
    ("asked", "used", "reasons"),
    [
        ("", {"eth0", "eth1"}, {**OTHERS, **dict.fromkeys(("eth0", "eth1"), "it is up and has an address")}),
        (
            "eth1",
            {"eth1"},
            {
                **OTHERS,
                **dict.fromkeys(("eth0", "docker0"), "GRADWIRE_INTERFACE=eth1 leaves it out"),
                "eth1": "GRADWIRE_INTERFACE=eth1 names it",
            },
        ),
    ],
)
def test_the_choice_of_interfaces_is_told_with_its_reasons(tmp_path, asked, used, reasons):
    def add_devices(network):
        with network.on_host(1):
            iproute.ip(
                "link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up",
                "link add down0 type veth peer name bare0", "link set bare0 up",
            )  # fmt: skip

    environment = {"GRADWIRE_INTERFACE": asked} if asked else {}
    report = diagnose(tmp_path, rails=2, fault=add_devices, environment=environment, packets=100)
    interfaces = report["hosts"][1]["interfaces"]
    assert {i["name"]: i["reason"] for i in interfaces} == reasons
    assert {i["name"] for i in interfaces if i["used"]} == used
    assert report["statuses"] == [0, 0]


def test_torchrun_starts_it_as_it_starts_the_job(tmp_path):
    """Two ranks on a host that has a network; their ports follow from LOCAL_RANK."""
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "RANK", "WORLD_SIZE"))
    }
    pipe = subprocess.PIPE

    def main():
        with Network(Layout(hosts=1, switch="nft")) as network:
            child = network.spawn(0, [*torchrun, *DOCTOR, "--packets", "200"],
                                  env=clean, stdout=pipe, stderr=pipe, text=True)  # fmt: skip
            return [*child.communicate(timeout=300), child.returncode]

    output, errors, status = in_sandbox(tmp_path, main)
    assert status == 0, errors
    report = json.loads(output)
    assert [host["port"] for host in report["hosts"]] == [PORT, PORT + 1]
    assert [(pair["rank"], pair["peer"], pair["lost"]) for pair in report["pairs"]] == [(0, 1, 0), (1, 0, 0)]
