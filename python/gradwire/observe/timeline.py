"""One step of all ranks as a timeline that Perfetto opens (Chrome's trace JSON).

Each process has a clock of its own. What aligns them is in the collectives themselves: a rank's first packet says how long ago the rank
had called, so its peer knows the call on its own clock, late by no more than the packet was; the rank itself knows it exactly. The
least of many such differences, taken in both directions, gives the offset of two clocks as NTP does, and half of what both add
up to is the error. Ranks are aligned along the pairs with the least errors, from one rank on.

Only collectives have numbers that all ranks of a group give alike, and with each epoch of a group they begin anew. Sends and receives are
drawn, and align nothing.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

# Of a schedule whose later transfers carry the call of somebody else, only the stage in which ranks speak for themselves counts.
OWN_STAGE = "reduce"
# Tracks of one lane of a group; those of peers follow, two for each.
COLLECTIVE_TRACK, CALLS_TRACK, PEER_TRACK = 0, 1, 2
# Packets tell microseconds.
ROUNDING_NS = 1000
# How much faster than another one a clock may run: Linux corrects each by 500 ppm at most.
DRIFT_MAX = 1e-3
# Epoch, and number in the group's sequence there.
Place = tuple[int, int]


@dataclass(frozen=True)
class GroupCalls:
    """What one process has said of one group.

    Attributes:
        rank: of the process in the group.
        calls: those that have ended, in the order in which they did.
        waiting: the oldest collective that has not ended; None: there is none.
        asked_ns: when that was, on the process's clock.
    """

    rank: int
    calls: list[dict[str, Any]]
    waiting: dict[str, Any] | None = None
    asked_ns: int = 0

    @classmethod
    def of(cls, group: dict[str, Any]) -> GroupCalls:
        """From an answer, also of a process that runs a version which does not say everything."""
        calls = [{"in_sequence": True, "epoch": 0, **record} for record in group["calls"]]
        return cls(group["rank"], calls, group.get("waiting"), group.get("asked_ns", 0))

    @property
    def waits_since_ns(self) -> int:
        """When what has not ended was called; `waiting` is not None."""
        assert self.waiting is not None
        return self.asked_ns - round(self.waiting["waited_s"] * 1e9)

    def collectives(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Calls that all ranks of the group number alike."""
        for record in self.calls:
            if record["in_sequence"]:
                yield (record["epoch"], record["sequence"]), record

    def only(self, chosen: set[Place], others: int) -> GroupCalls:
        """With these collectives, and of the other calls those since the first of them; where there is none here, the last `others`."""
        begin = min((record["submitted_ns"] for place, record in self.collectives() if place in chosen), default=None)
        apart = [record for record in self.calls if not record["in_sequence"]]
        apart = apart[-others:] if begin is None else [one for one in apart if one["submitted_ns"] >= begin]
        return replace(self, calls=[record for place, record in self.collectives() if place in chosen] + apart)


@dataclass(frozen=True)
class Process:
    """One rank's answer to `timelines`.

    Attributes:
        rank: of the process.
        host, pid: of it.
        clock: `monotonic_ns` and `wall_ns` of the engine's zero.
        groups: by name.
    """

    rank: int
    host: str
    pid: int
    clock: dict[str, int]
    groups: dict[str, GroupCalls]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Process | None:
        """From the answer; None where no group has called anything."""
        groups = {
            group["name"]: GroupCalls.of(group) for group in answer["groups"] if group["calls"] or group.get("waiting")
        }
        if not groups:
            return None
        return cls(answer["rank"], answer["host"], answer["pid"], answer["groups"][0]["clock"], groups)

    @property
    def title(self) -> str:
        """Which process it is: several may have one rank, in groups of their own or one after the other."""
        return f"rank {self.rank} on {self.host}, process {self.pid}"

    def span_ns(self) -> int:
        """From its first call to its last one."""
        times = [record["submitted_ns"] for group in self.groups.values() for record in group.calls]
        return max(times) - min(times) if times else 0


@dataclass(frozen=True)
class Alignment:
    """How a process's clock stands to the one that the others are aligned to.

    Attributes:
        offset_ns: what is added to its times.
        error_ns: how far that may be off; None: only the hosts' own clocks were compared, and nobody knows.
    """

    offset_ns: int
    error_ns: int | None

    @property
    def is_reference(self) -> bool:
        """Whether the others are aligned to this one: of no other is the error less than what packets round."""
        return self.error_ns == 0


