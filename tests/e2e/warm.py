"""Starts ranks by forking a process that has imported torch: the import costs each rank two seconds and more of a core.

What a rank does from then on is its own: its environment, its output, gradwire's import, the end of its interpreter.
A rank whose environment decides something while torch is imported needs an interpreter of its own (`suits`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What most bodies import, beside torch itself.
PRELOADED = (
    "torch",
    "numpy",
    "pytest",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",
)
# Read while torch is imported; the forked process has what nearly every launch wants.
THREADS = {"OMP_NUM_THREADS": "1"}
LONGEST_REQUEST_BYTES = 1 << 20
TESTS = os.getpid()  # a sandbox is a fork of it, with process ids of its own


class Process:
    """A forked rank, as far as the tests use what subprocess.Popen offers."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: int) -> None:
        self.args, self.returncode = list(command), None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(_server())
        request = json.dumps({"command": list(command), "env": dict(env)}).encode()
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST_REQUEST_BYTES)
        socket.send_fds(self._connection, [request], [output])
        self.pid = int(self._connection.recv(32))

    def wait(self, timeout: float | None = None) -> int:
        """The exit status as subprocess gives it; subprocess.TimeoutExpired while the rank still runs after `timeout` seconds."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                answer = self._connection.recv(32)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            if not answer:
                raise RuntimeError("the process that ranks are forked from has ended")
            self.returncode = os.waitstatus_to_exitcode(int(answer))
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status, or None while the rank runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing for a rank that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """At once, without a word."""
        self.send_signal(signal.SIGKILL)


def suits(env: Mapping[str, str]) -> bool:
    """Whether a rank with this environment is the same forked as started anew."""
    decides = ("TORCH", "PYTHON", "LD_", "MKL_")
    others = any(env[name] != os.environ.get(name) for name in env if name.startswith(decides))
    return not others and all(env.get(name) == value for name, value in THREADS.items()) and os.getpid() == TESTS


@functools.cache
def _server() -> str:
    """Path of the socket where the process that has torch listens; it is started when first asked for."""
    folder = tempfile.TemporaryDirectory(prefix="gradwire-warm-")
    path = str(Path(folder.name) / "socket")
    server = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-u", __file__, path],
        env={**os.environ, **THREADS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the process that ranks are forked from did not start: {server.wait()}")
    atexit.register(_end, server, folder)
    return path


def _end(server: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    if os.getpid() == TESTS:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        folder.cleanup()


def serve(path: str) -> Sequence[str] | None:
    """Forks for each request. Returns None when stdin closes, and in each child the command that it is to be."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    os.write(1, b"ready\n")
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ, None)
        selector.register(listener, selectors.EVENT_READ, None)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    _reap(selector, key)
                elif key.fd == 0:
                    return None
                elif (command := _fork(selector, listener)) is not None:
                    return command


def _fork(selector: selectors.BaseSelector, listener: socket.socket) -> Sequence[str] | None:
    """The command in the child, None in the parent."""
    connection, _ = listener.accept()
    message, descriptors, _, _ = socket.recv_fds(connection, LONGEST_REQUEST_BYTES, 1)
    request: dict[str, Any] = json.loads(message)
    pid = os.fork()
    if pid:
        os.close(descriptors[0])
        connection.send(str(pid).encode())
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
        return None
    for key in list(selector.get_map().values()):
        if key.data is not None:
            key.data[1].close()
            os.close(key.fd)
    connection.close()
    listener.close()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (descriptors[0], 1), (descriptors[0], 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(descriptors[0])
    os.environ.clear()
    os.environ.update(request["env"])
    return list(request["command"])


def _reap(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, connection = key.data
    _, status = os.waitpid(pid, 0)
    selector.unregister(key.fd)
    os.close(key.fd)
    with contextlib.suppress(OSError):  # whoever asked may have ended
        connection.send(str(status).encode())
    connection.close()


def become(script: str, arguments: Sequence[str]) -> None:
    """Runs a script as this interpreter's main program."""
    faulthandler.enable()
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_text(), script, "exec"), vars(main))


if __name__ == "__main__":
    for module in PRELOADED:
        __import__(module)
    if (chosen := serve(sys.argv[1])) is not None:
        start = next(place for place, part in enumerate(chosen) if part.endswith(".py"))
        become(chosen[start], chosen[start + 1 :])
