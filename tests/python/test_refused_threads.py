"""What a rank does where the system starts no more threads: what it can do without is a warning, what it needs an error of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from free_ports import free_port
from gradwire import _native
from gradwire._completer import Completer
from gradwire._heritage import Reopening
from gradwire._meeting import MeetingServer
from gradwire._outbox import Outbox
from gradwire._runtime import Runtime
from gradwire.config import Config
from gradwire.errors import EngineError, GradwireError
from gradwire.observe.export import PrometheusEndpoint
from gradwire.observe.observer import Observer
from gradwire.observe.status import StatusServer, status_folder
from pair import pair, receive, send

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


def test_the_engine_stops_whatever_of_the_observer_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(Config(port=0))

    def fail() -> None:
        raise RuntimeError("cannot join thread before it is started")

    monkeypatch.setattr(runtime.observer, "stop", fail)
    with pytest.raises(RuntimeError, match="cannot join"):
        runtime.stop()
    with pytest.raises(GradwireError, match="stopped"):
        runtime.engine.stats()


def test_a_call_that_waits_for_its_memory_is_taken_once_a_thread_can_be_started() -> None:
    engines, groups = pair()
    outbox = Outbox()

    def put() -> Any:
        return outbox.put(0, lambda: None, lambda _failed: receive(groups[0]), timeout_s=LIMIT_S, overdue=TimeoutError)

    with no_thread(), pytest.raises(EngineError, match="ulimit -u"):
        put()
    assert not outbox.is_waiting(0)
    taken, sent = put(), send(groups[1])
    assert taken.wait(LIMIT_S)
    assert sent.wait(LIMIT_S)
    assert taken.error() is None
    outbox.stop(LIMIT_S)
    for engine in engines:
        engine.stop()


def test_a_store_is_tried_again_once_a_thread_can_be_started() -> None:
    is_tried = threading.Event()
    reopening = Reopening(is_tried.set)
    with no_thread(), pytest.raises(EngineError, match="gradwire-reopen"):
        reopening.take()
    assert reopening.take() is None
    assert is_tried.wait(LIMIT_S)
    reopening.close()


class Engine:
    """Hands out what a test puts in."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()

    def next_completions(self) -> list[Any] | None:
        return self.batches.get(timeout=LIMIT_S)


class Told(logging.Handler):
    """Says when something is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.put(record.getMessage())


def test_a_callback_that_holds_up_others_is_followed_once_a_thread_can_be_started() -> None:
    engine, told = Engine(), Told()
    completer = Completer(engine, sync_futures=False, patience_s=0.05)  # type: ignore[arg-type]
    ops: list[Any] = [SimpleNamespace(id=number, notify=lambda: None) for number in range(2)]
    last = threading.Event()
    completer.watch([ops[0]], lambda: last.wait(LIMIT_S))
    completer.watch([ops[1]], last.set)
    logger = logging.getLogger("gradwire")
    logger.addHandler(told)
    try:
        with no_thread():
            engine.batches.put(ops)
            assert "ulimit -u" in told.texts.get(timeout=LIMIT_S)
        assert last.wait(LIMIT_S / 2), "nobody has followed"
    finally:
        logger.removeHandler(told)
        engine.batches.put(None)
    completer.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in completer._threads)


FUTURES = """
import os, sys, threading
import torch, torch.distributed as dist, gradwire.torch
from gradwire.errors import GradwireError

rank = int(sys.argv[1])
threading.stack_size(int(sys.argv[3]) if rank else 0)
try:
    dist.init_process_group("gradwire", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
except GradwireError as error:
    print(type(error).__name__, error, flush=True)
threading.stack_size(0)
dist.init_process_group("gradwire", init_method=f"file://{sys.argv[2]}2", rank=rank, world_size=2)
threading.stack_size(int(sys.argv[3]))
tensor = torch.full((4,), rank + 1.0)
work = dist.all_reduce(tensor, async_op=True)
print(work.get_future().then(lambda future: future.value()[0].tolist()).wait(), flush=True)
dist.destroy_process_group()
"""


def test_what_completes_futures_is_started_before_a_group_is_formed(tmp_path: Path) -> None:
    """So that no call is under way on one rank alone when it cannot be; and the other rank is told."""
    command = [sys.executable, "-W", "ignore", "-c", FUTURES]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(NO_SUCH_STACK)],
            env={**os.environ, "GRADWIRE_PORT": "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]
    assert [lines[-1] for lines in told] == [str([3.0] * 4)] * 2, told
    assert told[0][0].startswith("RendezvousError rank 1"), told
    assert told[1][0].startswith("EngineError starting the thread gradwire-completer"), told
    assert "pids.max" in told[0][0]
