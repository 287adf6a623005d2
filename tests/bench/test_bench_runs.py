"""`gradwire bench` runs to its end over real processes, and its network does what a condition says. Nothing is timed."""

import fcntl
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from gradwire import _native
from gradwire.bench import report
from gradwire.bench.collectives import COLLECTIVES
from gradwire.bench.ground import FRAME_BYTES, Ground
from gradwire.bench.plan import Condition, NetworkPlan
from gradwire.doctor import processor
from gradwire.lab import iproute, sandbox
from gradwire.lab.probe import LossProbe

UML_MODULES = Path("/usr/lib/uml/modules")  # by release of user-mode-linux's kernel
COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main()", "bench"]


pytestmark = pytest.mark.usefixtures("namespaces")


def command(out: Path, *arguments: str) -> list[str]:
    return [*COMMAND, *arguments, "--json", str(out / "numbers.json"), "--out", str(out)]


def bench(out: Path, *arguments: str, status: int = 0, told: str = "") -> dict:
    ran = subprocess.run(command(out, *arguments), capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert told in ran.stdout
    return json.loads((out / "numbers.json").read_text())


def test_every_collective_is_right_beside_gloo_and_a_missed_target_is_said(tmp_path, kernel_tcp):
    peer = "bbr" if "bbr" in kernel_tcp else "reno"  # one that is not what the kernel uses anyway
    several = [word for name in COLLECTIVES for word in ("--collective", name)]
    few = ("--samples", "1", "--block", "1", "--tcp", peer, "--ranks", "2", "--ranks", "3", "--size", "0.05")
    found = bench(tmp_path, *several, *few, "--network", "loopback", "--require", "busbw=1000", status=1)
    rows = found["rows"]
    assert {(row["collective"], row["ranks"]) for row in rows} == {
        (name, ranks) for name in COLLECTIVES for ranks in (2, 3)
    }
    assert {row["variant"] for row in rows} == {f"gloo-{peer}", "gradwire-auto", "gradwire-exact"}
    assert sum(row["wrong"] for row in rows) == 0
    # A sample of this size times 20 calls: as many as a p95 needs.
    assert {(row["samples"], row["block"], len(row["samples_ms"])) for row in rows} == {(20, 20, 20)}
    assert all(row["p95_ms"] >= row["p50_ms"] > 0 and row["p99_ms"] is None for row in rows)
    assert all(row["cpu_s_per_gb"] > 0 for row in rows)
    assert len(found["targets"]) == 20  # ten gradwire variants of eight collectives, two numbers of ranks, one peer
    assert "--require busbw=1000" in found["command"]
    assert {"commit", "kernel", "packages", "load"} <= set(found["machine"])
    facts = found["machine"]
    assert (facts["root"], facts["affinity"]) == (os.geteuid() == 0, sorted(os.sched_getaffinity(0)))
    assert len(facts["buffers"]["ipv4/tcp_rmem"].split()) == 3
    assert facts["extension_sha256"] == hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()
    assert facts["iproute2"].startswith("ip utility, iproute2")
    limit = processor.examine().limit
    assert facts["cpu_limit_cores"] == (limit.cores if limit else None)
    assert found["ciphers"] == {"gradwire-auto": None, "gradwire-exact": None}, "all ranks are on one host"
    assert found["ended_by"] is None
    assert (tmp_path / "bench.html").stat().st_size > 10_000


def test_what_tolerance_lost_was_announced_and_rotated_results_that_lost_something_are_not_told_as_right(tmp_path):
    few = ("--samples", "3", "--block", "3", "--ranks", "3", "--size", "0.5", "--tcp", "none", "--rotated")
    presets = [word for name in ("auto", "dlcp") for word in ("--preset", name)]
    reductions = ("--collective", "all_reduce", "--collective", "reduce_scatter")
    found = bench(tmp_path, *few, *presets, *reductions, "--network", "nft", "--loss", "0.03", "--rate", "400")
    rows = {(row["collective"], row["variant"]): row for row in found["rows"]}
    assert sum(row["wrong"] for row in rows.values()) == 0
    for collective in ("all_reduce", "reduce_scatter"):
        assert 0 < rows[collective, "gradwire-auto"]["lost_share"] < 0.05
        assert rows[collective, "gradwire-dlcp"]["lost_share"] > 0
        assert rows[collective, "gradwire-auto"]["filled_share"] == 0, "its results come back in any case"
    assert 0 < rows["all_reduce", "gradwire-dlcp"]["filled_share"] < 0.1
    assert {row["unjudged"] for (_, variant), row in rows.items() if not variant.endswith("/rotated")} == {0}
    assert 0.01 < found["network"]["counted_loss_at_0.03"] < 0.06
    rotated = rows["all_reduce", "gradwire-dlcp/rotated"]
    assert rotated["unjudged"] > 0
    assert 0 < rotated["lost_share"] < 0.1
    assert ">-</td>" in (tmp_path / "bench.html").read_text()


def test_what_a_preset_measures_first_is_not_taken_for_what_it_does(tmp_path):
    """`ultima` warms up by exact calls, in which what is lost is sent again; after them nothing is."""
    few = ("--samples", "2", "--block", "1", "--ranks", "2", "--size", "0.1", "--size", "0.25", "--tcp", "none")
    several = ("--collective", "all_reduce", "--collective", "reduce_scatter", "--preset", "ultima", "--rotated")
    found = bench(tmp_path, *few, *several, "--network", "nft", "--loss", "0.03", "--loss", "0.05", "--rate", "400")
    assert len(found["rows"]) == 12
    assert {(row["resent_share"], row["wrong"]) for row in found["rows"]} == {(0, 0)}
    assert max(row["lost_share"] for row in found["rows"]) > 0


def test_a_round_trip_is_counted_and_a_ring_of_three_takes_two_of_it(tmp_path):
    few = ("--samples", "1", "--block", "1", "--ranks", "3", "--size", "0.01", "--tcp", "none", "--preset", "auto")
    found = bench(tmp_path, *few, "--network", "soft", "--rtt", "10", "--algorithm", "ring")
    (row,) = found["rows"]
    assert (row["variant"], row["rtt_ms"], row["wrong"]) == ("gradwire-auto/ring", 10.0, 0)
    assert found["network"]["counted_rtt_ms_at_10"] >= 10  # and more on a busy machine, without end
    # A shard visits all ranks and its sum comes around again: four steps of 5 ms, where a transpose has two.
    assert row["min_ms"] >= 20


def test_one_sample_is_enough_for_a_gray_rail_beside_the_healthy_network(tmp_path):
    found = bench(tmp_path, "--quick", "--scenario", "gray", "--samples", "1")
    assert [(row["variant"], row["scenario"]) for row in found["rows"]] == [
        (variant, scenario)
        for scenario in ("healthy", "gray")
        for variant in ("gloo-cubic", "gradwire-auto", "gradwire-exact")
    ]
    assert {(row["samples"], row["wrong"]) for row in found["rows"]} == {(20, 0)}  # calls
    assert (found["network"]["rails"], found["settings"]["hosts"]) == (4, 2)


@pytest.mark.parametrize("scenario", ["slow-host", "incast"])
def test_a_scenario_is_measured_beside_the_healthy_network(tmp_path, scenario):
    few = ("--samples", "1", "--block", "1", "--ranks", "3", "--size", "0.1", "--tcp", "none", "--preset", "auto")
    found = bench(tmp_path, *few, "--scenario", scenario, "--network", "nft", "--rate", "400")
    assert [row["scenario"] for row in found["rows"]] == ["healthy", scenario]
    assert {(row["samples"], row["wrong"]) for row in found["rows"]} == {(1, 0)}


@pytest.mark.parametrize("network", ["bridge", "uml"])
def test_a_network_is_taken_by_its_name(tmp_path, network):
    if network == "uml" and shutil.which("linux.uml") is None:
        pytest.skip("user-mode-linux is not installed")
    few = ("--samples", "1", "--block", "1", "--ranks", "2", "--size", "0.1", "--tcp", "none", "--preset", "exact")
    found = bench(tmp_path, *few, "--network", network)
    (row,) = found["rows"]
    assert (found["network"]["kind"], row["samples"], row["wrong"]) == (network, 1, 0)
    assert re.fullmatch(r"AES-256-GCM|ChaCha20-Poly1305", found["ciphers"]["gradwire-exact"])
    release = found["network"].get("switch_kernel")
    assert release is None if network == "bridge" else (UML_MODULES / release).is_dir(), release
    # With its interpreter and code, so that a shell runs it again.
    assert shlex.split(found["command"])[: len(COMMAND)] == COMMAND


SMALLEST = (
    "--network",
    "loopback",
    "--samples",
    "1",
    "--ranks",
    "2",
    "--size",
    "0.01",
    "--tcp",
    "none",
    "--preset",
    "exact",
)


def plant(folder, monkeypatch, code):
    """Makes every worker import this before all else."""
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


WRONG_ON_RANK_1 = """
from gradwire.bench.collectives import Task
right = Task.call
def wrong(self, buffers, group):
    right(self, buffers, group)
    buffers[1][7] += self._rank
Task.call = wrong
"""


def test_a_wrong_element_is_told_and_is_exit_status_1(tmp_path, monkeypatch):
    plant(tmp_path, monkeypatch, WRONG_ON_RANK_1)
    # A sample of this size is 20 calls after one in which the ranks meet: two until the ranks have agreed, one that is not counted, and it.
    found = bench(tmp_path, *SMALLEST, status=1, told="84 elements of results are WRONG")
    assert [row["wrong"] for row in found["rows"]] == [84]
    assert found["targets"] == []  # nothing was required that could have been missed


# Each call but the first gives what the one before it gave.
LATE = """
from gradwire.bench.collectives import Task
right, came = Task.call, []
def late(self, buffers, group):
    right(self, buffers, group)
    came.append(buffers[1].clone())
    buffers[1].copy_(came[max(0, len(came) - 2)])
Task.call = late
"""


def test_what_came_of_an_earlier_call_is_told_as_wrong(tmp_path, monkeypatch):
    plant(tmp_path, monkeypatch, LATE)
    found = bench(tmp_path, *SMALLEST, status=1, told="elements of results are WRONG")
    elems = int(0.01 * (1 << 20)) // 4
    assert [row["wrong"] for row in found["rows"]] == [2 * 83 * elems]  # of two ranks, in 83 of 84 calls


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["the process", "its group"])
def test_an_interrupt_ends_it_with_all_workers_and_leaves_the_numbers_of_an_earlier_run(tmp_path, workers_of, send):
    """Of the whole group, as a terminal has it, or of the process alone, as another program has it."""
    (tmp_path / "numbers.json").write_text("earlier")
    line = command(tmp_path, "--quick", "--network", "loopback", "--samples", "100000")
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert any("starting 2 ranks" in told for told in running.stdout)
        wait_until(lambda: len(workers_of(tmp_path)) == 2)
        send(running.pid, signal.SIGINT)
        told = running.stdout.read()
        assert running.wait(60) == sandbox.EXIT_INTERRUPTED, told
    assert "interrupted; the workers and the network are gone" in told
    wait_until(lambda: not workers_of(tmp_path))
    assert (tmp_path / "numbers.json").read_text() == "earlier"


