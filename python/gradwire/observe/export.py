"""Metrics for others: a Prometheus endpoint and OpenTelemetry, by their own libraries. Both off unless asked for."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from gradwire import _native
from gradwire._extras import is_installed
from gradwire._forked import stays_here
from gradwire._threads import start_thread
from gradwire._urls import without_user
from gradwire.config import Config
from gradwire.errors import AddressError, EngineError, GradwireError, MissingExtraError, PortInUseError
from gradwire.metrics import METRICS, PREFIX, Metric, Sample, samples
from gradwire.observe.metrics_server import MetricsServer

logger = logging.getLogger("gradwire")

Stats = Callable[[], dict[str, Any]]
# Where OpenTelemetry's exporter says what has failed, and what it sends with.
LIBRARY_LOGGERS = ("opentelemetry.exporter.otlp.proto.http.metric_exporter", "urllib3.connectionpool")
# The end of a process waits so long for its last metrics: a collector within reach answers in milliseconds.
LAST_EXPORT_S = 2.0
# And so long for an export that fails: what waits for an answer is left behind.
GIVING_UP_S = 0.5


def check_extras(config: Config) -> None:
    """Whether what the configuration asks for is installed.

    Raises:
        MissingExtraError: it is not. Fields: extra, package.
    """
    if config.metrics_port is not None:
        _require("prometheus_client", "prometheus-client", "metrics", "metrics_port")
    if config.otlp_endpoint is not None:
        _require("opentelemetry.sdk", "opentelemetry-sdk", "otel", "otlp_endpoint")
        _require(
            "opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http", "otel", "otlp_endpoint"
        )


def _require(module: str, package: str, extra: str, field: str) -> None:
    if not is_installed(module):
        raise MissingExtraError(
            f"{field} is set and the package {package} is not installed: pip install 'gradwire[{extra}]'",
            extra=extra,
            package=package,
        )


class PrometheusEndpoint:
    """Serves the metrics of this process over HTTP.

    Args:
        host, port: to listen at.
        stats: called for each scrape.

    Raises:
        PortInUseError: the TCP port is taken. Fields: port.
        AddressError: the host is not known or not this one, or the port is not allowed to this user. Fields: asked.
        EngineError: no thread can be started.
    """

    def __init__(self, host: str, port: int, stats: Stats) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(stats))
        try:
            self._server = MetricsServer(host, port, make_wsgi_app(registry))
        except (OSError, UnicodeError) as error:  # the latter of what no name of a host may be
            raise _not_listening(host, port, error) from error
        stays_here(self._server.socket)
        try:
            self._thread = start_thread(self._server.serve_forever, "gradwire-metrics")
        except EngineError:
            self._server.server_close()
            raise
        self.port = int(self._server.server_port)
        logger.info("metrics at http://%s:%d/metrics", host, self.port)

    def stop(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def _not_listening(host: str, port: int, error: Exception) -> GradwireError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return PortInUseError(f"metrics_port: TCP port {port} of {host} is in use", port=port)
    reason = getattr(error, "strerror", None) or error
    text = f"the metrics endpoint cannot listen at metrics_host = {host!r}, port {port}: {reason}"
    return AddressError(text, asked=f"{host}:{port}")


class _Collector:
    """What prometheus_client asks for at each scrape."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        try:
            found = _by_metric(self._stats())
        except GradwireError:  # the engine stops
            return
        for metric in METRICS:
            family = kinds[metric.kind](metric.name, metric.doc, labels=metric.labels)
            for sample in found[metric.name]:
                if metric.kind == "histogram":
                    family.add_metric(sample.labels, buckets=_buckets(sample), sum_value=sample.sum)
                else:
                    family.add_metric(sample.labels, sample.value)
            yield family


def _by_metric(stats: dict[str, Any]) -> dict[str, list[Sample]]:
    """All samples, by the name of their metric."""
    found: dict[str, list[Sample]] = {metric.name: [] for metric in METRICS}
    for sample in samples(stats):
        found[sample.metric.name].append(sample)
    return found


def _buckets(sample: Sample) -> list[tuple[str, float]]:
    """Upper bound and the values up to it."""
    return list(zip(_bounds_as_text(sample.metric.bounds), map(float, accumulate(sample.counts)), strict=True))


@functools.cache
def _bounds_as_text(bounds: str) -> list[str]:
    return [*(f"{bound:.12g}" for bound in _native.histogram_bounds()[bounds]), "+Inf"]


