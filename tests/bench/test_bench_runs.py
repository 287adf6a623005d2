"""`gradwire bench` runs to its end over real processes, and its network does what a condition says. Nothing is timed."""

import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from gradwire.bench.collectives import COLLECTIVES
from gradwire.bench.ground import FRAME_BYTES, Ground
from gradwire.bench.plan import Condition, NetworkPlan
from gradwire.lab import NamespacesUnavailable, iproute, sandbox

COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main()", "bench"]


@pytest.fixture(autouse=True)
def _namespaces():
    try:
        assert sandbox.run(lambda: 0) == 0
    except NamespacesUnavailable as error:
        pytest.skip(str(error))


def bench(out: Path, *arguments: str, status: int = 0) -> dict:
    numbers = out / "numbers.json"
    command = [*COMMAND, *arguments, "--json", str(numbers), "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return json.loads(numbers.read_text())


def test_every_collective_is_right_beside_gloo_and_a_missed_target_is_said(tmp_path):
    several = [word for name in COLLECTIVES for word in ("--collective", name)]
    few = ("--samples", "1", "--block", "1", "--tcp", "bbr", "--ranks", "2", "--ranks", "3", "--size", "0.05")
    found = bench(tmp_path, *several, *few, "--network", "loopback", "--require", "busbw=1000", status=1)
    rows = found["rows"]
    assert {(row["collective"], row["ranks"]) for row in rows} == {
        (name, ranks) for name in COLLECTIVES for ranks in (2, 3)
    }
    assert {row["variant"] for row in rows} == {"gloo-bbr", "gradwire-auto", "gradwire-exact"}
    assert sum(row["wrong"] for row in rows) == 0
    assert all(row["p50_ms"] > 0 and row["p95_ms"] is None and row["cpu_s_per_gb"] > 0 for row in rows)
    assert len(found["targets"]) == 18  # nine gradwire variants of eight collectives, two numbers of ranks, one peer
    assert "--require busbw=1000" in found["command"]
    assert {"commit", "kernel", "packages", "load"} <= set(found["machine"])
    assert (tmp_path / "bench.html").stat().st_size > 10_000


def test_what_tolerance_lost_was_announced(tmp_path):
    few = ("--samples", "3", "--block", "3", "--ranks", "3", "--size", "0.5", "--tcp", "none")
    presets = [word for name in ("auto", "dlcp") for word in ("--preset", name)]
    found = bench(tmp_path, *few, *presets, "--network", "nft", "--loss", "0.03", "--rate", "400")
    rows = {row["variant"]: row for row in found["rows"]}
    assert sum(row["wrong"] for row in rows.values()) == 0
    assert 0 < rows["gradwire-auto"]["lost_share"] < 0.05
    assert rows["gradwire-dlcp"]["lost_share"] > 0
    assert 0.01 < found["network"]["counted_loss_at_0.03"] < 0.06


def test_training_counts_the_time_to_the_target(tmp_path):
    arguments = (
        "--training",
        "--quick",
        "--loss",
        "0",
        "--steps",
        "1",
        "--block",
        "1",
        "--network",
        "nft",
        "--rate",
        "1000",
    )
    found = bench(tmp_path, *arguments)
    peer, own = found["rows"]
    assert (peer["variant"], own["variant"]) == ("gloo-cubic", "gradwire-auto")
    assert peer["seconds"] > 0
    assert [step for step, _, _ in own["curve"]] == [0, 1]
    assert own["curve"][0][2] == peer["curve"][0][2]  # the same weights, before anything was learned
    assert 0 < own["comm_share"] <= 1
    assert (tmp_path / "training.html").stat().st_size > 10_000


def in_lab(tmp_path: Path, look) -> dict:
    """What `look` finds inside a sandbox."""
    answer = tmp_path / "answer.json"

    def main() -> int:
        answer.write_text(json.dumps(look()))
        return 0

    assert sandbox.run(main) == 0
    return json.loads(answer.read_text())


def test_scenarios_change_what_they_name_and_nothing_else(tmp_path):
    def look() -> dict:
        with Ground(3, NetworkPlan("nft", 100.0, rails=2)) as ground:
            assert ground.network is not None
            found = {}
            for scenario in ("gray", "slow-host", "incast", "healthy"):
                ground.set(Condition(loss=0.01, scenario=scenario))
                ports = [(host, rail, asdict(port)) for (host, rail), port in ground.network.ports().items()]
                with ground.on_host(2):
                    sends = [queue["options"]["rate"] for queue in iproute.tc_statistics() if queue["kind"] == "tbf"]
                found[scenario] = {"ports": ports, "last_host_sends_bytes_s": sends}
            return found

    found = in_lab(tmp_path, look)
    healthy = found["healthy"]["ports"]
    assert all(port["loss"] == 0.01 and port["rate_mbit"] == 100.0 for _, _, port in healthy)
    for place, (host, rail, port) in enumerate(healthy):
        expected = {
            "gray": {**port, "loss": 0.1} if rail == 1 else port,
            "slow-host": {**port, "rate_mbit": 50.0} if host == 2 else port,
            "incast": {**port, "buffer_bytes": 64 * FRAME_BYTES},
            "healthy": port,
        }
        assert {scenario: each["ports"][place][2] for scenario, each in found.items()} == expected
    rates = {scenario: each["last_host_sends_bytes_s"] for scenario, each in found.items()}
    full, half = [12_500_000, 12_500_000], [6_250_000, 6_250_000]
    assert rates == {"gray": full, "slow-host": half, "incast": full, "healthy": full}


@pytest.mark.parametrize("kind", ["loopback", "bridge", "nft"])
def test_gloo_gets_the_congestion_control_that_its_name_says(tmp_path, kind):
    def look() -> list[str]:
        found = []
        with Ground(2, NetworkPlan(kind)) as ground:
            for algorithm in ("reno", "cubic"):
                ground.use_tcp(algorithm)
                if kind == "loopback":
                    listener = socket.create_server(("127.0.0.1", 0))
                    near = socket.create_connection(listener.getsockname(), timeout=10)
                else:
                    with ground.on_host(1):
                        listener = socket.create_server((ground.address(1), 0))
                    with ground.on_host(0):
                        near = socket.create_connection(listener.getsockname(), timeout=10)
                far, _ = listener.accept()
                for end in (near, far):
                    found.append(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode())
                    end.close()
                listener.close()
        return found

    assert in_lab(tmp_path, look) == ["reno", "reno", "cubic", "cubic"]