def align(processes: list[Process]) -> list[Alignment]:
    """Offsets of all clocks to that of the first process whose collectives tell anything; where there is none, of the first one."""
    found: dict[int, Alignment] = {}
    edges = _edges(processes)
    # The first process of all may hang in its first collective: from there none of the others would be reached.
    reference = min(edges, default=0)
    queue: list[tuple[int, int, int]] = [(0, reference, 0)]
    while queue:
        error, index, offset = heapq.heappop(queue)
        if index in found:
            continue
        found[index] = Alignment(offset, error)
        for other, (difference, more) in edges.get(index, {}).items():
            heapq.heappush(queue, (error + more, other, offset + difference))
    wall_ns = processes[reference].clock["wall_ns"]
    return [
        found.get(index, Alignment(process.clock["wall_ns"] - wall_ns, None)) for index, process in enumerate(processes)
    ]


def _edges(processes: list[Process]) -> dict[int, dict[int, tuple[int, int]]]:
    """For each pair of processes what is added to the second one's times, and the error."""
    late = _least_delays(processes)
    edges: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for (here, there), seen in late.items():
        back = late.get((there, here))
        if back is None:
            continue
        # seen = offset + way, back = -offset + way back, where the offset turns there's times into here's.
        both = seen + back
        drift = round(DRIFT_MAX * max(processes[here].span_ns(), processes[there].span_ns())) + 2 * ROUNDING_NS
        if both < -drift:  # packets that came before they were sent: these are no calls of one collective
            continue
        # Where the clocks have drifted by more than the packets took, nothing is known but how far they can have.
        edges[here][there] = ((seen - back) // 2, (both + 1) // 2 + ROUNDING_NS if both >= 0 else drift)
    return edges


def _least_delays(processes: list[Process]) -> dict[tuple[int, int], int]:
    """By (who sees, who called): least difference of a call as seen there and as it was."""
    calls = _submissions(processes)
    least: dict[tuple[int, int], int] = {}
    for index, process in enumerate(processes):
        for name, group in process.groups.items():
            for place, record in group.collectives():
                for peer in _own_stage(record):
                    known = calls.get((name, peer["rank"], place))
                    if known is None or peer["called_ns"] is None:
                        continue
                    other, called = known
                    delay = peer["called_ns"] - called
                    least[index, other] = min(delay, least.get((index, other), delay))
    return least


def _submissions(processes: list[Process]) -> dict[tuple[str, int, Place], tuple[int, int]]:
    """Which process called each collective, by group and rank, and when.

    Not where two say so of an epoch: of groups of one name nobody can tell which are the others of theirs.
    """
    shared = _said_by_two(processes)
    return {
        (name, group.rank, place): (index, record["submitted_ns"])
        for index, process in enumerate(processes)
        for name, group in process.groups.items()
        for place, record in group.collectives()
        if (name, group.rank, place[0]) not in shared
    }


def _said_by_two(processes: list[Process]) -> set[tuple[str, int, int]]:
    """Group, rank and epoch of which more than one process has told collectives."""
    callers: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for index, process in enumerate(processes):
        for name, group in process.groups.items():
            for place, _ in group.collectives():
                callers[name, group.rank, place[0]].add(index)
    return {said for said, indices in callers.items() if len(indices) > 1}


def _own_stage(record: dict[str, Any]) -> list[dict[str, Any]]:
    stage: list[dict[str, Any]] = record[OWN_STAGE] or record["gather"]
    return stage


@dataclass(frozen=True)
class _Common:
    """Of one name of a group: which collectives are compared, and of whom.

    Attributes:
        places: those that all ranks of the group here have ended, but for those in `apart`.
        own: by the number of the process, those that each of them has ended.
        apart: who has none in common with the others. Of each its own latest are shown.
        why: what is said where somebody is apart.
        is_exhausted: whether it stays so, however much the ranks are asked for.
    """

    places: set[Place]
    own: dict[int, set[Place]]
    apart: set[int]
    why: str = ""
    is_exhausted: bool = False

    def latest(self, index: int, calls: int) -> set[Place]:
        """Of one process."""
        return set(sorted(self.own[index] if index in self.apart else self.places)[-calls:])


def _commons(processes: list[Process]) -> dict[str, _Common]:
    """By the groups' names, in their order."""
    names = sorted({name for process in processes for name in process.groups})
    shared = {name for name, _, _ in _said_by_two(processes)}
    return {name: _common(processes, name, name in shared) for name in names}


def _common(processes: list[Process], name: str, is_shared: bool) -> _Common:
    told = {index: process.groups[name] for index, process in enumerate(processes) if name in process.groups}
    own = {index: {place for place, _ in group.collectives()} for index, group in told.items()}
    own = {index: places for index, places in own.items() if places}
    if not own:
        return _Common(set(), own, set())
    if is_shared:
        return _Common(set(), own, set(own), "several groups have this name", is_exhausted=True)
    epochs = {index: max(places)[0] for index, places in own.items()}
    newest = max(epochs.values())
    places = set.intersection(*(own[index] for index, epoch in epochs.items() if epoch == newest))
    # What they have in common of an epoch before is not what has been slow now.
    if max(epoch for epoch, _ in places or {(-1, 0)}) < newest:
        return _Common(
            set(), own, set(own), "its ranks have kept no collective of the latest epoch that all have ended"
        )
    behind = {index for index, epoch in epochs.items() if epoch < newest}
    who = ", ".join(processes[index].title for index in sorted(behind))
    return _Common(places, own, behind, f"no collective of the latest epoch has ended at {who}")


def needs_more(processes: list[Process], calls: int, asked: int) -> bool:
    """Whether ranks that were asked for their latest `asked` collectives have to be asked for all, to show `calls` that all have ended.

    Ranks are not asked at one moment, and those that were asked first may have told none of those that the last ones told.
    """
    return any(
        len(common.places) < calls
        and not common.is_exhausted
        and max((len(places) for places in common.own.values()), default=0) >= asked
        for common in _commons(processes).values()
    )


def shown_apart(processes: list[Process]) -> list[str]:
    """A line for each group of which `last_calls` does not show the same collectives of all ranks, saying why."""
    return [
        f"group {name}: {common.why}; there each one's own latest are shown"
        for name, common in _commons(processes).items()
        if common.apart
    ]


def last_calls(processes: list[Process], calls: int | None) -> list[Process]:
    """The processes with the latest collectives alone that all ranks of their group here have ended: so many of each group.

    Of who has none in common with the others, its own latest (see `shown_apart`). Of sends, receives and calls whose result another rank
    gave, those that were called meanwhile and that the rank has told. What has not ended stays.
    """
    if calls is None:
        return processes
    commons = _commons(processes)
    return [
        replace(
            process,
            groups={
                name: group.only(commons[name].latest(index, calls) if index in commons[name].own else set(), calls)
                for name, group in process.groups.items()
            },
        )
        for index, process in enumerate(processes)
    ]


def chrome_trace(processes: list[Process], alignments: list[Alignment], job: str) -> dict[str, Any]:
    """The timeline in Chrome's trace format: one process for each of them, tracks for its collectives and for each peer.

    Times are microseconds since the first call. `pid` is a number of the trace's own, in the order of `processes`: ranks and process ids
    of several hosts are not unique. `otherData` holds each one's offset and its error, by rank, host and process id.
    """
    begin, alignments = _begin_of(processes, alignments)
    events: list[dict[str, Any]] = []
    other: dict[str, Any] = {}
    for pid, (process, alignment) in enumerate(zip(processes, alignments, strict=True)):
        events += _process_events(process, pid, alignment.offset_ns - begin, alignment)
        other[process.title] = {
            "rank": process.rank,
            "host": process.host,
            "pid": process.pid,
            "clock_offset_us": alignment.offset_ns / 1e3,
            "clock_error_us": None if alignment.error_ns is None else alignment.error_ns / 1e3,
        }
    return {"displayTimeUnit": "ms", "otherData": {"job": job, **other}, "traceEvents": events}


def _begin_of(processes: list[Process], alignments: list[Alignment]) -> tuple[int, list[Alignment]]:
    """When the first call was, and the alignments with which no other one is before it, nanoseconds.

    A process of which nobody knows how its clock stands does not say it where others do: one whose host's clock is an hour behind would
    put an hour of nothing before all of them. It begins with the first of them instead: not every viewer shows what is before 0.
    """
    firsts = [
        min((at for group in process.groups.values() for at in _submitted(group)), default=None)
        for process in processes
    ]
    starts = [
        (first + alignment.offset_ns, alignment)
        for first, alignment in zip(firsts, alignments, strict=True)
        if first is not None
    ]
    aligned = [start for start, alignment in starts if alignment.error_ns is not None]
    begin = min(aligned if len(aligned) > 1 else [start for start, _ in starts], default=0)
    moved = [
        alignment if first is None else replace(alignment, offset_ns=max(alignment.offset_ns, begin - first))
        for first, alignment in zip(firsts, alignments, strict=True)
    ]
    return begin, moved


def _submitted(group: GroupCalls) -> Iterator[int]:
    yield from (record["submitted_ns"] for record in group.calls)
    if group.waiting is not None:
        yield group.waits_since_ns


@dataclass(frozen=True)
class _Slice:
    """A time of one call, in one of the call's tracks."""

    track: int
    track_title: str
    name: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any]