class OpenTelemetryExport:
    """Sends the metrics of this process to a collector by OTLP over HTTP, on a thread of its own.

    Args:
        endpoint: URL of the collector's metrics, such as `http://localhost:4318/v1/metrics`.
        every_s: pause between two exports.
        stats: called for each.

    Raises:
        EngineError: no thread can be started.
    """

    def __init__(self, endpoint: str, every_s: float, stats: Stats) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.resources import OTELResourceDetector

        # Once: what it does not understand the library says each time.
        self._environment = OTELResourceDetector().detect()
        self._stats = stats
        self._every_s = every_s
        self._exporter = OTLPMetricExporter(endpoint=endpoint)
        self._started_ns = time.time_ns()
        self._is_failing = False
        self._is_over = False
        self._said = _SaidByLibrary()
        self._stopping = threading.Event()
        self._thread = start_thread(self._run, "gradwire-otlp")

    def stop(self) -> None:
        """Exports once more and ends; a collector that does not answer delays the end of the process by a few seconds."""
        self._stopping.set()
        if not self._is_failing:
            self._thread.join(timeout=LAST_EXPORT_S)
        if self._thread.is_alive():
            self._is_over = True
            self._exporter.shutdown()  # ends its pauses between two tries
            self._thread.join(timeout=GIVING_UP_S)
        else:
            self._exporter.shutdown()

    def _run(self) -> None:
        with self._said.of_this_thread():
            while not self._stopping.wait(self._every_s):
                self._export()
            if not self._is_failing and not self._is_over:
                self._export()

    def _export(self) -> None:
        try:
            stats = self._stats()
        except GradwireError:  # the engine has stopped
            return
        problem = self._problem_with(stats)
        if problem is not None and not self._is_failing:
            logger.warning("metrics could not be exported by OpenTelemetry: %s", without_user(problem))
        elif problem is None and self._is_failing:
            logger.info("the export of metrics by OpenTelemetry goes on")
        self._is_failing = problem is not None

    def _problem_with(self, stats: dict[str, Any]) -> str | None:
        """Exports, and returns why that has failed; None: it has not."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._said.lines.clear()
        try:
            result = self._exporter.export(otel_metrics(stats, self._started_ns, self._environment))
        except Exception as error:  # noqa: BLE001  older releases, where a connection breaks; the next one may be delivered
            return repr(error)
        if result is MetricExportResult.SUCCESS:
            return None
        return " ".join(dict.fromkeys([*self._said.lines[:1], *self._said.lines[-1:]])) or "no reason is known"


class _SaidByLibrary(logging.Filter):
    """Keeps what the library logs of our exports: it would say the same of each one for as long as there is no collector."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._thread: int | None = None

    @contextlib.contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Other threads may export what is the program's own."""
        self._thread = threading.get_ident()
        loggers = [logging.getLogger(name) for name in LIBRARY_LOGGERS]
        for one in loggers:
            one.addFilter(self)
        try:
            yield
        finally:
            for one in loggers:
                one.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Called by logging: whether somebody else is told, too."""
        if record.thread != self._thread or record.levelno < logging.WARNING:
            return True
        self.lines.append(record.getMessage())
        return False


def otel_metrics(stats: dict[str, Any], started_ns: int, environment: Any = None) -> Any:
    """The statistics as OpenTelemetry's `MetricsData`: cumulative, histograms with explicit bounds.

    Args:
        stats: what `gradwire.stats()` returned.
        started_ns: since when the process counts; a group since it was formed, its connections since the epoch that they are of.
        environment: the `Resource` that the operator has set (`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`), which wins; None: nothing.
    """
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    facts = {
        "service.name": "gradwire",
        # Backends tell series apart by this and the service alone. Processes of containers may share host and number, but then no port.
        "service.instance.id": f"{stats['host']}:{stats['pid']}:{stats['port']}",
        "gradwire.job": stats["job"],
        "host.name": stats["host"],
        "process.pid": stats["pid"],
    }
    found = _by_metric(stats)
    now_ns = time.time_ns()
    times_s = {group["name"]: (group["formed_s"], group["connected_s"]) for group in stats["groups"]}

    def since_ns(sample: Sample) -> int:
        """Since when it has been counted: of a group since it was formed, under whatever name, of a connection since its epoch began."""
        if sample.metric.scope == "engine":
            return started_ns
        formed_s, connected_s = times_s[sample.labels[0]]
        # Whom it waited for the group counts, and goes on.
        is_of_connection = sample.metric.scope in ("peer", "path") and not sample.metric.key.startswith("straggler.")
        return int((connected_s if is_of_connection else formed_s) * 1e9)

    metrics = []
    for metric in METRICS:
        points = [_point(sample, since_ns(sample), now_ns) for sample in found[metric.name]]
        if points:
            metrics.append(_otel_metric(metric, points))
    scope = ScopeMetrics(InstrumentationScope("gradwire"), metrics, "")
    resource = Resource(facts) if environment is None else Resource(facts).merge(environment)
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _otel_metric(metric: Metric, points: list[Any]) -> Any:
    from opentelemetry.sdk.metrics import export

    cumulative = export.AggregationTemporality.CUMULATIVE
    data: Any
    if metric.kind == "counter":
        data = export.Sum(points, cumulative, is_monotonic=True)
    elif metric.kind == "gauge":
        data = export.Gauge(points)
    else:
        data = export.Histogram(points, cumulative)
    name = "gradwire." + metric.name.removeprefix(PREFIX).removesuffix("_total")
    return export.Metric(name, metric.doc, OTEL_UNITS.get(metric.unit, "1"), data)


def _point(sample: Sample, started_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics import export

    labels = dict(zip(sample.metric.labels, sample.labels, strict=True))
    if sample.metric.kind != "histogram":
        return export.NumberDataPoint(labels, started_ns, now_ns, sample.value)
    bounds = _native.histogram_bounds()[sample.metric.bounds]
    # What was the least and the greatest is not counted; the field may not be left out.
    unknown = float("nan")
    return export.HistogramDataPoint(
        labels, started_ns, now_ns, sum(sample.counts), sample.sum, sample.counts, bounds, unknown, unknown
    )


OTEL_UNITS = {"seconds": "s", "bytes": "By", "bytes per second": "By/s"}
