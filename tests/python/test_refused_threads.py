"""What a rank does where the system starts no more threads: what it can do without is a warning, what it needs an error of its own."""

from __future__ import annotations

import contextlib
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradwire import _native
from gradwire._meeting import MeetingServer
from gradwire.config import Config
from gradwire.errors import EngineError
from gradwire.observe.export import PrometheusEndpoint
from gradwire.observe.observer import Observer
from gradwire.observe.status import StatusServer, status_folder
from pair import pair
from test_meeting_sockets import free_port

# No address space has room for it: the system refuses such a thread as it does at its limit.
NO_SUCH_STACK = 1 << 46
LIMIT_S = 60.0


@contextlib.contextmanager
def no_thread() -> Iterator[None]:
    threading.stack_size(NO_SUCH_STACK)
    try:
        yield
    finally:
        threading.stack_size(0)


class Owner:
    """A process with an engine."""

    def __init__(self) -> None:
        self.engine = _native.Engine({"port": 0})


@pytest.fixture
def owner() -> Iterator[Owner]:
    there = Owner()
    yield there
    there.engine.stop()


@pytest.fixture
def folder(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    return status_folder()


def test_a_rank_goes_on_without_status_socket_and_watch_and_leaves_no_socket_behind(
    owner: Owner, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Observer(owner, Config(job="job"))  # type: ignore[arg-type]
    engines, groups = pair()
    with no_thread():
        observer.add(groups[1], None)
    assert list(folder.iterdir()) == []
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(",")[0] for text in said] == ["no status socket", "no watch"]
    assert all("ulimit -u" in text and "pids.max" in text for text in said)
    observer.stop()
    for engine in engines:
        engine.stop()


def test_who_tries_again_has_the_status_socket(folder: Path) -> None:
    with no_thread(), pytest.raises(EngineError):
        StatusServer("job", 0, {})
    server = StatusServer("job", 0, {})
    assert list(folder.iterdir()) == [server.path]
    server.stop()


def test_rank_0_that_cannot_serve_the_meeting_says_why_and_leaves_the_port() -> None:
    port = free_port()
    with no_thread(), pytest.raises(EngineError, match=r"gradwire-meeting.*ulimit -u.*pids\.max"):
        MeetingServer("127.0.0.1", port, 2)
    MeetingServer("127.0.0.1", port, 2).end(None, 0.0)


def test_metrics_that_cannot_be_served_leave_the_port(owner: Owner) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    with no_thread(), pytest.raises(EngineError, match="gradwire-metrics"):
        PrometheusEndpoint("127.0.0.1", port, dict)
    observer = Observer(owner, Config())  # type: ignore[arg-type]
    endpoint = PrometheusEndpoint("127.0.0.1", port, observer.stats)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as reply:
        assert reply.status == 200
    endpoint.stop()
