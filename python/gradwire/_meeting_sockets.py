"""The TCP sockets of the board where ranks without torch meet (`_meeting.py`): rank 0's, which listens, and those of who comes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import selectors
import socket
import time
from ipaddress import ip_address
from typing import Any

from gradwire import _forked
from gradwire.errors import AddressError, EngineError, MissingRankError, PortInUseError

CONNECT_PAUSE_S = 0.05
# A host that says nothing has gone: asked after 10 s, and three times more, or not taking what was sent for so many ms.
GONE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 25_000}
# TCP takes what the interface allows: on a way that drops such packets and says nothing, a record would never come. These pass wherever
# IPv6 does, with the headers of TCP; a smaller GRADWIRE_MTU makes them smaller.
SEGMENT_BYTES = 1200
PIECE_BYTES_MAX, PIECES_PASSED_OVER = 1 << 16, 16  # a frame of the largest size
TCP_HEADERS_BYTES = 60  # of IPv6 and TCP


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop.

    Raises:
        EngineError: no file descriptor is left.
    """
    try:
        # A loop that lacks one half-way complains of itself when it is collected: whether it can be made is seen before.
        with selectors.DefaultSelector():
            one, other = socket.socketpair()
        one.close()
        other.close()
        return asyncio.new_event_loop()
    except OSError as error:
        raise EngineError(f"rank 0 cannot serve the rendezvous: {error.strerror}", what="event loop") from error


def listen(host: str, port: int, mtu: int | None) -> socket.socket:
    """A socket that listens.

    Raises:
        PortInUseError, AddressError: it cannot, there.
        EngineError: no file descriptor is left.
    """
    family, address = _resolve(host, port)
    listener = _new_socket(family, host, port)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a meeting that is over
        _in_small_segments(listener, mtu)  # those that it accepts have it too
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"TCP port {port} of {host} is in use, rank 0 cannot serve the rendezvous", port=port
            ) from error
        text = f"rank 0 cannot serve the rendezvous at {host}:{port}: {error.strerror}; it must be an address of rank 0's host"
        raise AddressError(text, asked=f"{host}:{port}") from error
    return listener


class Client:
    """A connection that rank 0 has accepted, used on its loop.

    Unlike by asyncio's streams no more is read than is asked for: what a client sends ahead stays with the kernel, which lets it wait.
    The connection ends within half a minute when the other host is gone, so that its rank can come from elsewhere.

    Args:
        connection: closed where an error is raised.
        address: where it came from.

    Raises:
        OSError: it has gone again.
    """

    def __init__(self, connection: socket.socket, address: Any) -> None:
        self._socket, self.peer = _forked.stays_here(connection), str(address)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, value in GONE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError:
            connection.close()
            raise

    async def read(self, count: int) -> bytes:
        """So many bytes.

        Raises:
            OSError, EOFError: it has gone.
        """
        content = bytearray()
        while len(content) < count:
            piece = await asyncio.get_running_loop().sock_recv(self._socket, min(count - len(content), PIECE_BYTES_MAX))
            if not piece:
                raise EOFError("it closed the connection")
            content += piece
        return bytes(content)

    async def write(self, content: bytes) -> None:
        """Hands it all to the kernel. Raises OSError where the client has gone."""
        await asyncio.get_running_loop().sock_sendall(self._socket, content)

    def pass_over(self) -> None:
        """What has come by now is of no account: a connection that is closed over it is reset, and its last answer may be lost with it."""
        with contextlib.suppress(OSError):
            for _ in range(PIECES_PASSED_OVER):
                if not self._socket.recv(PIECE_BYTES_MAX):
                    return

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def _in_small_segments(end: socket.socket, mtu: int | None) -> None:
    """Before it is connected, or listens: the other end then sends none that are larger either."""
    most = SEGMENT_BYTES if mtu is None else min(SEGMENT_BYTES, mtu - TCP_HEADERS_BYTES)
    with contextlib.suppress(OSError):  # most ways need it not
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, most)


def only_here(host: str, listener: socket.socket) -> str:
    """That no other host can come, as the end of a sentence; empty: others may."""
    address = str(listener.getsockname()[0])
    if not ip_address(address).is_loopback:
        return ""
    named = "" if host == address else f", which {host!r} is on this host"
    return f"listens at {address}{named}: no other host reaches it; for ranks on several give the rendezvous an address that all reach"


def means_this_host(host: str) -> bool:
    """Whether a name or an address says that the ranks are on one host."""
    return host == "localhost" or host.startswith(("127.", "::1"))


def connect(host: str, port: int, timeout_s: float, mtu: int | None) -> socket.socket:
    """A connection to who listens, as soon as somebody does.

    Raises:
        MissingRankError: nobody did in time.
        AddressError: the host has no address.
        EngineError: no file descriptor is left.
    """
    family, address = _resolve(host, port)
    end, why = time.monotonic() + timeout_s, ""
    while (left := end - time.monotonic()) > 0:
        connection = _new_socket(family, host, port)
        try:
            connection.settimeout(min(left, 1.0))
            _in_small_segments(connection, mtu)
            connection.connect(address)
            if connection.getsockname() == connection.getpeername():
                # Nobody listens, and the kernel chose the port itself for this end: TCP opens from both ends at once.
                raise ConnectionError("it is connected to itself")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            why = f": {error.strerror or error}"
            connection.close()
            time.sleep(CONNECT_PAUSE_S)
        else:
            return connection
    found = "" if address[0] == host else f", which is {address[0]} here,"
    raise MissingRankError(
        f"rank(s) 0 did not appear at {host}:{port}{found} within {timeout_s:g} s (this is a rank on {socket.gethostname()}){why}",
        ranks=[0],
        waited_s=timeout_s,
    )


def _new_socket(family: int, host: str, port: int) -> socket.socket:
    try:
        return _forked.stays_here(socket.socket(family, socket.SOCK_STREAM))
    except OSError as error:
        raise EngineError(f"no socket for the rendezvous at {host}:{port}: {error.strerror}", what="socket") from error


def _resolve(host: str, port: int) -> tuple[int, Any]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise AddressError(f"the rendezvous host {host!r} has no address: {error.strerror}", asked=host) from error
    return family, address
