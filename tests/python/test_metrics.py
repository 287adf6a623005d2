"""The catalogue of metrics covers all that is counted, and docs/metrics.md is what it says."""

import http.server
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire import _arrays, _native, stats
from gradwire.config import Config
from gradwire.errors import AddressError, MissingExtraError, PortInUseError
from gradwire.metrics import METRICS, SCOPES, STAGES, samples
from gradwire.observe import export

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "metrics_docs.py"
FORMED_S = 1_700_000_000
CONNECTED_S = 1_700_003_600
# What is no measurement: names, and what a group is.
FACTS = {
    "group": {"name", "rank", "security", "peers", "calls", "waiting.during", "waiting.sequence", "waiting.straggler", "waiting.cause",
              "epoch.members", "epoch.lost", "waiting.bytes_received", "waiting.bytes_expected", "waiting.silent_s"},
    "peer": {"rank", "host", "address", "paths"},
    "path": {"path", "source_port", "local_address", "peer_address"},
    "call": {"collective", "preset", *STAGES},
    "engine": {"send_refused_errno"},
    "stage": set(),
}  # fmt: skip


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """Statistics of a pair of engines in this process that have reduced once."""
    engines = [_native.Engine({"port": 0}) for _ in range(2)]
    pending = [engine.new_group(rank, 2, "pair") for rank, engine in enumerate(engines)]
    records = [one.record() for one in pending]
    groups: dict[int, _native.Group] = {}

    def join(rank: int) -> None:
        groups[rank] = pending[rank].join(records, 30.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrays = [np.full(1000, rank, np.float32) for rank in range(2)]
    policy = _native.preset_defaults("auto")
    assert policy is not None
    ops = [
        groups[rank].submit({
            "kind": "all_reduce", "input": (array.ctypes.data, array.nbytes), "output": (array.ctypes.data, array.nbytes),
            "timeout_s": 30.0, "keep": [array], "policy": policy, **_arrays.reduce_options(array, "mean"),
        })
        for rank, array in enumerate(arrays)
    ]  # fmt: skip
    for op in ops:
        assert op.wait(30.0)
        assert op.error() is None
    found = {"engine": engines[0].stats(), "groups": [groups[0].stats()], "job": "", "host": "", "pid": 1}
    for engine in engines:
        engine.stop()
    return found


def keys(scope: str, part: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every place of a value in one part, nested ones with dots; histograms and lists are values."""
    for name, value in part.items():
        place = f"{prefix}{name}"
        if place in FACTS[scope]:
            continue
        if isinstance(value, dict) and "counts" not in value:
            yield from keys(scope, value, f"{place}.")
        else:
            yield place


def test_every_value_that_is_counted_is_a_metric(counted: dict[str, Any]) -> None:
    (group,) = counted["groups"]
    (peer,) = group["peers"]
    parts = {
        "engine": counted["engine"], "group": group, "peer": peer, "path": peer["paths"][0], "call": group["calls"][0],
        "stage": group["calls"][0]["reduce"],
    }  # fmt: skip
    for scope, part in parts.items():
        known = set()
        for metric in METRICS:
            if metric.scope == scope:
                known |= {metric.key} if metric.each is None else {metric.key.format(one) for one in metric.each[1]}
                known |= {
                    metric.key.removesuffix(".{}"),
                    metric.key.split(".")[0] if part.get(metric.key.split(".")[0]) is None else metric.key,
                }
        assert set(keys(scope, part)) - known == set(), scope


def test_samples_have_the_units_and_labels_of_their_metrics(counted: dict[str, Any]) -> None:
    found = list(samples(counted))
    assert all(len(sample.labels) == len(sample.metric.labels) for sample in found)
    assert {sample.metric.scope for sample in found} == set(SCOPES)
    (peer,) = counted["groups"][0]["peers"]
    (rtt,) = [sample for sample in found if sample.metric.name == "gradwire_peer_rtt_seconds"]
    assert rtt.value == pytest.approx(peer["rtt_smoothed_us"] / 1e6)
    (duration,) = [sample for sample in found if sample.metric.name == "gradwire_call_duration_seconds"]
    assert sum(duration.counts) == 1
    assert duration.labels[-1] == "auto"
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(
        name.endswith("_total") == (metric.kind == "counter") for name, metric in zip(names, METRICS, strict=True)
    )


def test_the_page_of_metrics_is_fresh() -> None:
    assert subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False).returncode == 0


def test_what_the_page_advises_to_leave_out_is_all_that_grows_with_the_square_of_ranks() -> None:
    (pattern,) = re.findall(r"regex: (\S+)", (SCRIPT.parents[1] / "docs" / "metrics.md").read_text())
    for metric in METRICS:
        assert bool(re.fullmatch(pattern, metric.name)) == (metric.scope in ("peer", "path")), metric.name


def test_without_a_group_there_is_nothing_to_count() -> None:
    assert stats()["groups"] == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    for config, extra in ((Config(metrics_port=0), "metrics"), (Config(otlp_endpoint="http://localhost:4318"), "otel")):
        with pytest.raises(MissingExtraError, match=rf"pip install 'gradwire\[{extra}\]'"):
            export.check_extras(config)
    export.check_extras(Config())


@pytest.mark.parametrize("host", ["nohost.invalid", "203.0.113.9", "a" * 300])
def test_an_address_at_which_metrics_cannot_be_served_is_no_port_in_use(host: str) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(AddressError, match=f"metrics_host = '{host}'") as caught:
        export.PrometheusEndpoint(host, 0, dict)
    assert caught.value.asked == f"{host}:0"


def test_a_port_at_which_metrics_cannot_be_served_is_named() -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"metrics_port: TCP port {port} of 127.0.0.1 is in use") as caught:
            export.PrometheusEndpoint("127.0.0.1", port, dict)
    assert caught.value.port == port


def test_what_is_exported_of_a_group_is_counted_since_it_was_formed_and_of_a_peer_since_they_met(
    counted: dict[str, Any],
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    said = {**_said(counted), "engine": {"datagrams_sent": 1}}
    (resource,) = export.otel_metrics(said, started_ns=7).resource_metrics
    (scope,) = resource.scope_metrics
    started = {
        metric.name: {point.start_time_unix_nano for point in metric.data.data_points} for metric in scope.metrics
    }
    assert started.pop("gradwire.sent_datagrams") == {7}
    since: dict[int, set[str]] = {FORMED_S * 10**9: set(), CONNECTED_S * 10**9: set()}
    for name, (only,) in started.items():
        since[only].add(name)
    of_connections = {name for name in started if name.startswith(("gradwire.peer_", "gradwire.path_"))}
    stragglers = {name for name in of_connections if "straggler" in name}
    assert len(stragglers) == 2
    of_connections -= stragglers  # these the group counts, whatever becomes of its connections
    assert of_connections
    assert since[CONNECTED_S * 10**9] == of_connections, "they are new since the members have changed"


def _said(counted: dict[str, Any]) -> dict[str, Any]:
    times = {"formed_s": float(FORMED_S), "connected_s": float(CONNECTED_S)}
    groups = [{**group, **times} for group in counted["groups"]]
    return {**counted, "groups": groups, "job": "named", "host": "node1", "pid": 1, "port": 47400}


def test_processes_of_a_job_export_as_resources_that_can_be_told_apart(counted: dict[str, Any]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    said = _said(counted)
    others = [
        {},
        {"pid": 2},
        {"host": "node2"},
        {"port": 47401},
    ]  # the last one is of a container with numbers of its own
    found = [export.otel_metrics({**said, **other}, 7).resource_metrics[0].resource.attributes for other in others]
    assert {one["service.name"] for one in found} == {"gradwire"}
    assert len({one["service.instance.id"] for one in found}) == 4


def test_what_the_operator_says_of_the_resource_is_exported(
    counted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    metric_exporter = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    exported: queue.Queue[Any] = queue.Queue()

    class Collector(metric_exporter.OTLPMetricExporter):
        def export(self, data: Any, *_options: Any, **_more: Any) -> Any:
            exported.put(data)
            return metric_exporter.MetricExportResult.SUCCESS

    monkeypatch.setattr(metric_exporter, "OTLPMetricExporter", Collector)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,gradwire.job=other")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    said = _said(counted)
    export.OpenTelemetryExport("http://localhost:4318/v1/metrics", 3600.0, lambda: said).stop()
    found = exported.get(timeout=30.0).resource_metrics[0].resource.attributes
    assert found["deployment.environment.name"] == "test"
    assert (found["service.name"], found["gradwire.job"]) == ("training", "other")
    assert found["host.name"] == "node1"


def test_an_export_that_fails_is_told_once_and_the_next_one_goes_on(
    counted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metric_exporter = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    again = threading.Event()
    said = _said(counted)

    class Collector(metric_exporter.OTLPMetricExporter):
        """Breaks off the first two connections, as older releases of the library let the caller know."""

        exports = 0

        def export(self, *_data: Any, **_options: Any) -> Any:
            self.exports += 1
            if self.exports <= 2:
                raise ConnectionResetError("the collector restarts")
            again.set()
            return metric_exporter.MetricExportResult.SUCCESS

    monkeypatch.setattr(metric_exporter, "OTLPMetricExporter", Collector)
    caplog.set_level("INFO", logger="gradwire")
    sender = export.OpenTelemetryExport("http://localhost:4318/v1/metrics", 0.01, lambda: said)
    try:
        assert again.wait(30.0), "it ended with the first failure"
    finally:
        sender.stop()
    lines = [record.message for record in caplog.records if "OpenTelemetry" in record.message]
    assert [line.partition(":")[0] for line in lines] == [
        "metrics could not be exported by OpenTelemetry",
        "the export of metrics by OpenTelemetry goes on",
    ]


class _Refusing:
    """A collector that answers each export with one status, until it is told another one."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.answered: queue.Queue[int] = queue.Queue()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                status = outer.status
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                outer.answered.put(status)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://somebody:hunter2@127.0.0.1:{self._server.server_port}/v1/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answers(self, status: int, times: int) -> None:
        """Waits until it has given this answer so often."""
        while times:
            times -= self.answered.get(timeout=60.0) == status

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_collector_that_refuses_is_told_once_and_by_nobody_else(
    counted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    caplog.set_level("INFO")
    collector, said = _Refusing(400), _said(counted)
    sender = export.OpenTelemetryExport(collector.url, 0.01, lambda: said)
    try:
        collector.answers(400, 3)
        collector.status = 200
        collector.answers(200, 2)
    finally:
        sender.stop()
        collector.close()
    warnings = [record for record in caplog.records if record.levelname != "INFO"]
    (line,) = [record.getMessage() for record in warnings]
    assert line.startswith("metrics could not be exported by OpenTelemetry: ")
    assert "400" in line
    assert "hunter2" not in caplog.text
    assert [record.message for record in caplog.records if "goes on" in record.message] == [
        "the export of metrics by OpenTelemetry goes on"
    ]


def test_a_process_that_ends_tries_a_collector_that_has_failed_no_more(counted: dict[str, Any]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    collector, said = _Refusing(400), _said(counted)
    sender = export.OpenTelemetryExport(collector.url, 3600.0, lambda: said)
    try:
        sender._export()
        collector.answers(400, 1)
        sender.stop()
        assert not sender._thread.is_alive()
        assert collector.answered.empty()
    finally:
        collector.close()
