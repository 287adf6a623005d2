"""A running network that other processes command over a Unix socket: what stands behind `gradwire lab`.

Each request is one line of JSON, with `do` as its verb, and each answer a line that says that it has been heard and one with `error` or
the result. `exec` comes with the caller's standard input, output and error as file descriptors, so that the program on the host has
them as its own.
The socket's folder belongs to the user alone, and a lock beside it has one lab for each name (`claim.py`). Where somebody has removed them
they are made anew. When the process ends, network, processes, socket and lock are gone.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradwire.lab.claim import Claim, keeper_of
from gradwire.lab.errors import LabError, NoAnswer, NoLab, WrongRequest
from gradwire.lab.network import Network

# An environment and arguments of 6 MB, the most that Linux lets any program have, as JSON: up to six bytes for each.
_REQUEST_BYTES = 40 << 20
_PIECE_BYTES = 1 << 20
_REQUEST_SECONDS = 5.0  # for a whole request; a client sends it at once
# Until a lab says that it has heard, or takes more of a request: it waits for `_REQUEST_SECONDS` at most for each who was there before.
_SILENT_SECONDS = 15
_HEARD = b"heard\n"
# What shells say of a program that is not there, and of one that cannot be run.
_NOT_RUN = {errno.ENOENT: 127, errno.ENOTDIR: 127, errno.EACCES: 126, errno.ENOEXEC: 126, errno.E2BIG: 126}
_GRACE_SECONDS = 3.0  # between asking a program to end and ending it
_LOOK_SECONDS = 1.0  # between looks whether the socket is still there: who logs in again is not to find none


class Service:
    """Serves one network until it is told to end."""

    def __init__(self, network: Network, claim: Claim) -> None:
        self._network = network
        self._lock = threading.Lock()  # of everything but running programs
        self._verbs: dict[str, Callable[[dict[str, Any]], Any]] = {
            "set": self._set, "stats": self._stats, "kill": self._kill, "describe": self._describe, "run": self._run,
        }  # fmt: skip
        self._running: list[tuple[str, subprocess.Popen[Any]]] = []  # programs, and who has asked for them
        self._claim = claim
        self._path, self._listener, self._facts = self._listen()

    def _listen(self) -> tuple[Path, socket.socket, os.stat_result]:
        path = self._claim.path
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            with suppress(
                OSError
            ):  # not every file system has it: by this bit `systemd-tmpfiles` leaves old files that are in use
                path.chmod(0o600 | stat.S_ISVTX)
            listener.listen()
            listener.settimeout(_LOOK_SECONDS)
            return path, listener, path.lstat()
        except BaseException:
            listener.close()
            raise

    def _look_for_own(self) -> None:
        """Makes the socket anew where it has gone: with the user's last login, or to somebody who cleared up.

        Raises:
            LabError: another lab has the name by now.
            OSError: it cannot be made.
        """
        self._claim.renew()
        if self._path == self._claim.path and self._is_there():
            return
        before, old = self._path, self._listener
        self._path, self._listener, self._facts = self._listen()
        old.close()
        if before != self._path and self._claim.holds(before):
            before.unlink(missing_ok=True)

    def _is_there(self) -> bool:
        with suppress(OSError):
            return os.path.samestat(self._path.lstat(), self._facts)
        return False

    def run(self, ready: Callable[[dict[str, Any]], None]) -> None:
        """Answers until `down`; calls `ready` before, with what the network is.

        Raises:
            LabError: socket and lock were removed, and another lab has the name by now.
            OSError: they were removed, and cannot be made anew.
        """
        try:
            ready(self._describe({}))
            while True:
                self._look_for_own()
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                try:
                    request, descriptors = _receive(connection)
                except (OSError, ValueError, RecursionError):
                    connection.close()
                    continue
                if request.get("do") == "down":
                    self._network.close()
                    self._close()
                    _answer(connection, {"done": True})
                    return
                threading.Thread(target=self._handle, args=(connection, request, descriptors), daemon=True).start()
        finally:
            self._close()

    def _close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.close()
            if self._claim.holds(self._path):
                self._path.unlink(missing_ok=True)
            self._claim.give_up()

    def _handle(self, connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
        with connection:
            try:
                if request.get("do") == "exec":
                    result: Any = self._exec(connection, request, descriptors)
                elif request.get("do") == "pass_on":
                    result = self._pass_on(request)
                else:
                    verb = self._verbs[request["do"]]
                    with self._lock:
                        result = verb(request)
                _answer(connection, {"result": result})
            except (LabError, OSError, KeyError, TypeError, ValueError) as error:
                _answer(connection, {"error": str(error), "is_wrong": isinstance(error, WrongRequest)})
            finally:
                _close_all(descriptors)

    def _set(self, request: dict[str, Any]) -> None:
        self._network.set(request["hosts"], request["rails"], **request["changes"])

    def _stats(self, _request: dict[str, Any]) -> list[dict[str, Any]]:
        return self._network.statistics()

    def _run(self, request: dict[str, Any]) -> str:
        return self._network.run_on_switch(request["rail"], request["commands"])

    def _kill(self, request: dict[str, Any]) -> int:
        self._network.check_hosts(request["hosts"])  # before any of them is hit
        return sum(self._network.signal(host, request["signal"]) for host in request["hosts"])

    def _pass_on(self, request: dict[str, Any]) -> int:
        """A signal to the programs of a caller, each with its process group; returns how many there are. Without the lock: at once."""
        programs = [
            child for caller, child in tuple(self._running) if caller == request["caller"] and child.poll() is None
        ]
        for child in programs:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, request["signal"])
        return len(programs)

    def _describe(self, _request: dict[str, Any]) -> dict[str, Any]:
        layout = self._network.layout
        addresses = [
            [self._network.address(host, rail) for rail in range(layout.rails)] for host in range(layout.hosts)
        ]
        return {"hosts": layout.hosts, "rails": layout.rails, "switch": self._network.kind, "addresses": addresses}

    def _exec(self, connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
        """Runs a program on a host; ends it when the caller goes away. Returns its status as a shell would, also where it cannot be run."""
        if len(descriptors) != 3:
            raise LabError("exec needs three file descriptors")
        caller = request["caller"]
        try:
            if request["command"][:1] == [""]:  # as the last part of a path it names the folder, which may not be run
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "''")
            with self._lock:
                child = self._network.spawn(
                    request["host"], request["command"], stdin=descriptors[0], stdout=descriptors[1], stderr=descriptors[2],
                    env=request["environment"], cwd=request["folder"], start_new_session=True,
                )  # fmt: skip
                ended = os.pidfd_open(child.pid)  # under the lock: whoever starts another one asks which have ended
                self._running.append((caller, child))
        except OSError as error:
            if error.errno not in _NOT_RUN:
                raise
            with suppress(OSError):  # nobody reads it
                os.write(descriptors[2], f"error: {error.filename}: {error.strerror}\n".encode(errors="replace"))
            return _NOT_RUN[error.errno]
        for descriptor in descriptors:  # the child has its own: end of file must reach a pipe's reader when it ends
            os.close(descriptor)
        descriptors.clear()
        _wait(child, ended, connection)
        self._running.remove((caller, child))
        return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _wait(child: subprocess.Popen[Any], pidfd: int, connection: socket.socket) -> None:
    """Until the child ends; asks it to end, and then ends it, when the connection is closed. Closes the child's `pidfd`."""
    with os.fdopen(pidfd) as ended, selectors.DefaultSelector() as selector:
        selector.register(ended, selectors.EVENT_READ)
        selector.register(connection, selectors.EVENT_READ)
        if ended not in {key.fileobj for key, _ in selector.select()}:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
                os.killpg(child.pid, signal.SIGCONT)  # a stopped one would not hear it
            selector.unregister(connection)
            if not selector.select(_GRACE_SECONDS):
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, of which the caller is told that it has been heard, and the descriptors that came with its first part.

    Who begins one and does not end it keeps others waiting for a while.

    Raises:
        OSError: the caller is slow, or has gone meanwhile: what nobody waits for any more is not done.
        ValueError: it is no request; or RecursionError.
    """
    end = time.monotonic() + _REQUEST_SECONDS
    connection.settimeout(_REQUEST_SECONDS)
    data, descriptors, _, _ = socket.recv_fds(connection, _PIECE_BYTES, 3)
    try:
        while not data.endswith(b"\n"):
            connection.settimeout(max(end - time.monotonic(), 0.001))
            more = connection.recv(_PIECE_BYTES)
            if not more or len(data) > _REQUEST_BYTES:
                raise ValueError("the request is not a line")
            data += more
        request = json.loads(data)
        if not isinstance(request, dict):
            raise ValueError("the request is no object")
        connection.sendall(_HEARD)
    except BaseException:
        _close_all(descriptors)
        raise
    connection.settimeout(None)
    return request, list(descriptors)


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # the caller has gone
        connection.sendall(json.dumps(answer).encode() + b"\n")


class _Conversation:
    """One connection to a lab. A context manager. What a lab that is stopped would keep waiting fails with BlockingIOError."""

    def __init__(self, path: Path) -> None:
        self._path, self._said = path, b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.limit(_SILENT_SECONDS)

    def limit(self, seconds: int) -> None:
        """Of each wait from now on; 0: none. The kernel's, since Python's is of sockets that fail at once where others wait to connect."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, 0))

    def begin(self, line: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a request; returns when it has been heard."""
        self._socket.connect(str(self._path))
        sent = socket.send_fds(self._socket, [line], list(descriptors)) if descriptors else 0
        if sent < len(line):  # sending nothing fails, too, once the answer is there and the lab has closed
            self._socket.sendall(line[sent:])
        self.line()

    def line(self) -> bytes:
        """The next one; nothing where there is none, or no whole one."""
        while b"\n" not in self._said:
            more = self._socket.recv(_PIECE_BYTES)
            if not more:
                return b""
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line

    def __enter__(self) -> _Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class Client:
    """Commands a running lab. Each call is a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, descriptors: tuple[int, ...] = (), **request: Any) -> Any:
        """Sends a request and waits for its answer.

        Raises:
            WrongRequest: what is asked for is not possible there.
            NoLab: there is none at this path, or it is still being built.
            NoAnswer: it is stopped. What was asked for is not done later either, unless it had been begun.
            LabError: it failed, or it went down meanwhile; or the request is too long.
        """
        line = json.dumps(request).encode() + b"\n"
        if len(line) > _REQUEST_BYTES:
            raise LabError(
                f"the request takes {len(line)} bytes, of {_REQUEST_BYTES} at most: fewer arguments or variables"
            )
        try:
            text = self._answer_to(line, descriptors, is_program=request.get("do") == "exec")
        except (FileNotFoundError, ConnectionRefusedError):
            raise NoLab(self._missing()) from None
        except BlockingIOError:
            raise NoAnswer(self._silent()) from None
        except (ConnectionResetError, BrokenPipeError):
            text = b""
        except OSError as error:
            raise LabError(f"{self._path}: {error}") from None
        if not text:
            raise LabError("the lab went down")
        answer = json.loads(text)
        if "error" in answer:
            raise (WrongRequest if answer.get("is_wrong") else LabError)(answer["error"])
        return answer.get("result")

    def _answer_to(self, line: bytes, descriptors: tuple[int, ...], *, is_program: bool) -> bytes:
        """Raises BlockingIOError where the lab does not hear; a program it lets run for as long as it takes."""
        with _Conversation(self._path) as lab:
            lab.begin(line, descriptors)
            if is_program:
                lab.limit(0)
            while True:
                try:
                    return lab.line()
                except BlockingIOError:  # it has much to do, or has been stopped meanwhile: does it hear others?
                    with _Conversation(self._path) as other:
                        other.begin(b"{}\n")

    def _silent(self) -> str:
        keeper, group = keeper_of(self._path), ""
        with suppress(ProcessLookupError):
            group = f", or kill -CONT -{os.getpgid(keeper)}" if keeper else ""
        return f"the lab {self._path.name} does not answer; perhaps it is stopped: let it go on, by fg where it was started{group}"

    def _missing(self) -> str:
        """Why nobody answers."""
        if keeper_of(self._path) is None:
            return "no lab is up under this name: gradwire lab up"
        name = self._path.name
        return f"the lab {name} is being built or taken down: wait for it, or gradwire lab --name {name} down"
