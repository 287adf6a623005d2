"""Results that come to the caller's tensors whether or not somebody waits for them.

A result that goes through a buffer (lists, tensors with gaps, a GPU's) is copied into the caller's tensors when the end of the call is
seen (`_ending.py`). Who waits sees it. Of a Work that is dropped, or is not the one that is waited for, the completer does; and a later
call of the group that is waited for sends on their way what has come before it, as the order of a GPU's stream would.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence

from gradwire._completer import Completer
from gradwire._outbox import Op
from gradwire.torch._ending import Ending


class Deliveries:
    """Of one group, in the order of its calls: of two that write the same tensor the later one has the last word.

    Args:
        completer: sees the ends that nobody waits for.
    """

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._expected: deque[Ending] = deque()
        self._lock = threading.Lock()

    def expect(self, ops: Sequence[Op], ending: Ending) -> None:
        """The call is under way, and its caller may never ask for it."""
        self._expected.append(ending)
        self._completer.watch(ops, self.bring)

    def bring(self) -> None:
        """Sends the results of calls that have ended on their way, up to the first that has not."""
        if not self._expected:
            return
        with self._lock:
            while self._expected and self._expected[0].has_come():
                with contextlib.suppress(Exception):  # who waits for that call gets it
                    self._expected[0].settle()
                self._expected.popleft()
