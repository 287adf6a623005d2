"""A process tree with namespaces of its own, which leaves nothing behind however it ends.

    caller --fork--> keeper --fork--> process 1 of a new pid namespace --fork--> main
                     (new user, net, mount and pid namespaces are made here)

All links, bridges, filters and queues that `main` makes belong to its network namespace, and all processes to its pid
namespace. When process 1 ends, as it does after `main`, the kernel kills the others; when the last process is gone, it removes the
network. Process 1 does nothing but reap: it gets all whose parents have ended, and could not tell them from children that `main` still
asks for. The parent-death signal carries this up: if the caller is killed, the keeper is; if the keeper is, process 1 is. No name is
ever registered anywhere (as `ip netns add` would), so there is nothing that could leak.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import NoReturn

from gradwire.lab import _syscalls
from gradwire.lab.errors import LabError, NamespacesUnavailable

EXIT_INTERRUPTED = 130  # the shell's convention for a program ended by Ctrl-C
EXIT_TERMINATED = 128 + signal.SIGTERM  # and for one ended by SIGTERM
# Within this file: tell the caller's process why there is no sandbox.
_EXIT_NO_NAMESPACES, _EXIT_NO_PROC = 77, 78
_REASONS = {
    _EXIT_NO_NAMESPACES: "no network namespaces here: run as root, or allow user namespaces"
    " (sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0;"
    " in a container, start it with --privileged)",
    _EXIT_NO_PROC: "no /proc of its own for the lab here, without which its hosts cannot be told from other processes:"
    " in a container, start it with --privileged, or with nothing of /proc hidden (--security-opt systempaths=unconfined)",
}
_NAMESPACES = _syscalls.CLONE_NEWNET | _syscalls.CLONE_NEWNS | _syscalls.CLONE_NEWPID


def run(main: Callable[[], int], *, terminates_in_order: bool = False) -> int:
    """Runs `main` as described above and waits for it.

    Args:
        main: called in the new namespaces, where it has all rights over the network; its result is the exit status.
        terminates_in_order: SIGTERM to the caller raises SystemExit in `main`, once, and the caller waits for what `main` does
            about it; else it ends the caller, and all else with it, at once. Only in a process's main thread.

    Returns:
        The exit status of `main`; 1 if it raised (the error is on standard error), 130 if it was interrupted, 143 if terminated.

    Raises:
        NamespacesUnavailable: neither root nor user namespaces can be had here, or no /proc in them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    caller = os.getpid()
    with _child(lambda: _keep(main, caller), is_told=terminates_in_order) as keeper:
        status = _wait(keeper)
    if status in _REASONS:
        raise NamespacesUnavailable(_REASONS[status])
    return status


def _keep(main: Callable[[], int], caller: int) -> int:
    """Makes the namespaces, starts process 1 in them and waits for it. Runs in the keeper."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # here and in process 1; it reaches the process of `main` too
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TERMINATED))
    _hear_sigterm()
    try:
        _enter_namespaces()
    except OSError:
        return _EXIT_NO_NAMESPACES
    _syscalls.die_with_parent(signal.SIGKILL)  # after the change of user, which would clear it
    if os.getppid() != caller:
        return 1  # the caller was gone before the line above
    keeper_lives, keeper_holds = os.pipe()
    with _child(lambda: _be_first(main, keeper_lives, keeper_holds)) as first:
        os.close(keeper_lives)
        return _wait(first)


def _be_first(main: Callable[[], int], keeper_lives: int, keeper_holds: int) -> int:
    """Process 1: nothing survives it."""
    os.close(keeper_holds)
    _syscalls.die_with_parent(signal.SIGKILL)
    os.set_blocking(keeper_lives, False)
    with suppress(BlockingIOError):
        os.read(keeper_lives, 1)  # end of file: the keeper was gone before the parent-death signal was asked for
        return 1
    try:
        _syscalls.mount_proc()
    except OSError:  # as where a container hides parts of /proc; in the one that is there processes have other numbers
        return _EXIT_NO_PROC
    with _child(lambda: _lead(main)) as leader:
        _hear_sigterm()
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == leader:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


def _lead(main: Callable[[], int]) -> int:
    """The process of `main`, which Ctrl-C and SIGTERM end in good order."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _leave)
    _hear_sigterm()
    return main()


def _leave(*_: object) -> NoReturn:
    """Once: who terminates a whole process group, as timeout(1) does, is heard directly and by what the caller passes on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(EXIT_TERMINATED)


@contextmanager
def _child(body: Callable[[], int], *, is_told: bool = True) -> Iterator[int]:
    """A forked process that ends with the result of `body`, to which SIGTERM to this one is passed on meanwhile if `is_told`.

    SIGTERM is held back until this process can pass it on, and in the child until `body` says `_hear_sigterm`: what a handler of its
    parent did there would end process 1, and all else with it at once.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        child = os.fork()
        if child == 0:
            _in_child(body)
        with _terminating(child) if is_told else nullcontext():
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield child
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hear_sigterm() -> None:
    """What was held back comes now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextmanager
def _terminating(child: int) -> Iterator[None]:
    """SIGTERM to this process is passed on to the child meanwhile."""

    def pass_on(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _enter_namespaces() -> None:
    """As root directly; else with a user namespace in which this user is root. Raises OSError where neither works."""
    if os.geteuid() == 0:
        with suppress(PermissionError):  # root of a container without the right to make namespaces: try as a user
            _syscalls.unshare(_NAMESPACES)
            return
    user, group = os.geteuid(), os.getegid()
    _syscalls.unshare(_syscalls.CLONE_NEWUSER | _NAMESPACES)
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as table:
            table.write(line)


def _in_child(body: Callable[[], int]) -> None:
    """Ends this forked process with the result of `body`; never returns into the caller's copy of the stack."""
    status = 1
    try:
        status = body()
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
    except BaseException:  # noqa: BLE001  a fork must not unwind further
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _wait(child: int) -> int:
    """Exit status of `child`. Ctrl-C is left to the child, which gets it as well and ends by itself."""
    found = None
    while found is None:
        with suppress(KeyboardInterrupt):
            # It can be asked again: the interrupt may come when the call has returned and its result is not here yet.
            found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    with suppress(KeyboardInterrupt):
        os.waitpid(child, 0)
    return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status
