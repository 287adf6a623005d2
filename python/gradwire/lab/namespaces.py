"""Network namespaces of hosts, and the programs that run in them.

They are held open by file descriptors only: nothing is left of them when the process ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from gradwire.lab import _syscalls

_OWN = "/proc/thread-self/ns/net"
_ENDING_S = 3.0  # what all programs together have to end by themselves


class Program(Protocol):
    """A running program, as `subprocess.Popen` and `nursery.Forked` are."""

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; subprocess.TimeoutExpired while it still runs after `timeout` seconds."""

    def send_signal(self, sig: int, /) -> None:
        """Nothing where it has ended; so too those below."""

    def terminate(self) -> None:
        """Asks it to end."""

    def kill(self) -> None:
        """Ends it at once."""


Start = Callable[..., Program]  # (command, **options of Popen): `subprocess.Popen` or `Nursery.start`


class Namespaces:
    """One network namespace for each host, numbered from 0, beside the one of the thread that makes this."""

    def __init__(self) -> None:
        """Holds the current namespace, to come back to."""
        self._here = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        self._hosts: list[int] = []
        self._children: list[Program] = []

    def add(self) -> int:
        """Makes the next host's; returns the host's number."""
        _syscalls.unshare(_syscalls.CLONE_NEWNET)
        try:
            self._hosts.append(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))
        finally:
            _syscalls.set_namespace(self._here, _syscalls.CLONE_NEWNET)
        return len(self._hosts) - 1

    def path(self, host: int) -> Path:
        """A name of a host's namespace for programs that take one, while this process runs."""
        return Path(f"/proc/{os.getpid()}/fd/{self._hosts[host]}")

    @contextmanager
    def on_host(self, host: int) -> Iterator[None]:
        """Within it, this thread's new sockets belong to the host."""
        _syscalls.set_namespace(self._hosts[host], _syscalls.CLONE_NEWNET)
        try:
            yield
        finally:
            _syscalls.set_namespace(self._here, _syscalls.CLONE_NEWNET)

    def spawn(self, host: int, command: Sequence[str], *, start: Start = subprocess.Popen, **options: Any) -> Any:
        """Starts a program on a host by `start(command, **options)`, which returns it. `end_programs` ends it."""
        with self.on_host(host):  # a child inherits the network namespace of the thread that starts it
            child = start(command, **options)
        self._children = [*(other for other in self._children if other.poll() is None), child]
        return child

    def signal(self, host: int, number: int, known: Collection[int] = ()) -> set[int]:
        """Sends a signal to every process on a host but those that are known and this one; returns their numbers."""
        inode = os.fstat(self._hosts[host]).st_ino
        found = set()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it has ended meanwhile, or is a kernel's
                pid = int(entry.name) if entry.name.isdecimal() else 0
                is_new = pid > 1 and pid != os.getpid() and pid not in known
                if is_new and (entry / "ns/net").stat().st_ino == inode:
                    os.kill(pid, number)
                    found.add(pid)
        return found

    def end_programs(self) -> None:
        """Ends the programs that were started: asks all of them first, and waits for a moment."""
        running = [child for child in self._children if child.poll() is None]
        for child in running:
            child.terminate()
            child.send_signal(signal.SIGCONT)  # a stopped one would not hear it
        end = time.monotonic() + _ENDING_S
        for child in running:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        for child in running:
            child.kill()  # nothing, where it has ended
        for child in running:
            child.wait()
        self._children.clear()

    def close(self) -> None:
        """Gives the namespaces up. What still runs in one keeps it."""
        for namespace in (*self._hosts, self._here):
            os.close(namespace)
        self._hosts.clear()
