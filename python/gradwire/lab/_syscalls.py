"""The few Linux calls that the lab needs and Python's standard library does not offer before 3.12.

Nothing here decides anything; errors come back as OSError with the call's name.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_MS_REC_SLAVE = 0x4000 | (1 << 19)
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Moves the calling process into new namespaces (`CLONE_NEW*`)."""
    _check(_libc.unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    """Moves the calling thread into the namespace that `fd` is open on; `kind` is its `CLONE_NEW*` flag."""
    _check(_libc.setns(fd, kind), "setns")


def die_with_parent(signal_number: int) -> None:
    """Has the kernel send this process `signal_number` when the thread that started it ends, however it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def mount_proc() -> None:
    """Gives this mount namespace a /proc of its own process namespace, seen by nobody outside.

    What is mounted and unmounted outside is so here, too: a runtime directory that a logout has removed, and the next login's.
    """
    _check(_libc.mount(b"none", b"/", None, _MS_REC_SLAVE, None), "mount")
    _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None), "mount")
