"""A running network that other processes command over a Unix socket: what stands behind `gradwire lab`.

Each request is one line of JSON, with `do` as its verb, and each answer one line with `error` or the result. `exec` comes with
the caller's standard input, output and error as file descriptors, so that the program on the host has them as its own.
The socket's folder belongs to the user alone. When the process ends, network, processes and socket are gone.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradwire.lab.errors import LabError
from gradwire.lab.network import Network

_REQUEST_BYTES = 1 << 20  # an environment may be large; a longer request is refused
_GRACE_SECONDS = 3.0  # between asking a program to end and ending it


def folder() -> Path:
    """Where the sockets of this user's labs are; there as long as a lab is up.

    Raises:
        LabError: somebody else has made it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108  (the folder below is the user's alone)
    path = Path(base, f"gradwire-lab-{os.getuid()}")
    with suppress(FileNotFoundError):
        _check_own(path)
    return path


def _check_own(path: Path) -> None:
    status = path.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LabError(f"{path} belongs to somebody else or is open to others: remove it")


class Service:
    """Serves one network until it is told to end."""

    def __init__(self, network: Network, path: Path) -> None:
        self._network = network
        self._lock = threading.Lock()  # of everything but running programs
        self._verbs: dict[str, Callable[[dict[str, Any]], Any]] = {
            "set": self._set, "stats": self._stats, "kill": self._kill, "describe": self._describe,
        }  # fmt: skip
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = path
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_own(path.parent)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen()

    def run(self, ready: Callable[[], None]) -> None:
        """Answers until `down`, and says `ready` before."""
        try:
            ready()
            while True:
                connection, _ = self._listener.accept()
                try:
                    request, descriptors = _receive(connection)
                except (OSError, ValueError):
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
        self._listener.close()
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # another lab is there
            self._path.parent.rmdir()

    def _handle(self, connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
        with connection:
            try:
                if request.get("do") == "exec":
                    result: Any = self._exec(connection, request, descriptors)
                else:
                    with self._lock:
                        result = self._verbs[request["do"]](request)
                _answer(connection, {"result": result})
            except (LabError, OSError, KeyError, TypeError, ValueError) as error:
                _answer(connection, {"error": str(error)})
            finally:
                for descriptor in descriptors:
                    with suppress(OSError):
                        os.close(descriptor)

    def _set(self, request: dict[str, Any]) -> None:
        self._network.set(request["hosts"], request["rails"], **request["changes"])

    def _stats(self, _request: dict[str, Any]) -> list[dict[str, Any]]:
        return self._network.statistics()

    def _kill(self, request: dict[str, Any]) -> int:
        return sum(self._network.signal(host, request["signal"]) for host in request["hosts"])

    def _describe(self, _request: dict[str, Any]) -> dict[str, Any]:
        layout = self._network.layout
        return {"hosts": layout.hosts, "rails": layout.rails, "switch": self._network.kind, "pid": os.getpid()}

    def _exec(self, connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
        """Runs a program on a host; ends it when the caller goes away. Returns its status as a shell would."""
        if len(descriptors) != 3:
            raise LabError("exec needs three file descriptors")
        with self._lock:
            try:
                child = self._network.spawn(
                    request["host"], request["command"], stdin=descriptors[0], stdout=descriptors[1], stderr=descriptors[2],
                    env=request["environment"], cwd=request["folder"], start_new_session=True,
                )  # fmt: skip
            except FileNotFoundError as error:
                raise LabError(f"{error.filename}: not found") from None
        for descriptor in descriptors:  # the child has its own: end of file must reach a pipe's reader when it ends
            os.close(descriptor)
        descriptors.clear()
        _wait(child, connection)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _wait(child: subprocess.Popen[Any], connection: socket.socket) -> None:
    """Until the child ends; asks it to end, and then ends it, when the connection is closed."""
    with selectors.DefaultSelector() as selector, os.fdopen(os.pidfd_open(child.pid)) as ended:
        selector.register(ended, selectors.EVENT_READ)
        selector.register(connection, selectors.EVENT_READ)
        if ended not in {key.fileobj for key, _ in selector.select()}:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            selector.unregister(connection)
            if not selector.select(_GRACE_SECONDS):
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request and the descriptors that came with its first part."""
    data, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
    while not data.endswith(b"\n"):
        more = connection.recv(_REQUEST_BYTES)
        if not more or len(data) > _REQUEST_BYTES:
            raise ValueError("the request is not a line")
        data += more
    request = json.loads(data)
    if not isinstance(request, dict):
        raise ValueError("the request is no object")
    return request, list(descriptors)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # the caller has gone
        connection.sendall(json.dumps(answer).encode() + b"\n")


class Client:
    """Commands a running lab. Each call is a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, descriptors: tuple[int, ...] = (), **request: Any) -> Any:
        """Sends a request and waits for its answer.

        Raises:
            LabError: there is no lab at this path, it refused, or it went down meanwhile.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(str(self._path))
                line = json.dumps(request).encode() + b"\n"
                sent = socket.send_fds(connection, [line], list(descriptors)) if descriptors else 0
                connection.sendall(line[sent:])
            except (FileNotFoundError, ConnectionRefusedError):
                raise LabError("no lab is up under this name: gradwire lab up") from None
            with connection.makefile() as answers:
                text = answers.readline()
        if not text:
            raise LabError("the lab went down")
        answer = json.loads(text)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer.get("result")

    def is_up(self) -> bool:
        """Whether a lab answers."""
        try:
            self.ask(do="describe")
        except LabError:
            return False
        return True
