"""A running network that other processes command over a Unix socket: what stands behind `gradwire lab`.

Each request is one line of JSON, with `do` as its verb, and each answer a line that says that it has been heard and one with `error` or
the result. `exec` comes with the caller's standard input, output and error as file descriptors, so that the program on the host has
them as its own.
The socket's folder belongs to the user alone, and a lock beside it has one lab for each name, from before its network is built, and
says whose it is. When the process ends, network, processes, socket and lock are gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
_BUILDER_SECONDS = 30.0  # to remove what it has built: some seconds at most


def path_of(name: str) -> Path:
    """The socket of the lab of this name; where none is up or being built, that of one that would be built here.

    Who logs in has a runtime directory; what cron, `su` or a step of CI starts has none, and its labs are looked for all the same. A
    directory that somebody chose is the only one.

    Raises:
        LabError: somebody else has made the folder.
    """
    own, usual = folder() / name, _usual_folders()
    others = [other / name for other in usual if own.parent in usual and other != own.parent and _is_own(other)]
    return next((path for path in (own, *others) if _keeper_of(path) is not None), own)


def new_path_of(name: str) -> Path:
    """The socket for a lab of this name that is to be built.

    Raises:
        LabError: there is one that was built with another runtime directory, or is being built; or somebody else has made the folder.
    """
    path = path_of(name)
    if path.parent != folder():
        raise _is_taken(name)
    return path


def folder() -> Path:
    """Where the sockets of labs are that this user builds; there as long as a lab is up.

    Raises:
        LabError: somebody else has made it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # `su` leaves that of another user.
    base = runtime if runtime and os.access(runtime, os.W_OK) else "/tmp"  # noqa: S108  (the folder below is the user's alone)
    path = Path(base, f"gradwire-lab-{os.getuid()}")
    with suppress(FileNotFoundError):
        _check_own(path)
    return path


def _usual_folders() -> list[Path]:
    """With a runtime directory and without."""
    user = os.getuid()
    return [Path(base, f"gradwire-lab-{user}") for base in (f"/run/user/{user}", "/tmp")]  # noqa: S108  as above


def _is_taken(name: str) -> LabError:
    text = f"the lab {name} is up already, or being built: gradwire lab --name {name} down, or another --name"
    return LabError(text)


def _is_own(path: Path) -> bool:
    """Whether it is there, and nobody else can have put something into it."""
    try:
        _check_own(path)
    except (LabError, OSError):
        return False
    return path.is_dir()


def _check_own(path: Path) -> None:
    status = path.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LabError(f"{path} belongs to somebody else or is open to others: remove it")


def identity(pid: int) -> str:
    """Tells a process from every other one, also from a later one with its number; nothing, where there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{pid} {words[19]}"  # when it was started


def _keeper_of(path: Path) -> int | None:
    """The process that keeps the lab of this socket, or is building it."""
    with suppress(OSError, ValueError):
        told = _lock_path(path).read_text()
        pid = int(told.split()[0]) if told else 0
        if told and told == identity(pid):
            return pid
    return None


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def end_builder(path: Path) -> bool:
    """Ends a lab that answers nobody yet, as it is still being built, and waits until it has gone; False: there is none.

    Raises:
        LabError: it does not end.
    """
    pid = _keeper_of(path)
    if pid is None:
        return False
    with suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as keeper:
        if _keeper_of(path) == pid:  # still the one that is meant
            signal.pidfd_send_signal(keeper.fileno(), signal.SIGTERM)
        if not select.select([keeper], [], [], _BUILDER_SECONDS)[0]:
            raise LabError(f"process {pid}, which builds the lab, does not end")
    return True


class Claim:
    """The right to be the lab of a name, held until it is given up or the process ends. A context manager."""

    def __init__(self, path: Path, keeper: str) -> None:
        """Takes it, and makes the folder.

        Args:
            path: of the lab's socket.
            keeper: the `identity`, outside of the sandbox, of the process that SIGTERM is to reach.

        Raises:
            LabError: there is such a lab, or one is being built; or the folder is not the user's alone.
        """
        self.path, self._lock_path = path, _lock_path(path)
        self._lock: int | None = None
        try:
            while self._lock is None:
                self._lock = self._taken()
            os.ftruncate(self._lock, 0)
            os.write(self._lock, keeper.encode())
        except BaseException:
            self.give_up()
            raise

    def _taken(self) -> int | None:
        """The lock; None where the last one to have it has just removed its file, or the folder."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        lock = None
        try:
            _check_own(self.path.parent)
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), self._lock_path.stat()):
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError:
            raise _is_taken(self.path.name) from None
        if lock is not None:
            os.close(lock)
        return None

    def give_up(self) -> None:
        """Lets others have the name. The second time nothing is left to do."""
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
        with suppress(OSError):  # another lab is there
            self.path.parent.rmdir()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()


class Service:
    """Serves one network until it is told to end."""

    def __init__(self, network: Network, claim: Claim) -> None:
        self._network = network
        self._lock = threading.Lock()  # of everything but running programs
        self._verbs: dict[str, Callable[[dict[str, Any]], Any]] = {
            "set": self._set, "stats": self._stats, "kill": self._kill, "describe": self._describe, "run": self._run,
        }  # fmt: skip
        self._running: list[tuple[str, subprocess.Popen[Any]]] = []  # programs, and who has asked for them
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._claim = claim
        claim.path.unlink(missing_ok=True)  # of one that was killed
        self._listener.bind(str(claim.path))
        self._listener.listen()

    def run(self, ready: Callable[[dict[str, Any]], None]) -> None:
        """Answers until `down`; calls `ready` before, with what the network is."""
        try:
            ready(self._describe({}))
            while True:
                connection, _ = self._listener.accept()
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
            self._claim.path.unlink(missing_ok=True)
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
        keeper, group = _keeper_of(self._path), ""
        with suppress(ProcessLookupError):
            group = f", or kill -CONT -{os.getpgid(keeper)}" if keeper else ""
        return f"the lab {self._path.name} does not answer; perhaps it is stopped: let it go on, by fg where it was started{group}"

    def _missing(self) -> str:
        """Why nobody answers."""
        if _keeper_of(self._path) is None:
            return "no lab is up under this name: gradwire lab up"
        name = self._path.name
        return f"the lab {name} is being built or taken down: wait for it, or gradwire lab --name {name} down"
