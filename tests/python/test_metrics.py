"""The catalogue of metrics covers all that is counted, and docs/metrics.md is what it says."""

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
# What is no measurement: names, and what a group is.
FACTS = {
    "group": {"name", "rank", "security", "peers", "calls", "waiting.during", "waiting.sequence", "waiting.straggler", "waiting.cause",
              "epoch.members", "epoch.lost", "waiting.bytes_received", "waiting.bytes_expected", "waiting.silent_s"},
    "peer": {"rank", "host", "address", "paths"},
    "path": {"path", "source_port", "local_address", "peer_address"},
    "call": {"collective", "preset", *STAGES},
    "engine": set(),
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


def test_an_export_that_fails_is_told_once_and_the_next_one_goes_on(
    counted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metric_exporter = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    again = threading.Event()
    said = {**counted, "job": "named", "host": "node1", "pid": 1}

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
