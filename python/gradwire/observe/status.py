"""The status socket: by it the own user, and nobody else, looks into a running rank.

A Unix socket of mode 0600 in a folder of mode 0700 that belongs to the user, named by job, rank, and process, whose number is only
its own within one namespace of one host: several containers, or labs, may see the same folder, and so may hosts that share a file
system. One that another host has made refuses here while its process lives, so nobody removes it for that. It only answers: a client
sends one line of JSON, `{"ask": "stats"}` or `{"ask": "timelines"}` (with `"calls": 100` for no more collectives of each group), with
`"every_s"` for an answer again and again, and gets lines of JSON. One thread serves all clients without ever waiting for one: who does
not read gets no further answer and is dropped.

A rank may run for months, and its socket's file lies where others clear up: it has the sticky bit and an age of an hour at most, which
say that it is in use, and is made anew where it has gone all the same, or its folder with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradwire import _accepting
from gradwire._forked import stays_here
from gradwire._threads import start_thread
from gradwire.errors import EngineError, GradwireError, StatusFolderError

logger = logging.getLogger("gradwire")

CLIENTS_MAX = 8
# More than a rank keeps.
CALLS_MAX = 1 << 20
REQUEST_BYTES_MAX = 4096
# Pauses between answers; the longest is a day.
EVERY_S_MIN = 0.1
EVERY_S_MAX = 86_400.0
# A client that takes nothing for so long is gone.
STUCK_S = 10.0
SUFFIX = ".sock"
JOB_CHARS_MAX = 40
DIGEST_BYTES = 4
# A process that starts looks at no more sockets than this, so that a full folder does not hold it up.
LOOKS = 256
CONNECT_TIMEOUT_S = 2.0
# So often a rank looks whether its socket is still there: whoever clears folders up does so once a day.
LOOK_EVERY_S = 3600.0
# A socket of another host, or of this one before it was started anew, is dead when its process has not said for so long that it lives:
# a day, which no two clocks differ by.
ELSEWHERE_S = 86_400.0
# Names have little room: 107 bytes with their folder.
HOST_DIGEST_BYTES = 3
# Linux: struct ucred, three integers.
CREDENTIALS = struct.Struct("3i")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def status_folder() -> Path:
    """The folder of the user's status sockets, made if it is not there.

    Raises:
        StatusFolderError: somebody else owns it, or others may look into it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = Path(runtime) if runtime and os.access(runtime, os.W_OK) else None
    folder = Path(f"/tmp/gradwire-{user_outside()}") if parent is None else parent / "gradwire"  # noqa: S108  checked below
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise StatusFolderError(f"no folder for status sockets: {error}", folder=str(folder)) from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise StatusFolderError(
            f"{folder} is not a folder that only user {os.geteuid()} can look into: remove it or set XDG_RUNTIME_DIR",
            folder=str(folder),
        )
    return folder


def job_name_of(text: str) -> str:
    """A job's name as its ranks, and so their sockets, have it: without what a file's name may not hold, and not too long.

    Of a long one it is the beginning and a number for the whole: what tells paths and addresses apart is their ends.
    """
    name = re.sub(r"[^A-Za-z0-9_.:-]", "_", text)
    if len(name) <= JOB_CHARS_MAX:
        return name
    digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=DIGEST_BYTES).hexdigest()
    return f"{name[: JOB_CHARS_MAX - 1 - len(digest)]}-{digest}"


def user_outside() -> int:
    """This user's number outside of its user namespace: within one of their own all users are root, and would take root's folder."""
    user = os.geteuid()
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return user
    ranges = [tuple(map(int, line.split())) for line in lines]
    return next((outside + user - inside for inside, outside, many in ranges if inside <= user < inside + many), user)


