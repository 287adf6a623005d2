"""Sockets that a forked child leaves to its parent.

A worker that loads data inherits every socket of its rank and may outlive it. What it holds open is not free for the rank's successor, and
who asks there hears nothing, not even that the rank has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

_of_this_process: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def stays_here(one: socket.socket) -> socket.socket:
    """The same socket; a child that is forked from now on closes its copy."""
    _of_this_process.add(one)
    return one


def _close_copies() -> None:
    # Closed as they are: loops that watch them share their selectors with the parent's, which has to go on.
    for one in list(_of_this_process):
        with contextlib.suppress(OSError):
            one.close()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_close_copies)
