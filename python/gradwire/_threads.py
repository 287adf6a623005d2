"""Starting threads of gradwire's own, each a daemon, where the system may give no more of them.

Containers count threads as processes (`pids.max`), and so does `ulimit -u`: a rank whose workers load data may find either limit reached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gradwire.errors import EngineError


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """A thread that runs.

    Raises:
        EngineError: the system starts none. Fields: what.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # Python has no class for it, and does not hand the system's error on
        raise EngineError(
            f"starting the thread {name}: {error}. The limit of processes and threads of this user (ulimit -u) or of the container "
            "(pids.max) is reached, or no memory is left for the thread's stack: raise it, or start fewer workers",
            what=f"starting the thread {name}",
        ) from error
    return thread
