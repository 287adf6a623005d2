"""Whether this host's own kernel refuses what a process sends, for so long that a job waits for it.

Datagrams are refused in good health as well: addresses of a peer that have no route are tried while a group is formed, and a path whose
card is gone is looked for again. So it is news only where many are and a collective waits. Each counts as lost like on the way
(`send_refused`), and only who looks at this host can mend it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

# Between two looks at least: what is refused for less is over before somebody reads of it.
EVERY_S = 1.0
# Refused datagrams in one look, and their share of all: more than tries of a path that is gone, and fewer than those of a rank all of
# whose full datagrams are refused, which tries some ten times a second.
REFUSED_MIN = 5
SHARE = 0.1

_GONE = "is an interface down, or its address or a route gone?"
_WHY = {
    errno.EMSGSIZE: "has the MTU of an interface become smaller? Groups that are formed from now on fit it",
    errno.EPERM: "does a firewall of this host drop it?",
    errno.EACCES: "does a firewall of this host drop it?",
    errno.ENOBUFS: "is the queue of its device full?",
    **dict.fromkeys((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EINVAL, errno.ENODEV), _GONE),
}  # fmt: skip


class RefusalWatch:
    """Watches what one process sends."""

    def __init__(self) -> None:
        self._before: tuple[float, int, int] | None = None
        self._is_told = False

    def update(self, now_s: float, stats: Mapping[str, Any], waited_s: float) -> str | None:
        """What is refused and why; empty: what was told is over; None: no news.

        Args:
            now_s: of a monotonic clock.
            stats: the engine's.
            waited_s: for how long the oldest collective has waited.
        """
        sent, refused = stats["datagrams_sent"], stats["send_refused"]
        before = self._before or (now_s, sent, refused)
        if self._before is not None and now_s - before[0] < EVERY_S:
            return None
        self._before = now_s, sent, refused
        took, lost = sent - before[1], refused - before[2]
        number = stats["send_refused_errno"]
        is_refused = lost >= max(REFUSED_MIN, SHARE * (took + lost))
        if self._is_told:
            self._is_told = is_refused or took == 0  # where nothing leaves, nothing is known
            return None if self._is_told else ""
        if not (is_refused and number and waited_s >= EVERY_S):
            return None
        self._is_told = True
        name = errno.errorcode.get(number, str(number))
        why = f": {_WHY[number]}" if number in _WHY else ""
        return f"{lost} datagrams in {now_s - before[0]:.1f} s, {took} were taken: {os.strerror(number)} ({name}){why}"
