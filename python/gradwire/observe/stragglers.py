"""Which rank this one has been waiting for: a decision over what the engine counts, made once a second.

Two kinds of waits make a rank a straggler. A single collective that has not ended after `straggler_warning_s`, whatever the reason; and
many short waits for the same rank: at least a fifth of the last seconds, in at least three separate waits and also without the longest
of them, so that one checkpoint is no news, however many waits of a millisecond stand beside it.
The engine says whom each collective waited for and why (gradwire_collectives::stragglers_of).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CAUSES = ("compute", "network", "receiver")
# Less than this of the time is what ranks differ by anyway.
SHARE = 0.2
# A straggler counts as such until it is waited for less than this.
SHARE_OVER = 0.05
EPISODES = 3
# A process that was heard so lately lives, or within two heartbeats, if they are shorter: what the engine says, too
# (UNANSWERED_MAX of crates/gradwire-collectives/src/group/waiting.rs).
HEARD_S = 1.0
HEARTBEATS = 2
# Heartbeats in a peer timeout.
BEATS = 10
# Windows of short waits, in times of the setting: steps of a second, and steps of many seconds.
WINDOWS = (2.0, 20.0)
# Between two samples, in times of the setting: a twentieth of the shorter window, and some two hundred of them in the longer one.
SAMPLE_EVERY = 0.1


@dataclass(frozen=True)
class Straggler:
    """A rank that this one waits for.

    Attributes:
        rank: in the group; dedicated servers are numbered behind its workers.
        cause: `compute` (it calls late), `network` (its bytes come late) or `receiver` (it takes its bytes late, or is not heard).
        text: one line for people.
    """

    rank: int
    cause: str
    text: str


# Seconds and waits by rank and cause.
Waits = dict[tuple[int, str], tuple[float, int]]


@dataclass
class _Sample:
    """What was waited for between two looks.

    Attributes:
        begun_s: the earlier one, of a monotonic clock.
        at_s: the later one.
        waits: of those alone who were waited for: in a large group most were at some time.
    """

    begun_s: float
    at_s: float
    waits: Waits = field(default_factory=dict)


class _Window:
    """The latest samples: sums are kept, since to make them anew at each look would take milliseconds in a large group.

    Args:
        span_s: how long a window is.
    """

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self.samples: deque[_Sample] = deque()
        self.total: Waits = {}
        # Samples that each of them is in: the last one takes the rounding errors of the sum away.
        self._found_in: dict[tuple[int, str], int] = {}

    def begin(self, sample: _Sample) -> None:
        """A new sample, to which nothing was added yet; those that are too old are left out."""
        self.samples.append(sample)
        while len(self.samples) > 1 and self.samples[0].at_s <= sample.at_s - self.span_s:
            for key, (waited, episodes) in self.samples.popleft().waits.items():
                self._found_in[key] -= 1
                if self._found_in[key]:
                    self.total[key] = (self.total[key][0] - waited, self.total[key][1] - episodes)
                else:
                    del self._found_in[key], self.total[key]

    def count(self, key: tuple[int, str], waits: tuple[float, int]) -> None:
        """Something that is added to the newest sample, before it is."""
        self.total[key] = _sum(self.total.get(key), waits)
        if key not in self.samples[-1].waits:
            self._found_in[key] = self._found_in.get(key, 0) + 1

    def longest(self, key: tuple[int, str]) -> tuple[float, float]:
        """Seconds of the longest wait for it, and those of the sample that tells of it."""
        found = ((sample.waits[key][0], sample.at_s - sample.begun_s) for sample in self.samples if key in sample.waits)
        return max(found, default=(0.0, 0.0))


class StragglerWatch:
    """Watches one group.

    Args:
        warning_s: how long a rank is waited for before it is told.
        peer_timeout_s: after which a silent rank is lost.
        workers: ranks of the group without its dedicated servers.
    """

    def __init__(self, warning_s: float, peer_timeout_s: float = math.inf, workers: float = math.inf) -> None:
        self._workers = workers
        self._heard_s = min(HEARD_S, HEARTBEATS * peer_timeout_s / BEATS)
        self.current: Straggler | None = None
        self._warning_s = warning_s
        self._windows = [_Window(window * warning_s) for window in WINDOWS]
        self._looked_s: float | None = None
        # How long each was waited for since the group was formed, by all looks so far.
        self._known: Waits = {}
        self._stuck = -1
        # The collective that is waited for, and how long of that this process stood still.
        self._waiting, self._still_s = -1, 0.0
        # When each rank was last seen as one, by cause.
        self._seen: dict[tuple[int, str], float] = {}

    def update(self, now_s: float, watch: Mapping[str, Any], still_s: float = 0.0) -> Straggler | None:
        """The straggler, where it is another one than before; None: no news.

        Args:
            now_s: of a monotonic clock.
            watch: what the group's `watch_news()` returned: `waiting`, and `stragglers` by rank, those who have not been waited for since
                the update before left out or not.
            still_s: how long this process stood still since the update before: it cannot know what the others did.
        """
        self._remember(now_s, watch["stragglers"])
        found = self._stuck_in(watch["waiting"], still_s) or self._often()
        if found is None:
            if self.current is not None and self._is_over(watch["waiting"], self.current):
                self.current = None
            return None
        self.current = found
        key = (found.rank, found.cause)
        seen_s = self._seen.get(key)
        self._seen[key] = now_s
        # What comes and goes, or is seen from two sides, is told once as long as it lasts.
        is_known = seen_s is not None and now_s - seen_s < WINDOWS[-1] * self._warning_s
        return None if is_known else found

    def name_of(self, rank: int) -> str:
        """As people know it."""
        return f"rank {rank}" if rank < self._workers else f"parameter server {rank - self._workers:.0f}"

    def _remember(self, now_s: float, stragglers: list[tuple[int, Mapping[str, float]]]) -> None:
        looked_s, self._looked_s = self._looked_s, now_s
        samples = self._windows[0].samples
        if samples and now_s - samples[-1].begun_s < SAMPLE_EVERY * self._warning_s:
            samples[-1].at_s = now_s  # the newest is there, however soon it comes
        elif looked_s is not None:
            sample = _Sample(looked_s, now_s)
            for window in self._windows:
                window.begin(sample)
        blamed = (
            ((rank, cause), (stats[f"{cause}_s"], int(stats[f"{cause}_episodes"])))
            for rank, stats in stragglers
            for cause in CAUSES
            if stats[f"{cause}_episodes"]
        )
        for key, (waited, episodes) in blamed:
            waited_before, episodes_before = self._known.get(key, (0.0, 0))
            self._known[key] = (waited, episodes)
            grown = (waited - waited_before, episodes - episodes_before)
            if looked_s is not None and any(grown):  # who was waited for before this watch began is no news
                for window in self._windows:
                    window.count(key, grown)
                newest = self._windows[0].samples[-1].waits
                newest[key] = _sum(newest.get(key), grown)

    def _stuck_in(self, waiting: Mapping[str, Any] | None, still_s: float) -> Straggler | None:
        if waiting is None:
            return None
        if waiting["sequence"] != self._waiting:
            self._waiting, self._still_s = waiting["sequence"], 0.0
        # Of a standstill no more than what this call has waited through.
        self._still_s += min(still_s, max(0.0, waiting["waited_s"] - self._still_s))
        waited_s = waiting["waited_s"] - self._still_s
        if waiting["straggler"] is None or waited_s < self._warning_s:
            return None
        self._stuck = waiting["sequence"]
        rank, cause = int(waiting["straggler"]), str(waiting["cause"])
        why = _why(self.name_of(rank), waiting, min(waiting["silent_s"], waited_s), self._heard_s)
        if rank >= self._workers and cause == "network":
            why += ". It may wait for a worker itself, and says so then"
        return Straggler(rank, cause, f"{waiting['during']} has waited {waited_s:.1f} s for {why}")

    def _often(self) -> Straggler | None:
        for window in self._windows:
            enough = SHARE * window.span_s
            candidates = [
                (waited, key)
                for key, (waited, episodes) in window.total.items()
                if waited >= enough and episodes >= EPISODES
            ]
            for waited, (rank, cause) in sorted(candidates, reverse=True):
                longest, lasted = window.longest((rank, cause))
                if waited - longest >= SHARE * (window.span_s - lasted) > 0:
                    share = min(1.0, waited / window.span_s)
                    text = f"{share:.0%} of the last {window.span_s:.0f} s went to waiting for {self.name_of(rank)}: {_OFTEN[cause]}"
                    return Straggler(rank, cause, text)
        return None

    def _is_over(self, waiting: Mapping[str, Any] | None, current: Straggler) -> bool:
        if waiting is not None and waiting["sequence"] == self._stuck:
            return False
        waited, _ = self._windows[0].total.get((current.rank, current.cause), (0.0, 0))
        return waited < SHARE_OVER * self._windows[0].span_s


def _sum(before: tuple[float, int] | None, waits: tuple[float, int]) -> tuple[float, int]:
    return waits if before is None else (before[0] + waits[0], before[1] + waits[1])


_OFTEN = {
    "compute": "it calls its collectives later than the others (slow computation or input, or a busy host)",
    "network": "its bytes come later than those of the others (the network from it)",
    "receiver": "it takes what is sent to it later than the others (the network to it, or a busy host)",
}


def _why(name: str, waiting: Mapping[str, Any], silent: float, heard_s: float) -> str:
    is_heard = silent <= heard_s
    arrived = f"{waiting['bytes_received']} of {waiting['bytes_expected']} bytes from it arrived"
    return {
        "compute": f"{name}: it has not called it yet, its network thread answers (slow computation or input)",
        "network": f"{name}: it has called it, and its bytes are late; {arrived}, heard {silent:.1f} s ago",
        "receiver": f"{name}: it is heard, and has not taken all that was sent to it (the network to it, or from this rank)"
        if is_heard
        else f"{name}: it does not take what is sent to it, nothing heard from it for {silent:.1f} s (stopped, cut off or overloaded)",
    }[waiting["cause"]]