def _process() -> str:
    """This process's number, the inode of the namespace that it is of, and a number for the host: the first namespace of each is alike."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"{os.getpid()}-{namespace}-{_host()}"


def _host() -> str:
    """A number for this host since it was started."""
    try:
        boot = _BOOT_ID.read_bytes()
    except OSError:
        boot = socket.gethostname().encode()
    return hashlib.blake2b(boot, digest_size=HOST_DIGEST_BYTES).hexdigest()


def _may_remove(path: Path) -> bool:
    """Whether a socket that refuses has been left by a dead process: of this host, or of an earlier version, which did not say where."""
    host = path.name.removesuffix(SUFFIX).rpartition(".")[2].split("-")[2:]
    return host in ([], [_host()]) or time.time() - path.lstat().st_mtime > ELSEWHERE_S


def remove_dead(folder: Path) -> None:
    """Removes sockets of processes that were killed: those had no time for it."""
    ours = f"-{_process().partition('-')[2]}"
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in itertools.islice(entries, LOOKS):
            name, suffix = os.path.splitext(entry.name)
            # A process that runs is not disturbed, as far as its number says that it does.
            if suffix == SUFFIX and not (name.endswith(ours) and _runs(name.rpartition(".")[2].removesuffix(ours))):
                is_alive(Path(entry.path))


def _runs(number: str) -> bool:
    return number.isdecimal() and Path(f"/proc/{number}").exists()


def is_alive(path: Path) -> bool:
    """Whether somebody on this host listens there. Removed where its process has died."""
    try:
        connect(path, CONNECT_TIMEOUT_S).close()
    except BlockingIOError:
        return True  # as many wait there as can: its process stands still
    except ConnectionRefusedError:
        with contextlib.suppress(FileNotFoundError):
            if _may_remove(path):
                path.unlink()
        return False
    except OSError:
        return False
    return True


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection to who listens there.

    Raises:
        OSError: nobody does, or no more can wait there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


class StatusServer:
    """Answers on a socket of its own until it is stopped.

    Args:
        job, rank: of this process, for the socket's name.
        answers: what to ask for, and the function that gives it. What is a text is JSON. That of `timelines` takes `calls`, where
            the client says it.

    Raises:
        StatusFolderError: no folder that only this user can read.
        OSError: the socket cannot be made.
        EngineError: no thread can be started.
    """

    def __init__(self, job: str, rank: int, answers: Mapping[str, Callable[..., dict[str, Any] | str]]) -> None:
        folder = status_folder()
        remove_dead(folder)
        self._name = f"{job}.{rank}.{_process()}{SUFFIX}"
        self.path = folder / self._name
        self._answers = answers
        self._pid = os.getpid()
        self._clients: dict[socket.socket, _Client] = {}
        self._opens_s: float | None = None
        self._looks_s = time.monotonic() + LOOK_EVERY_S
        self._is_lost = False
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._listener, self._facts = self._listen()
        for readable in (self._listener, self._woken):
            self._selector.register(readable, selectors.EVENT_READ)
        try:
            self._thread = start_thread(self._run, "gradwire-status")
        except EngineError:
            # Who finds a socket that listens and is served by nobody takes this for a rank that stands still.
            self._remove()
            self._close()
            raise

    def stop(self) -> None:
        """Closes everything and removes the socket."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(timeout=5.0)
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.getpid() == self._pid and os.path.samestat(self.path.lstat(), self._facts):
                self.path.unlink()

    def _listen(self) -> tuple[socket.socket, os.stat_result]:
        """Gives a socket its name when it listens, and not before: who finds one that refuses takes it for a dead process's."""
        unnamed = self.path.with_suffix(".made")
        unnamed.unlink(missing_ok=True)
        listener = stays_here(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind(str(unnamed))
            unnamed.chmod(0o600)  # the folder has kept others out until now
            with contextlib.suppress(OSError):  # not every file system has it
                # Who removes old files of /tmp or of a runtime directory leaves those that have the sticky bit. Of sockets it leaves those
                # that the kernel names, too, but the kernel names this one as it was bound.
                unnamed.chmod(0o600 | stat.S_ISVTX)
            listener.listen(CLIENTS_MAX)
            listener.setblocking(False)
            unnamed.rename(self.path)
        except OSError:
            listener.close()
            unnamed.unlink(missing_ok=True)
            raise
        return listener, self.path.lstat()

    def _look_for_own(self) -> None:
        """Once an hour: says that the socket is in use, or makes it anew.

        Its file may have gone with the user's last login, or to somebody who cleared up.
        """
        if time.monotonic() < self._looks_s:
            return
        self._looks_s = time.monotonic() + LOOK_EVERY_S
        with contextlib.suppress(OSError):
            os.utime(self.path)  # it is in use
        if os.path.lexists(self.path):
            return
        try:
            self.path = status_folder() / self._name  # another one, where the runtime directory has gone too
            listener, self._facts = self._listen()
        except (StatusFolderError, OSError) as error:
            level = logging.INFO if self._is_lost else logging.WARNING
            logger.log(level, "status socket %s has gone and cannot be made again: %s", self.path, error)
            self._is_lost = True
            return
        self._is_lost = False
        logger.info("the status socket had gone, and is at %s", self.path)
        with contextlib.suppress(KeyError):  # not there while no descriptor is left for a client
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listener, self._opens_s = listener, None
        self._selector.register(listener, selectors.EVENT_READ)

    def _run(self) -> None:
        while True:
            self._look_for_own()
            self._open_again()
            for key, _ in self._selector.select(self._until_due()):
                if key.fileobj is self._woken:
                    self._close()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.fileobj)
            for connection, client in list(self._clients.items()):
                self._answer(connection, client)

    def _until_due(self) -> float:
        now = time.monotonic()
        dues = [client.due_s for client in self._clients.values() if client.due_s is not None and not client.pending]
        dues += [client.moved_s + STUCK_S for client in self._clients.values() if client.pending]
        dues += [self._looks_s] if self._opens_s is None else [self._looks_s, self._opens_s]
        return max(0.0, min(dues) - now)

    def _open_again(self) -> None:
        """Looks for clients again, some time after no descriptor was left for one."""
        if self._opens_s is not None and time.monotonic() >= self._opens_s:
            self._opens_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connection = stays_here(self._listener.accept()[0])
        except OSError as error:
            if not _accepting.has_gone(error):
                self._selector.unregister(self._listener)
                self._opens_s = time.monotonic() + _accepting.ACCEPT_PAUSE_S
            return
        if len(self._clients) >= CLIENTS_MAX or not _is_own_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._clients[connection] = _Client()
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: Any) -> None:
        """Reads a request, or learns that the client has gone; sends on what is pending."""
        client = self._clients.get(connection)
        if client is None:
            return
        try:
            arrived = connection.recv(REQUEST_BYTES_MAX)
            if not arrived or not client.take(arrived, self._answers):
                self._drop(connection)
                return
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        self._flush(connection, client)

    def _answer(self, connection: socket.socket, client: _Client) -> None:
        now = time.monotonic()
        if client.pending:
            if now - client.moved_s > STUCK_S:
                self._drop(connection)
            return
        if client.due_s is None or now < client.due_s:
            return
        try:
            answer = self._answers[client.ask](**client.options)
        except GradwireError as error:  # the engine has stopped
            answer = {"error": str(error)}
        text = answer if isinstance(answer, str) else json.dumps(answer)
        client.pending = memoryview(text.encode() + b"\n")  # what is left after each part is not copied
        client.moved_s = now
        client.due_s = None if client.every_s is None else now + client.every_s
        self._flush(connection, client)

    def _flush(self, connection: socket.socket, client: _Client) -> None:
        try:
            sent = connection.send(client.pending) if client.pending else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return
        if sent:
            client.pending, client.moved_s = client.pending[sent:], time.monotonic()
        if not client.pending and client.due_s is None and client.ask:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.pending else 0)
        self._selector.modify(connection, events)

    def _drop(self, connection: socket.socket) -> None:
        self._clients.pop(connection, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        connection.close()

    def _close(self) -> None:
        for connection in list(self._clients):
            self._drop(connection)
        for own in (self._listener, self._waker, self._woken, self._selector):
            own.close()


class _Client:
    """One connection: what was asked for, and what is not sent yet."""

    def __init__(self) -> None:
        self.request = b""
        self.ask = ""
        self.options: dict[str, int] = {}
        self.every_s: float | None = None
        self.due_s: float | None = None
        self.pending = memoryview(b"")
        self.moved_s = time.monotonic()

    def take(self, arrived: bytes, answers: Mapping[str, Any]) -> bool:
        """Takes a part of the request; False where it is none."""
        if self.ask:
            return False
        self.request += arrived
        if len(self.request) > REQUEST_BYTES_MAX:
            return False
        line, newline, _ = self.request.partition(b"\n")
        if not newline:
            return True
        try:
            asked = json.loads(line)
            self.ask = asked["ask"]
            if self.ask == "timelines" and asked.get("calls") is not None:
                self.options = {"calls": min(max(0, int(asked["calls"])), CALLS_MAX)}
            every_s = asked.get("every_s")
            self.every_s = None if every_s is None else min(max(EVERY_S_MIN, float(every_s)), EVERY_S_MAX)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return False
        self.due_s = time.monotonic()
        return isinstance(self.ask, str) and self.ask in answers


def _is_own_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())
