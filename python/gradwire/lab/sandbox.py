"""A process tree with namespaces of its own, which leaves nothing behind however it ends.

    caller --fork--> keeper --fork--> process 1 of a new pid namespace --fork--> main
                     (new user, net, mount and pid namespaces are made here)

All links, bridges, filters and queues that `main` makes belong to its network namespace, and all processes to its pid
namespace. When process 1 ends, as it does after `main`, the kernel kills the others; when the last process is gone, it removes the
network. Process 1 does nothing but reap: it gets all whose parents have ended, and could not tell them from children that `main` still
asks for. The parent-death signal carries this up: if the caller is killed, the keeper is; if the keeper is, process 1 is. No name is
ever registered anywhere (as `ip netns add` would), so there is nothing that could leak.

Ctrl-Z stops `main` first, which may have a terminal to restore. Caller and keeper leave it to process 1, which sees that `main` has
stopped: a shell that saw its job stopped before would write on the terminal at the same time.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn

from gradwire.lab import _syscalls
from gradwire.lab.errors import LabError, NamespacesUnavailable

EXIT_INTERRUPTED = 130  # the shell's convention for a program ended by Ctrl-C
EXIT_TERMINATED = 128 + signal.SIGTERM  # and for one ended by SIGTERM
EXIT_HUNG_UP = 128 + signal.SIGHUP  # and for one whose terminal has gone
# Within this file: tell the caller's process why there is no sandbox.
_EXIT_NO_NAMESPACES, _EXIT_NO_PROC = 77, 78
_NO_PROC = (
    "no /proc of its own for the lab here, without which its hosts cannot be told from other processes:"
    " in a container, start it with --privileged, or with nothing of /proc hidden (--security-opt systempaths=unconfined)"
)
# Of Debian and Ubuntu: whether a user without root may have namespaces.
_ALLOWING = {"kernel.unprivileged_userns_clone": "1", "kernel.apparmor_restrict_unprivileged_userns": "0"}
# How many there may be, for each user; 0 where a hardened system allows none.
_LIMITING = tuple(f"user.max_{kind}_namespaces" for kind in ("user", "net", "pid", "mnt"))
_SYSCTLS = Path("/proc/sys")
_ERRNO_DIGITS = 8
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what asks a process to end in good order
_NAMESPACES = _syscalls.CLONE_NEWNET | _syscalls.CLONE_NEWNS | _syscalls.CLONE_NEWPID


def run(main: Callable[[], int], *, terminates_in_order: bool = False) -> int:
    """Runs `main` as described above and waits for it.

    SIGINT to the caller raises KeyboardInterrupt in `main`, once, also where a terminal sends it to all processes, and the caller waits
    for what `main` does about it. SIGTSTP, which a terminal sends to all, stops all when it has stopped `main`, which may have a handler.
    Outside a process's main thread both are left to the caller.

    Args:
        main: called in the new namespaces, where it has all rights over the network; its result is the exit status.
        terminates_in_order: SIGTERM and SIGHUP to the caller raise SystemExit in `main` in the same way; else they end the caller, and all
            else with it, at once. Only in a process's main thread. A SIGHUP that is ignored, as `nohup` has it, stays so.

    Returns:
        The exit status of `main`; 1 if it raised (the error is on standard error), 130 if it was interrupted, 143 if terminated, 129 if
        the terminal has gone.

    Raises:
        NamespacesUnavailable: neither root nor user namespaces can be had here, or no /proc in them.
    """
    _flush()
    caller = os.getpid()
    hears_signals = terminates_in_order or threading.current_thread() is threading.main_thread()
    told = _ending() if terminates_in_order else (signal.SIGINT,) if hears_signals else ()
    why, tells = os.pipe()
    os.set_blocking(why, False)
    try:
        with (
            _stops_last(main) if hears_signals else nullcontext(main) as leads,
            _child(lambda: _keep(leads, caller, (why, tells)), told) as keeper,
        ):
            status = _wait(keeper)
        with suppress(BlockingIOError):  # it has namespaces, and this is the status of `main`
            raise NamespacesUnavailable(_why_none(int(os.read(why, _ERRNO_DIGITS))))
    finally:
        os.close(why)
        os.close(tells)
    if status == _EXIT_NO_PROC:
        raise NamespacesUnavailable(_NO_PROC)
    return status


def _why_none(number: int) -> str:
    """What to do where the kernel has refused namespaces with this errno; sysctls are named that it has."""
    text = f"no network namespaces here ({os.strerror(number)})"
    if number in (errno.ENOSPC, errno.EUSERS):  # what the kernel says of a limit
        limits = " ".join(f"{name}={value}" for name in _LIMITING if (value := _sysctl(name)) is not None)
        return f"{text}: this user has as many as the system allows; raise the limit that is reached (sysctl {limits})"
    changes = " ".join(f"{name}={value}" for name, value in _ALLOWING.items() if _sysctl(name) not in (None, value))
    allow = f"allow user namespaces (sysctl {changes})" if changes else "allow user namespaces"
    return f"{text}: run as root, or {allow}; in a container, whose seccomp filter forbids them, start it with --privileged"


def _sysctl(name: str) -> str | None:
    with suppress(OSError):
        return (_SYSCTLS / name.replace(".", "/")).read_text().strip()
    return None


@contextmanager
def _stops_last(main: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """Within it, SIGTSTP does nothing in this process and those forked from it, and in `main`, of which one is given, what it does now."""
    now = signal.getsignal(signal.SIGTSTP)
    if now is None:  # it is not Python's, and could not be restored
        yield main
        return

    def leads() -> int:
        signal.signal(signal.SIGTSTP, now)
        return main()

    signal.signal(signal.SIGTSTP, lambda *_: None)  # not SIG_IGN, which programs would inherit
    try:
        yield leads
    finally:
        signal.signal(signal.SIGTSTP, now)


def _keep(main: Callable[[], int], caller: int, pipe: tuple[int, int]) -> int:
    """Makes the namespaces, starts process 1 in them and waits for it. Runs in the keeper. Why it has none the pipe tells the caller."""
    for number in _ending():
        signal.signal(number, lambda number, _: os._exit(128 + number))
    _hear()
    try:
        _enter_namespaces()
    except OSError as error:
        os.write(pipe[1], str(error.errno).encode())
        return _EXIT_NO_NAMESPACES
    for descriptor in pipe:
        os.close(descriptor)
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
        _hear()
        while True:
            ended, status = os.waitpid(-1, os.WUNTRACED)
            if ended == leader and os.WIFSTOPPED(status):
                if os.WSTOPSIG(status) == signal.SIGTSTP:
                    os.kill(
                        0, signal.SIGSTOP
                    )  # caller and keeper, too, if they are in its process group; process 1 it does not stop
            elif ended == leader:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


def _lead(main: Callable[[], int]) -> int:
    """The process of `main`, which SIGINT, SIGTERM and SIGHUP end in good order."""
    for number in _ending():
        signal.signal(number, _leave)
    _hear()
    return main()


def _leave(number: int, _: object) -> NoReturn:
    """Once: what reaches a whole process group, as Ctrl-C does, is heard directly and by what each process above passes on.

    It is ignored, not only taken for nothing: so do the programs that clean up, which a second Ctrl-C would end.
    """
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {number}
    )  # one that came between would be told as a race, by Python, on standard error
    signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


@contextmanager
def _child(body: Callable[[], int], told: Iterable[int] | None = None) -> Iterator[int]:
    """A forked process that ends with the result of `body`, to which these signals to this one, or all, are passed on meanwhile.

    They are held back until this process can pass them on, and in the child until `body` says `_hear`: what a handler of its
    parent did there would end process 1, and all else with it at once.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        child = forked()
        if child == 0:
            _in_child(body)
        with _passing_on(_ending() if told is None else told, child):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield child
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forked() -> int:
    """As `os.fork`; the child never collects what the caller left for its collector.

    That may belong to threads which are not in the child: where it goes its end waits for them, for ever. torch's process groups do.
    """
    collects = gc.isenabled()
    gc.disable()  # functions that run after a fork could make the child collect before its first line here
    try:
        child = os.fork()
        if child == 0:
            gc.freeze()
    finally:
        if collects:
            gc.enable()
    return child


def _ending() -> tuple[int, ...]:
    """Those that are heard: `nohup` has SIGHUP ignored, for all that its command starts."""
    ignores = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in _ENDING if number != signal.SIGHUP or not ignores)


def _hear() -> None:
    """What was held back comes now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


@contextmanager
def _passing_on(numbers: Iterable[int], child: int) -> Iterator[None]:
    """These signals to this process are passed on to the child meanwhile."""

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    with ExitStack() as afterwards:
        for number in numbers:
            afterwards.callback(signal.signal, number, signal.signal(number, pass_on))
        yield


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
            _flush()
        os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the caller has closed it
            stream.flush()


def _wait(child: int) -> int:
    """Exit status of `child`, as a shell has it."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code
