"""The HTTP server of the metrics: a few clients at a time, each for a bounded time.

So nobody who reaches it takes threads and descriptors from the training.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from gradwire import _accepting

CLIENTS_MAX = 8
# A client that says nothing for so long is left. One that is connected for so long, and says a little now and then, loses its place to the
# next where all are taken.
CLIENT_S = 5.0


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers by a WSGI application, on a thread for each client.

    Args:
        host, port: to listen at; port 0: any that is free.
        app: a WSGI application.

    Raises:
        OSError: it cannot listen there, or the host has no address.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = CLIENTS_MAX

    def __init__(self, host: str, port: int, app: Any) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self._clients: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)

    def get_request(self) -> Any:
        """A client that waits."""
        try:
            return super().get_request()
        except OSError as error:
            if not _accepting.has_gone(error):
                time.sleep(_accepting.ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Takes a client, or leaves it where all places are taken."""
        now = time.monotonic()
        with self._lock:
            oldest = next(iter(self._clients), None)
            is_full = len(self._clients) >= CLIENTS_MAX
            if oldest is not None and is_full and now - self._clients[oldest] > CLIENT_S:
                is_full = False
                del self._clients[oldest]
                _end(oldest)
            if not is_full:
                self._clients[request] = now
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The client has its answer, or gets none."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or was left, is no error of the training's."""


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_S

    def get_stderr(self) -> Any:
        """Nor is what went wrong while one was answered: a client that does not read loses its answer."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Requests are not written to the training's output."""


def _end(client: socket.socket) -> None:
    """Wakes the thread that reads from it; that one closes it."""
    try:
        client.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has gone by itself
        return
