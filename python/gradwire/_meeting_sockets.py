"""The TCP sockets of the board where ranks without torch meet (`_meeting.py`): rank 0's, which listens, and those of who comes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import selectors
import socket
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from gradwire import _forked
from gradwire.errors import AddressError, EngineError, MissingRankError, PortInUseError

logger = logging.getLogger("gradwire")

CONNECT_PAUSE_S = 0.05
# While nobody answers a name is looked up so often: it may have no address yet, or lead elsewhere now. All ranks ask one server for it.
LOOK_UP_EVERY_S = 1.0
# Who has a name that leads nowhere for so long may have mistyped it.
TELL_AFTER_S = 5.0
# An address that is not this host's, or a version of IP that this host does not have.
NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
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


class Name:
    """Where a host's name leads, as far as is known by now.

    Args:
        host, port: the name, or an address.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._begun = time.monotonic()
        self._looks_at = self._begun
        self._is_told = False
        # The latest answer; one that fails later takes nothing from it.
        self.places: Sequence[tuple[int, Any]] = ()
        self.why = ""

    def look_up(self) -> Sequence[tuple[int, Any]]:
        """All of its addresses, each with its family; looked up anew when that was a while ago.

        Raises:
            AddressError: it can be no name, or the system cannot look it up.
            EngineError: no file descriptor is left.
        """
        if time.monotonic() < self._looks_at:
            return self.places
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            # What lacks a descriptor says the same, and no other look-up helps it.
            with contextlib.suppress(OSError):  # this family may be forbidden
                _new_socket(socket.AF_INET, self._host, self._port).close()
            self.why = error.strerror or str(error)
            self._tell()
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise AddressError(f"the rendezvous host {self._host!r} has no address: {why}", asked=self._host) from error
        else:
            self.places, self.why = list(dict.fromkeys((family, place) for family, _, _, _, place in found)), ""
        self._looks_at = time.monotonic() + LOOK_UP_EVERY_S
        return self.places

    def has_none(self) -> AddressError:
        """The error of who has waited for an address in vain."""
        waited_s = time.monotonic() - self._begun
        text = f"the rendezvous host {self._host!r} has no address, looked up for {waited_s:.1f} s: {self.why}"
        return AddressError(text, asked=self._host)

    def _tell(self) -> None:
        if not self.places and not self._is_told and time.monotonic() - self._begun >= TELL_AFTER_S:
            self._is_told = True
            logger.warning(
                "the rendezvous host %r has no address yet, and is looked up again: %s", self._host, self.why
            )


def listen(host: str, port: int, mtu: int | None, timeout_s: float = 0.0) -> list[socket.socket]:
    """Sockets that listen, one at each address of `host` that is this host's.

    Args:
        host: a name that is not known yet is looked up again.
        port: a TCP port.
        mtu: largest IP packet; None: what passes nearly everywhere.
        timeout_s: longest wait for an address of it.

    Raises:
        PortInUseError, AddressError: it cannot, there.
        EngineError: no file descriptor is left.
    """
    name, end = Name(host, port), time.monotonic() + timeout_s
    while not (places := name.look_up()):
        if time.monotonic() >= end:
            raise name.has_none()
        time.sleep(CONNECT_PAUSE_S)
    with contextlib.ExitStack() as made:
        listeners, why = [], ""
        for family, place in places:
            try:
                listeners.append(made.enter_context(_listener(family, place, host, mtu)))
            except OSError as error:
                why = error.strerror or str(error)
                if error.errno not in NOT_OURS:
                    raise _cannot_listen(host, port, error) from error
        if not listeners:
            raise _cannot_listen(host, port, OSError(errno.EADDRNOTAVAIL, why))
        made.pop_all()
    return listeners


def _listener(family: int, place: Any, host: str, mtu: int | None) -> socket.socket:
    listener = _new_socket(family, host, place[1])
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a meeting that is over
        _in_small_segments(listener, mtu)  # those that it accepts have it too
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> PortInUseError | AddressError:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(f"TCP port {port} of {host} is in use, rank 0 cannot serve the rendezvous", port=port)
    text = (
        f"rank 0 cannot serve the rendezvous at {host}:{port}: {error.strerror}; it must be an address of rank 0's host"
    )
    return AddressError(text, asked=f"{host}:{port}")


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


def only_here(host: str, listeners: Sequence[socket.socket]) -> str:
    """That no other host can come, as the end of a sentence; empty: others may."""
    addresses = [str(listener.getsockname()[0]) for listener in listeners]
    if not all(ip_address(address).is_loopback for address in addresses):
        return ""
    named = "" if host in addresses else f", which {host!r} is on this host"
    return (
        f"listens at {' and '.join(addresses)}{named}: no other host reaches it; "
        "for ranks on several give the rendezvous an address that all reach"
    )


def means_this_host(host: str) -> bool:
    """Whether a name or an address says that the ranks are on one host."""
    return host == "localhost" or host.startswith(("127.", "::1"))


def connect(host: str, port: int, timeout_s: float, mtu: int | None) -> socket.socket:
    """A connection to who listens, as soon as somebody does: at whichever address of `host`, and where its name leads by then.

    Raises:
        MissingRankError: nobody did in time.
        AddressError: the host had no address in time.
        EngineError: no file descriptor is left.
    """
    name, end, why = Name(host, port), time.monotonic() + timeout_s, ""
    while time.monotonic() < end:
        for family, place in name.look_up():
            if (left := end - time.monotonic()) <= 0:
                break
            try:
                return _connected(family, place, host, min(left, 1.0), mtu)
            except OSError as error:
                why = f": {error.strerror or error}"
        time.sleep(CONNECT_PAUSE_S)
    if name.why and not name.places:
        raise name.has_none()
    addresses = [str(place[0]) for _, place in name.places]
    found = "" if host in addresses or not addresses else f", which is {' and '.join(addresses)} here,"
    looked = f"; and when it was looked up again: {name.why}" if name.why else ""
    raise MissingRankError(
        f"rank(s) 0 did not appear at {host}:{port}{found} within {timeout_s:g} s (this is a rank on {socket.gethostname()}){why}{looked}",
        ranks=[0],
        waited_s=timeout_s,
    )


def _connected(family: int, place: Any, host: str, timeout_s: float, mtu: int | None) -> socket.socket:
    """A connection; raises OSError where nobody listens."""
    connection = _new_socket(family, host, place[1])
    try:
        connection.settimeout(timeout_s)
        _in_small_segments(connection, mtu)
        connection.connect(place)
        if connection.getsockname() == connection.getpeername():
            # Nobody listens, and the kernel chose the port itself for this end: TCP opens from both ends at once.
            raise ConnectionError("it is connected to itself")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _new_socket(family: int, host: str, port: int) -> socket.socket:
    """A socket; raises OSError where this host does not have this version of IP."""
    try:
        return _forked.stays_here(socket.socket(family, socket.SOCK_STREAM))
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            raise
        raise EngineError(f"no socket for the rendezvous at {host}:{port}: {error.strerror}", what="socket") from error
