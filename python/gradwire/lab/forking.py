"""The nursery's process: imports modules, and then forks a worker for each request that comes (`nursery`).

A request is JSON with descriptors: the worker's three streams, the socket on which its number and then its exit status are told, and
its network namespace if that is another one than this process's.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire.lab import _syscalls

MODULE = "gradwire.lab.forking"
LONGEST_REQUEST_BYTES = 1 << 20
_DESCRIPTORS_MIN, _DESCRIPTORS_MAX = 4, 5


@dataclass(frozen=True)
class Request:
    """A worker that was asked for.

    Attributes:
        command: a script, or `-m` and a module; and its arguments.
        environment: all of it.
        folder: where it starts.
        session: whether it has one of its own.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    session: bool


def serve(orders: socket.socket) -> list[str] | None:
    """Forks until nobody can ask any more. Returns None then, and in each worker the command that it is to be."""
    itself = os.getpid()
    told: dict[int, socket.socket] = {}  # by the worker's number
    ended, ends = socket.socketpair()
    for each in (ended, ends):
        each.setblocking(False)
    signal.set_wakeup_fd(ends.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([orders, ended], [], [])
        if ended in ready:
            ended.recv(1 << 10)
            _reap(told)
        if orders in ready:
            message, descriptors, _, _ = socket.recv_fds(orders, LONGEST_REQUEST_BYTES, _DESCRIPTORS_MAX)
            if not message:
                return None
            pid = _forked(orders, len(descriptors))
            if pid == 0:
                _forget((orders, ended, ends, *told.values()))
                return _grow_up(Request(**json.loads(message)), descriptors, itself)
            if pid is not None:
                told[pid] = socket.socket(fileno=descriptors.pop(3))
                with suppress(OSError):  # who asked may have gone
                    told[pid].send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)


def _forked(orders: socket.socket, descriptors: int) -> int | None:
    """As `os.fork`. None: there is no room for a process, or was none for all of its descriptors, which is said to who asked."""
    try:
        if descriptors < _DESCRIPTORS_MIN:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os.fork()
    except OSError as error:
        with suppress(OSError):  # who asked may have gone
            orders.send(str(error).encode())
        return None


def _reap(told: dict[int, socket.socket]) -> None:
    """Tells how the workers ended that have, each to who asked for it."""
    with suppress(ChildProcessError):  # none is left
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            asked = told.pop(pid, None)  # none: a module has started it while it was imported
            if asked is not None:
                with asked, suppress(OSError):  # who asked may have gone
                    asked.send(str(status).encode())


def _forget(sockets: Iterable[socket.socket]) -> None:
    """Within a worker: it has none of what belongs to the process that it comes from."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in sockets:
        each.close()


def _grow_up(request: Request, descriptors: Sequence[int], parent: int) -> list[str]:
    """Makes the forked process what was asked for; returns its command."""
    _syscalls.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if request.session:
        os.setsid()
    for descriptor in descriptors[4:]:
        _syscalls.set_namespace(descriptor, _syscalls.CLONE_NEWNET)
    for stream in (0, 1, 2):
        os.dup2(descriptors[stream], stream)
    for descriptor in set(descriptors) - {0, 1, 2}:
        os.close(descriptor)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    return request.command


def become(command: Sequence[str]) -> None:
    """Runs a script, or a module, as this interpreter's main program."""
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    main = types.ModuleType(
        "__main__"
    )  # for as long as the interpreter is there: functions that run at its exit use it
    main.__file__ = command[0]
    sys.modules["__main__"] = main
    exec(compile(Path(command[0]).read_text(), command[0], "exec"), vars(main))  # noqa: S102  (the script that was asked for)


def main() -> None:
    """Arguments: the descriptor on which requests come, and the modules."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # a fifth of an import of torch is collections that find nothing
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # a collection in a worker would write to all that it shares
    command = serve(orders)
    if command is not None:
        become(command)
