"""Whether a flood of this process's ports is worth a warning, and what it is made of.

The engine notices one within 150 ms and holds the rate against it at once (docs/security.md), whoever sends it. A warning is for people:
it waits until a flood has lasted for a second, as hellos to a large group that is just being formed do not, and it says what came, by the
engine's counters: that much comes that is nobody's makes nobody a stranger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# More than three times as long as one goes on counting as a flood that has ended (LEVEL_MAX in the engine's flood.rs).
LASTS_S = 1.0
# What the engine counts of a flood, and what that may be.
_MADE_OF = {
    "datagrams_unknown": "is for no group of this process (strangers, or ranks of a group that has ended here or is not formed yet)",
    "datagrams_not_authentic": "was made by nobody with the keys (strangers, or a peer whose keys ran ahead while all from it was lost)",
    "datagrams_replayed": "has come before (a network that doubles packets, or somebody who repeats them)",
}


class FloodWatch:
    """Watches the ports of one process."""

    def __init__(self) -> None:
        # When the flood was first seen, and what had been counted.
        self._before: tuple[float, dict[str, int]] | None = None
        self._is_told = False

    def update(self, now_s: float, is_flooded: bool, stats: Mapping[str, Any]) -> str | None:
        """What most of a flood is that lasts; empty: the one that was told is over; None: no news.

        Args:
            now_s: of a monotonic clock.
            is_flooded: what the groups' `watch()` returned.
            stats: the engine's.
        """
        if not is_flooded:
            was_told, self._is_told, self._before = self._is_told, False, None
            return "" if was_told else None
        if self._is_told:
            return None
        if self._before is None:
            self._before = now_s, self._counted(stats)
            return None
        since_s, before = self._before
        if now_s - since_s < LASTS_S:
            return None
        self._is_told, counted = True, self._counted(stats)
        return _MADE_OF[max(_MADE_OF, key=lambda name: counted[name] - before[name])]

    @staticmethod
    def _counted(stats: Mapping[str, Any]) -> dict[str, int]:
        return {name: int(stats[name]) for name in _MADE_OF}