def _process_events(process: Process, pid: int, shift_ns: int, alignment: Alignment) -> Iterator[dict[str, Any]]:
    error = "unknown" if alignment.error_ns is None else f"{alignment.error_ns / 1e3:.0f} us"
    yield _name("process_name", pid, 0, f"{process.title} (clock error {error})")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    base = 0
    for name, group in sorted(process.groups.items()):
        calls = [_slices_of_call(record) for record in group.calls]
        if group.waiting is not None:
            calls.append([_slice_of_waiting(group, group.waiting)])
        # Lanes of one kind of track lie beside each other.
        lanes, placed = _in_lanes(calls)
        tracks: dict[int, str] = {}
        for lane, one in placed:
            tid = base + one.track * lanes + lane
            tracks[tid] = f"{name}: {one.track_title} {lane}"
            yield {
                "ph": "X",
                "name": one.name,
                "cat": "gradwire",
                "ts": (one.begin_ns + shift_ns) / 1e3,
                "dur": max(0, one.end_ns - one.begin_ns) / 1e3,
                "pid": pid,
                "tid": tid,
                "args": one.args,
            }
        for tid, title in tracks.items():
            yield _name("thread_name", pid, tid, title)
        base += (1 + max((one.track for _, one in placed), default=0)) * lanes