def test_numbers_and_report_are_written_though_nobody_reads_the_table(tmp_path):
    """The pipe holds less than the table, so that it is not printed before its reader goes."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    several = ("--collective", "all_reduce", "--collective", "broadcast")
    line = command(tmp_path, "--quick", "--network", "loopback", "--samples", "1", *several)
    with subprocess.Popen(line, stdout=writer, stderr=subprocess.PIPE, text=True) as running:
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as lines:
            assert any(re.search(rb" (\d+) of \1, ", told) for told in lines)
        assert (running.stderr.read(), running.wait(60)) == ("", 2)
    assert len(json.loads((tmp_path / "numbers.json").read_text())["rows"]) == 5
    assert (tmp_path / "bench.html").stat().st_size > 10_000


ENDLESS = {
    "samples": ("--network", "loopback", "--samples", "100000"),
    "steps": ("--training", "--network", "nft", "--rate", "1000", "--loss", "0", "--steps", "100000"),
}


def interrupt(running: subprocess.Popen, _workers: list[str]) -> None:
    os.killpg(running.pid, signal.SIGINT)  # what a terminal does


def terminate(running: subprocess.Popen, _workers: list[str]) -> None:
    running.terminate()


def terminate_all(running: subprocess.Popen, _workers: list[str]) -> None:
    os.killpg(running.pid, signal.SIGTERM)  # what timeout(1) does


def hang_up(running: subprocess.Popen, _workers: list[str]) -> None:
    os.killpg(running.pid, signal.SIGHUP)  # what a terminal does that is closed


def kill_a_worker(_running: subprocess.Popen, workers: list[str]) -> None:
    os.kill(int(workers[1]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kept", "end", "status", "by", "told"),
    [
        ("samples", interrupt, 130, "SIGINT", "interrupted: "),
        ("samples", terminate, 143, "SIGTERM", "terminated: "),
        ("samples", hang_up, 129, "SIGHUP", "the terminal has gone: "),
        ("samples", kill_a_worker, 2, "worker ", "ended early: "),
        ("steps", terminate_all, 143, "SIGTERM", "terminated: "),  # steps are kept by the same object
    ],
)
def test_what_all_have_measured_is_kept_however_it_ends(tmp_path, workers_of, kept, end, status, by, told):
    line = command(tmp_path, "--quick", *ENDLESS[kept], "--block", "2")
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        blocks = (re.search(r" (\d+) of \d+, .* min of about ", line) for line in running.stdout)
        assert any(found and int(found[1]) >= 6 for found in blocks)  # two turns, of three variants or fewer
        end(running, workers_of(tmp_path))
        said = running.stdout.read()
        assert running.wait(60) == status, said
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    (many,) = {row[kept] for row in numbers["rows"]}
    assert numbers["interrupted"] is (end is interrupt)
    assert numbers["ended_by"].startswith(by)
    turn = 2 * 20 if kept == "samples" else 2  # of 20 calls each
    assert many in range(turn, 20 * 100000, turn)
    assert f"{told}{many} {kept} of each" in said
    assert list(tmp_path.glob("*.html"))
    wait_until(lambda: not workers_of(tmp_path))


def test_a_run_that_its_minutes_end_early_says_so(tmp_path):
    """Each of 320 samples begins 20 ms after its order: that is more than the minutes."""
    few = ("--quick", "--network", "loopback", "--tcp", "none", "--preset", "exact", "--block", "1")
    told = "ended early by --minutes: 20 samples of each cell"
    found = bench(tmp_path, *few, "--samples", "2", "--minutes", "0.1", "--settle", "320", told=told)
    assert (found["ended_by"], found["interrupted"]) == ("--minutes", False)


def wait_until(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_training_counts_the_time_to_the_target(tmp_path, monkeypatch):
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
    examples = Path(__file__).resolve().parents[2] / "examples"
    for name, told in found["settings"]["sources_sha256"].items():
        assert told == hashlib.sha256((examples / name).read_bytes()).hexdigest()
    monkeypatch.syspath_prepend(examples)
    corpus = importlib.import_module("gpt").Corpus.of_standard_library()
    for name, text in (("train", corpus.train), ("validation", corpus.validation)):
        expected = {"bytes": len(text), "sha256": hashlib.sha256(bytes(text.numpy())).hexdigest()}
        assert found["settings"]["corpus"][name] == expected
    assert (tmp_path / "training.html").stat().st_size > 10_000


def in_lab(tmp_path: Path, look) -> dict:
    """What `look` finds inside a sandbox."""
    answer = tmp_path / "answer.json"

    def main() -> int:
        answer.write_text(json.dumps(look()))
        return 0

    assert sandbox.run(main) == 0
    return json.loads(answer.read_text())


def test_a_gray_rail_is_never_better_than_the_healthy_ones(tmp_path):
    def look() -> list[list]:
        with Ground(2, NetworkPlan("nft", 100.0, rails=2)) as ground:
            assert ground.network is not None
            ground.set(Condition(loss=0.2, scenario="gray"))
            return [[rail, port.loss] for (_, rail), port in ground.network.ports().items()]

    assert sorted(in_lab(tmp_path, look)) == [[0, 0.2], [0, 0.2], [1, 0.2], [1, 0.2]]


def test_what_a_gray_rail_loses_is_counted_on_that_rail(tmp_path):
    def look() -> dict:
        with Ground(2, NetworkPlan("nft", 100.0, rails=2)) as ground:
            return ground.count([Condition(), Condition(scenario="gray")])

    found = in_lab(tmp_path, look)
    counted = found.pop("counted_gray_loss_at_0.1")
    assert LossProbe(8000, round(8000 * counted), 1).agrees_with(0.1)
    assert found.keys() == {"switch", "counted_rtt_ms_at_0"}
    assert f"the gray rail set to lose 10 %, counted {100 * counted:.2g} %" in report.network_text(
        {"counted_gray_loss_at_0.1": counted}
    )


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
def test_gloo_gets_the_congestion_control_that_its_name_says(tmp_path, kernel_tcp, kind):
    if "cubic" not in kernel_tcp:
        pytest.skip("this kernel has no cubic: modprobe tcp_cubic")

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
