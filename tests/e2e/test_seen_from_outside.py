"""A running job as its user sees it: statistics, Prometheus, OpenTelemetry, `gradwire monitor`, `gradwire trace`."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_ports
from gradwire.errors import StatusFolderError
from gradwire.metrics import METRICS
from gradwire.observe.client import find_sockets
from gradwire.observe.status import StatusServer
from observed import LONGEST_S, Job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks that reduce, with everything switched on."""
    pytest.importorskip("prometheus_client")
    pytest.importorskip("opentelemetry.sdk")
    collector = _Collector()
    ports = {"GRADWIRE_METRICS_PORT": str(free_ports(2)), "GRADWIRE_OTLP_ENDPOINT": collector.url}
    with Job(tmp_path_factory.mktemp("job"), 2, **ports, GRADWIRE_OTLP_EVERY_S="0.5") as running:
        running.until_it_reduces()
        running.collector = collector  # type: ignore[attr-defined]
        yield running
    running.require_clean_exit()
    collector.close()


class _Collector:
    """Takes what is sent by OTLP over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") is None:
                    bodies.append(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def sockets(job: Job) -> list[Path]:
    return sorted((Path(job.variables["XDG_RUNTIME_DIR"]) / "gradwire").glob("*.sock"))


def ask(path: Path, request: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        try:
            connection.sendall(request)
            return connection.makefile("rb").readline()
        except (ConnectionResetError, BrokenPipeError):  # it was refused before it had been read
            return b""


def test_prometheus_scrapes_every_metric_of_a_running_rank_over_loopback(job: Job) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    for rank in range(2):  # each has a port of its own
        port = int(job.variables["GRADWIRE_METRICS_PORT"]) + rank
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        missing = {metric.name.removesuffix("_total") for metric in METRICS} - set(families)
        assert not missing
        (sent,) = [s for s in families["gradwire_peer_sent_packets"].samples if s.name.endswith("_total")]
        assert sent.value > 0
        assert sent.labels == {
            "group": f"communicator {job.variables['GRADWIRE_RENDEZVOUS']} 0",
            "rank": str(rank),
            "peer": str(1 - rank),
        }
        presets = {sample.labels["preset"] for sample in families["gradwire_calls"].samples}
        assert presets == {"exact", "auto"}
        durations = families["gradwire_call_duration_seconds"].samples
        for labels in {(s.labels["collective"], s.labels["preset"]) for s in durations}:
            own = [s for s in durations if (s.labels["collective"], s.labels["preset"]) == labels]
            buckets = [s.value for s in own if s.name.endswith("_bucket")]
            assert buckets == sorted(buckets), "cumulative"
            assert buckets[-1] == next(s.value for s in own if s.name.endswith("_count")) > 0
        with pytest.raises(OSError):  # noqa: PT011  nobody else can reach it
            socket.create_connection((_other_address(), port), timeout=5)


def _other_address() -> str:
    # Another loopback address: it reaches what listens everywhere, and not what listens at 127.0.0.1.
    return "127.0.0.2"


def test_opentelemetry_gets_the_same_metrics(job: Any) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    def exported() -> dict[str, Any] | None:
        """Of the first export after a call: a busy machine may export before the group is formed."""
        for body in list(job.collector.bodies):
            request = ExportMetricsServiceRequest.FromString(body)
            metrics = {metric.name: metric for metric in request.resource_metrics[0].scope_metrics[0].metrics}
            if "gradwire.call_duration_seconds" in metrics:
                return metrics
        return None

    metrics = job.wait_for(exported, "an export with calls")
    assert metrics["gradwire.peer_sent_packets"].sum.is_monotonic
    durations = metrics["gradwire.call_duration_seconds"]
    assert durations.unit == "s"
    point = durations.histogram.data_points[0]
    assert point.count == sum(point.bucket_counts) > 0
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1


def test_the_status_socket_is_the_users_alone_and_bounded(job: Job) -> None:
    paths = sockets(job)
    assert [path.name.split(".")[:2] for path in paths] == [["seen", "0"], ["seen", "1"]]
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 | stat.S_ISVTX  # the bit of those that are in use
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert json.loads(ask(paths[0], b'{"ask": "stats"}\n'))["rank"] == 0
    for nonsense in (b"\n", b"[" * 3000 + b"\n", b'{"ask": "secrets"}\n', b'{"ask": ["stats"]}\n', b"x" * 5000 + b"\n"):
        assert ask(paths[0], nonsense) == b""
    idle = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for connection in idle:
        connection.connect(str(paths[0]))
        connection.settimeout(30)
    dropped = sum(connection.recv(1) == b"" for connection in idle[8:])  # the first eight are served and wait
    for connection in idle:
        connection.close()
    assert dropped == 12
    job.wait_for(lambda: ask(paths[0], b'{"ask": "stats"}\n'), "an answer after them")


# Connects as another user, asks, and prints what comes back.
STRANGER = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(30)
try:
    connection.connect(sys.argv[1])
    connection.sendall(b'{"ask": "stats"}\\n')
    print(connection.recv(100))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_gets_nothing_even_where_the_modes_have_been_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="gradwire-test-") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        server = StatusServer("job", 0, {"stats": lambda: {"secret": 1}})
        try:
            assert json.loads(ask(server.path, b'{"ask": "stats"}\n')) == {"secret": 1}
            assert stranger(server.path) == "PermissionError"
            server.path.parent.chmod(0o755)
            server.path.chmod(0o666)
            assert stranger(server.path) in ("b''", "ConnectionResetError", "BrokenPipeError")
            with pytest.raises(StatusFolderError):
                find_sockets()
        finally:
            server.stop()
        assert not server.path.exists()


def stranger(path: Path) -> str:
    """What another user gets."""
    command = ["/usr/bin/env", "python3", "-I", "-c", STRANGER, str(path)]
    ran = subprocess.run(
        command, cwd="/", user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=False
    )
    return ran.stdout.strip() or ran.stderr


Lines = list[dict[str, Any]]


def monitored(job: Job, what: str, is_enough: Callable[[Lines], Any], *more: str, runtime: Path | None = None) -> Lines:
    """What `gradwire monitor` prints until that is enough, or until a busy machine would have printed it long ago."""
    lines: Lines = []
    with job.started("monitor", what, "--json", "--every", "0.3", *more, runtime=runtime) as monitor:
        assert monitor.stdout is not None
        limit = threading.Timer(LONGEST_S, monitor.send_signal, [signal.SIGINT])
        limit.start()
        try:
            for line in monitor.stdout:
                lines.append(json.loads(line))
                if is_enough(lines):
                    break
            monitor.send_signal(signal.SIGINT)
            _, errors = monitor.communicate(timeout=LONGEST_S)
        finally:
            limit.cancel()
            monitor.kill()
    assert monitor.returncode == 0, errors
    return lines


def has_both_ranks(lines: Lines) -> bool:
    return {line["rank"] for line in lines} == {0, 1}


def rates_of(lines: Lines, rank: int) -> list[dict[str, Any]]:
    """Of its one group."""
    return [next(iter(line["rates"].values())) for line in lines if line["rank"] == rank and line["rates"]]


def has_rates(lines: Lines) -> bool:
    """Of all kinds, for both ranks."""
    return all(
        any(rates["calls_per_s"] > 0 for rates in own)
        and any(rates["peers"][0]["sent_bytes_per_s"] > 0 for rates in own)
        and any(rates["ended_by"] for rates in own)
        for own in (rates_of(lines, rank) for rank in range(2))
    )


def test_monitor_streams_rates_of_every_rank(job: Job) -> None:
    lines = monitored(job, "seen", has_rates)
    assert has_rates(lines), lines
    for rank in range(2):
        (peer,) = rates_of(lines, rank)[-1]["peers"]
        assert peer["rank"] == 1 - rank
        assert peer["rtt_ms"] > 0
    assert job.command("monitor", "no-such-job", "--json").returncode == 3
    assert _cannot_write(job, "--json")
    # In a pipe or a file the screen is written when it ends, with what has been answered until then, which a busy host takes its time for.
    assert any("2 ranks seen" in job.command("monitor", "seen", "--seconds", seconds).stdout for seconds in ("5", "40"))
    assert _cannot_write(job, "--seconds", "1")


def _cannot_write(job: Job, *how: str) -> bool:
    with Path("/dev/full").open("w") as full, job.started("monitor", "seen", *how, stdout=full) as monitor:
        _, errors = monitor.communicate(timeout=LONGEST_S)
    return monitor.returncode == 2 and "the output cannot be written: No space left" in errors


def test_monitor_finds_a_job_by_its_address_a_port_or_a_process_and_over_a_remote_shell(
    job: Job, tmp_path: Path
) -> None:
    facts = json.loads(ask(sockets(job)[1], b'{"ask": "stats"}\n'))
    # The job has a name of its own, and is found by where it met all the same.
    address = job.variables["GRADWIRE_RENDEZVOUS"]
    for what in (facts["port"], facts["pid"], address):
        assert has_both_ranks(monitored(job, str(what), has_both_ranks)), what
    assert job.command("monitor", f"{address}0", "--json").returncode == 3
    shell = tmp_path / "shell"  # stands for ssh: runs here what it should run there
    shell.write_text(f'#!/bin/sh\nshift\nPATH="{Path(sys.executable).parent}:$PATH" exec sh -c "$*"\n')
    shell.chmod(0o755)
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o700)
    there = f"env XDG_RUNTIME_DIR={job.variables['XDG_RUNTIME_DIR']} {shell}"
    assert has_both_ranks(monitored(job, "seen", has_both_ranks, "--host", "node1", "--ssh", there, runtime=empty))


def test_trace_writes_a_timeline_with_aligned_clocks(job: Job, tmp_path: Path) -> None:
    job.wait_for(lambda: job.command("trace", "seen", "--raw").stdout.count("\n") == 2, "answers")
    out = tmp_path / "step.json"
    ran = job.command("trace", "seen", "--calls", "6", "-o", str(out))
    assert ran.returncode == 0, ran.stderr
    trace = json.loads(out.read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert {event["name"] for event in names} == {"process_name", "process_sort_index", "thread_name"}
    for event in spans:  # Chrome's trace event format: complete events
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    # Of a rank one more may be shown that has not ended.
    whole = [event for event in spans if event["name"].startswith("all_reduce") and "preset" in event["args"]]
    calls = [{event["args"]["sequence"] for event in whole if event["pid"] == rank} for rank in range(2)]
    assert calls[0] == calls[1]
    assert len(calls[0]) == 6
    full = job.command("trace", "seen", "-o", "/dev/full")
    assert (full.returncode, "Error: /dev/full: No space left" in full.stderr) == (2, True), full.stderr
    unknown = job.command("trace", "no-such-job")
    assert (unknown.returncode, "no running job no-such-job of this user" in unknown.stderr) == (3, True), (
        unknown.stderr
    )
    # The ranks are on one host, whose monotonic clock tells how their engines' clocks really stand to each other.
    raw = [json.loads(line) for line in job.command("trace", "seen", "--raw").stdout.splitlines()]
    true_us = {answer["rank"]: answer["groups"][0]["clock"]["monotonic_ns"] / 1e3 for answer in raw}
    (found,) = [one for title, one in trace["otherData"].items() if title.startswith("rank 1 on ")]
    assert (found["rank"], found["pid"]) == (1, job.processes[1].pid)
    assert 0 < found["clock_error_us"] < 1e5
    off = found["clock_offset_us"] - (true_us[1] - true_us[0])
    assert abs(off) <= found["clock_error_us"], (found, true_us)


def test_a_rank_tells_no_more_of_its_latest_collectives_than_it_is_asked_for(job: Job) -> None:
    def told(**options: int) -> list[dict[str, Any]]:
        answer = json.loads(ask(sockets(job)[0], json.dumps({"ask": "timelines", **options}).encode() + b"\n"))
        calls: list[dict[str, Any]] = answer["groups"][0]["calls"]
        return calls

    job.wait_for(lambda: len(told()) > 20, "more collectives than are asked for")
    assert len(told(calls=3)) == 3, "it neither sends nor receives"
    assert all(call["in_sequence"] and call["epoch"] == 0 for call in told(calls=3))
    assert told(calls=0) == []


def test_trace_leaves_a_rank_out_that_stands_still_and_names_it(short_folder: Path) -> None:
    out = short_folder / "step.json"
    with Job(short_folder, 2, GRADWIRE_PEER_TIMEOUT_S="300") as job:
        job.until_it_reduces()
        job.processes[1].send_signal(signal.SIGSTOP)
        ran = job.command("trace", "seen", "-o", str(out))
        stopped = f"rank 1 (process {job.processes[1].pid}) is left out"
    assert (ran.returncode, stopped in ran.stderr) == (0, True), ran.stderr
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0}


def test_the_sockets_of_dead_ranks_are_forgotten(short_folder: Path) -> None:
    with Job(short_folder, 2) as job:
        job.until_it_reduces()
        job.processes[0].kill()
        job.processes[0].wait()
        assert len(sockets(job)) == 2
        ran = job.command("monitor", "--json", "--every", "0.2", "--seconds", "0.1")
        assert ran.returncode in (0, 3)
        assert not any(f".{job.processes[0].pid}-" in path.name for path in sockets(job))
