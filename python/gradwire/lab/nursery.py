"""A process that has imported what workers need and forks them: importing torch costs each two seconds and more of a core.

A forked worker is one of its own in all else: its environment, files, session and output, its import of gradwire, the end of its
interpreter. It is in the network namespace and the folder of the thread that asked for it, as a child would be. But it does not import
modules of the folder in which it was started (`gradwire._interpreter`), not even with `-m`. `forking` is the other side.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any

from gradwire._interpreter import running
from gradwire.lab.crew import END_SECONDS, WorkerFailed
from gradwire.lab.forking import LONGEST_REQUEST_BYTES, MODULE

START_SECONDS = 300.0  # for imports from a cold disk; where they fail that is told at once
_NAMESPACE = "/proc/thread-self/ns/net"
_STREAMS = (0, 1, 2)


class Nursery:
    """Starts workers by forking. A context manager.

    Args:
        modules: what it imports first. Modules that start threads, or that a worker's environment decides on while they are imported,
            must not be among them.
        environ: variables that are read during these imports, on top of this process's own.
        flags: of the interpreter, such as `-u`.
    """

    def __init__(
        self, modules: Sequence[str], environ: Mapping[str, str] | None = None, flags: Sequence[str] = ()
    ) -> None:
        """Returns at once: the imports go on meanwhile."""
        self._namespace = os.stat(_NAMESPACE).st_ino
        # A file without a name: what looks for logs, or for who has one open, finds those of workers alone.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST_REQUEST_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [*running(f"from {MODULE} import main; main()", flags), str(theirs.fileno()), *modules],
                env={**os.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for who leads
            )

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
    ) -> Forked:
        """Starts a worker, as `subprocess.Popen` would; blocks until the imports are done.

        Args:
            command: this interpreter, and then a script, or `-m` and a module, with arguments.
            env: all of the worker's environment.
            stdin: as of Popen, and so are
            stdout: its output and
            stderr: its errors.
            start_new_session: else the worker's session is the nursery's.

        Raises:
            ValueError: another command.
            WorkerFailed: the imports failed or did not end, or there is no room for a process or its files.
        """
        if len(command) < 2 or command[0] != sys.executable or (command[1].startswith("-") and command[1] != "-m"):
            raise ValueError(f"what is forked is a script or a module of {sys.executable}: {command}")
        with ExitStack() as kept:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            kept.enter_context(theirs)
            descriptors, files = _streams(stdin, stdout, stderr, kept)
            descriptors.append(theirs.fileno())
            if os.stat(_NAMESPACE).st_ino != self._namespace:  # to enter one takes rights, also where it is the same
                descriptors.append(os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC))
                kept.callback(os.close, descriptors[-1])
            request = {
                "command": list(command[1:]),
                "environment": dict(env),
                "folder": os.getcwd(),
                "session": start_new_session,
            }
            with suppress(ConnectionError):  # it has ended: the answer below does not come
                socket.send_fds(self._orders, [json.dumps(request).encode()], descriptors)
        return Forked(command, self._born(ours), ours, files)

    def close(self) -> None:
        """Ends it, and whatever it started that still runs, at once, also while it imports."""
        self._orders.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _born(self, connection: socket.socket) -> int:
        """The number of the process that was asked for."""
        connection.settimeout(START_SECONDS)
        with suppress(TimeoutError):
            told = connection.recv(32)
            connection.settimeout(None)
            if told:
                return int(told)
        connection.close()
        raise WorkerFailed(f"no worker could be forked from a process that imports what they need: {self._why()}")

    def _why(self) -> str:
        """It says what it could not do; or it has ended, and the end of what it printed tells why."""
        with suppress(ConnectionError):
            is_heard = select.select([self._orders], [], [], END_SECONDS)[0]
            if is_heard and (said := self._orders.recv(LONGEST_REQUEST_BYTES)):
                return said.decode()
        self._log.seek(0)
        return "the end of what it printed:\n" + "\n".join(self._log.read().decode(errors="replace").splitlines()[-15:])


class Forked:
    """A worker, as far as `subprocess.Popen` is used for workers.

    Attributes:
        pid, args, stdin, stdout, stderr, returncode: as of Popen.
    """

    def __init__(
        self, args: Sequence[str], pid: int, connection: socket.socket, files: Sequence[IO[bytes] | None]
    ) -> None:
        self.args, self.pid, self._connection = args, pid, connection
        self.stdin, self.stdout, self.stderr = files
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; subprocess.TimeoutExpired while the worker still runs after `timeout` seconds."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                told = self._connection.recv(32)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            # The end of the nursery, which tells nobody, ended the worker too.
            self.returncode = os.waitstatus_to_exitcode(int(told)) if told else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status, or None while the worker runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing for a worker that has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended a moment ago
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def _streams(stdin: Any, stdout: Any, stderr: Any, kept: ExitStack) -> tuple[list[int], list[IO[bytes] | None]]:
    """What the worker has as its streams, to be closed here with `kept`; and this side's files of those that are pipes."""
    theirs: list[int] = []
    ours: list[IO[bytes] | None] = []
    for stream, given in zip(_STREAMS, (stdin, stdout, stderr), strict=True):
        ours.append(None)
        if given is None:
            theirs.append(stream)
        elif given == subprocess.STDOUT:
            theirs.append(theirs[1])
        elif given == subprocess.PIPE:
            reader, writer = os.pipe()
            theirs.append(reader if stream == 0 else writer)
            kept.callback(os.close, theirs[-1])
            ours[-1] = os.fdopen(writer, "wb") if stream == 0 else os.fdopen(reader, "rb")
        elif given == subprocess.DEVNULL:
            theirs.append(os.open(os.devnull, os.O_RDWR))
            kept.callback(os.close, theirs[-1])
        else:
            theirs.append(given if isinstance(given, int) else given.fileno())
    return theirs, ours