def _in_lanes(calls: list[list[_Slice]]) -> tuple[int, list[tuple[int, _Slice]]]:
    """How many lanes there are, and each slice with its lane: calls overlap, and slices of one track must not do so by halves.

    Each call has the first lane in which everything before has ended.
    """
    ends: list[int] = []
    placed: list[tuple[int, _Slice]] = []
    for slices in sorted(calls, key=lambda slices: slices[0].begin_ns):
        begin_ns, end_ns = slices[0].begin_ns, max(max(one.begin_ns, one.end_ns) for one in slices)
        lane = next((lane for lane, ended_ns in enumerate(ends) if ended_ns < begin_ns), len(ends))
        ends[lane : lane + 1] = [end_ns]
        placed += [(lane, one) for one in slices]
    return len(ends), placed


def _slices_of_call(record: dict[str, Any]) -> list[_Slice]:
    """The whole call first: no other slice of it begins before."""
    title, number = f"{record['collective']} #{record['sequence']}", {"sequence": record["sequence"]}
    facts = (
        "preset",
        "elems",
        "lost_share",
        "bytes_sent",
        "bytes_received",
        "reduce_ended_by",
        "gather_ended_by",
        "epoch",
    )
    begin, end = record["submitted_ns"], record["ended_ns"]
    args = {**number, **{fact: record[fact] for fact in facts}}
    slices = [_Slice(COLLECTIVE_TRACK, "collectives", title, begin, end, args)]
    if record["all_called_ns"] > begin:
        called = min(end, record["all_called_ns"])
        slices.append(_Slice(CALLS_TRACK, "waits for calls", "waits for the last call", begin, called, number))
    for stage in ("reduce", "gather"):
        for peer in record[stage]:
            track = PEER_TRACK + 2 * peer["rank"] + (stage == "gather")
            name = f"{stage} from rank {peer['rank']}"
            args = {**number, **{fact: peer[fact] for fact in ("ended_by", "elems_received", "elems_expected")}}
            # What came before this rank called waits for it.
            first = max(peer["first_ns"], begin)
            slices.append(_Slice(track, name, f"{name}, #{record['sequence']}", first, peer["ended_ns"], args))
    return slices


def _slice_of_waiting(group: GroupCalls, waiting: dict[str, Any]) -> _Slice:
    """Until the rank was asked; nobody knows when it ends."""
    late, facts = waiting["straggler"], ("sequence", "cause", "bytes_received", "bytes_expected", "silent_s")
    title = f"{waiting['during']}: has not ended" + ("" if late is None else f", waits for rank {late}")
    args = {"straggler": late, **{fact: waiting[fact] for fact in facts}}
    return _Slice(COLLECTIVE_TRACK, "collectives", title, group.waits_since_ns, group.asked_ns, args)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def processes_of(answers: Iterable[dict[str, Any]]) -> list[Process]:
    """The processes in the answers that have called something, by rank."""
    found = filter(None, map(Process.of, answers))
    return sorted(found, key=lambda process: (process.rank, process.host, process.pid))


def align_answers(answers: Iterable[dict[str, Any]]) -> tuple[list[Process], list[Alignment]]:
    """The processes in the answers, by rank, and how their clocks stand to each other."""
    processes = processes_of(answers)
    return processes, align(processes) if processes else []
