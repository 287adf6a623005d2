"""Who connects to the metrics takes a bounded number of threads and descriptors for a bounded time."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from gradwire.observe import metrics_server
from gradwire.observe.metrics_server import CLIENTS_MAX, MetricsServer

Start = Callable[[], MetricsServer]


def answer(_environment: object, start_response: Callable[..., object]) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"counted"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server that ends with the test."""
    started: list[tuple[MetricsServer, threading.Thread]] = []

    def begin() -> MetricsServer:
        server = MetricsServer("127.0.0.1", 0, answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, thread))
        return server

    yield begin
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def silent() -> Iterator[Callable[[MetricsServer], socket.socket]]:
    """Connects and says nothing."""
    clients: list[socket.socket] = []

    def connect(server: MetricsServer) -> socket.socket:
        clients.append(socket.create_connection(("127.0.0.1", server.server_port), timeout=30))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def scraped(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as reply:
        return bytes(reply.read())


def test_who_comes_when_all_places_are_taken_is_left_and_takes_no_thread(
    start: Start, silent: Callable[[MetricsServer], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "CLIENT_S", 1e9)
    monkeypatch.setattr(metrics_server._Handler, "timeout", None)
    server = start()
    before = threading.active_count()
    kept = [silent(server) for _ in range(CLIENTS_MAX)]
    for _ in range(3 * CLIENTS_MAX):
        assert silent(server).recv(1) == b"", "no more than there are places"
    assert threading.active_count() - before == CLIENTS_MAX
    kept[0].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert b"counted" in kept[0].makefile("rb").read()
    assert scraped(server) == b"counted", "a place is free again"


def test_a_client_that_had_its_time_gives_its_place_to_the_next(
    start: Start, silent: Callable[[MetricsServer], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "CLIENT_S", -1.0)
    monkeypatch.setattr(metrics_server._Handler, "timeout", None)
    server = start()
    kept = [silent(server) for _ in range(CLIENTS_MAX)]
    kept[1].sendall(b"GET /metrics HTTP/1.0\r\nHost")
    assert scraped(server) == b"counted"
    assert kept[0].recv(1) == b"", "the oldest"


def test_a_client_that_says_nothing_is_left(
    start: Start, silent: Callable[[MetricsServer], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.01)
    assert silent(start()).recv(1) == b""


def test_a_client_that_does_not_read_its_answer_leaves_no_word_where_the_training_prints(
    start: Start,
    silent: Callable[[MetricsServer], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.01)
    server = start()
    server.set_app(lambda environment, respond: [*answer(environment, respond), bytes(64 << 20)])
    is_left, leave = threading.Event(), server.shutdown_request
    monkeypatch.setattr(server, "shutdown_request", lambda request: (leave(request), is_left.set()))
    silent(server).sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert is_left.wait(30)
    assert capfd.readouterr() == ("", "")
