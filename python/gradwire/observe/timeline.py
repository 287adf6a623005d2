"""One step of all ranks as a timeline that Perfetto opens (Chrome's trace JSON).

Each process has a clock of its own. What aligns them is in the collectives themselves: a rank's first packet says how long ago the rank
had called, so its peer knows the call on its own clock, late by no more than the packet was; the rank itself knows it exactly. The
least of many such differences, taken in both directions, gives the offset of two clocks as NTP does, and half of what both add
up to is the error. Ranks are aligned along the pairs with the least errors, from one rank on.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# Of a schedule whose later transfers carry the call of somebody else, only the stage in which ranks speak for themselves counts.
OWN_STAGE = "reduce"
COLLECTIVE_TRACK, CALLS_TRACK, PEER_TRACK = 0, 1, 10


@dataclass(frozen=True)
class Process:
    """One rank's answer to `timelines`.

    Attributes:
        rank: of the process.
        host, pid: of it.
        clock: `monotonic_ns` and `wall_ns` of the engine's zero.
        groups: by name, the rank in the group and its collectives, oldest first.
    """

    rank: int
    host: str
    pid: int
    clock: dict[str, int]
    groups: dict[str, tuple[int, list[dict[str, Any]]]]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Process | None:
        """From the answer; None where it has no collectives."""
        groups = {group["name"]: (group["rank"], group["calls"]) for group in answer["groups"] if group["calls"]}
        if not groups:
            return None
        return cls(answer["rank"], answer["host"], answer["pid"], answer["groups"][0]["clock"], groups)


@dataclass(frozen=True)
class Alignment:
    """How a process's clock stands to the first one's.

    Attributes:
        offset_ns: what is added to its times.
        error_ns: how far that may be off; None: only the hosts' own clocks were compared, and nobody knows.
    """

    offset_ns: int
    error_ns: int | None


def align(processes: list[Process]) -> list[Alignment]:
    """Offsets of all clocks to that of the first process."""
    found: dict[int, Alignment] = {}
    edges = _edges(processes)
    queue: list[tuple[int, int, int]] = [(0, 0, 0)]
    while queue:
        error, index, offset = heapq.heappop(queue)
        if index in found:
            continue
        found[index] = Alignment(offset, error)
        for other, (difference, more) in edges[index].items():
            heapq.heappush(queue, (error + more, other, offset + difference))
    first = processes[0].clock["wall_ns"]
    return [
        found.get(index, Alignment(process.clock["wall_ns"] - first, None)) for index, process in enumerate(processes)
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
        edges[here][there] = ((seen - back) // 2, max(0, (seen + back + 1) // 2) + ROUNDING_NS)
    return edges


def _least_delays(processes: list[Process]) -> dict[tuple[int, int], int]:
    """By (who sees, who called): least difference of a call as seen there and as it was."""
    calls = {}
    for index, process in enumerate(processes):
        for name, (rank, records) in process.groups.items():
            for record in records:
                calls[name, rank, record["sequence"]] = (index, record["submitted_ns"])
    least: dict[tuple[int, int], int] = {}
    for index, process in enumerate(processes):
        for name, (_, records) in process.groups.items():
            for record in records:
                for peer in _own_stage(record):
                    known = calls.get((name, peer["rank"], record["sequence"]))
                    if known is None or peer["called_ns"] is None:
                        continue
                    other, called = known
                    delay = peer["called_ns"] - called
                    least[index, other] = min(delay, least.get((index, other), delay))
    return least


def _own_stage(record: dict[str, Any]) -> list[dict[str, Any]]:
    stage: list[dict[str, Any]] = record[OWN_STAGE] or record["gather"]
    return stage


def last_calls(processes: list[Process], calls: int | None) -> list[Process]:
    """The processes with the latest collectives alone that all ranks of their group here have ended: so many of each group."""
    if calls is None:
        return processes
    chosen: dict[str, set[int]] = {}
    for name in {name for process in processes for name in process.groups}:
        members = [process.groups[name][1] for process in processes if name in process.groups]
        common = set.intersection(*({record["sequence"] for record in records} for records in members))
        chosen[name] = set(sorted(common)[-calls:])
    return [
        Process(
            process.rank,
            process.host,
            process.pid,
            process.clock,
            {
                name: (rank, [record for record in records if record["sequence"] in chosen[name]])
                for name, (rank, records) in process.groups.items()
            },
        )
        for process in processes
    ]


def chrome_trace(processes: list[Process], alignments: list[Alignment], job: str) -> dict[str, Any]:
    """The timeline in Chrome's trace format: one process for each rank, tracks for its collectives and for each peer.

    Times are microseconds since the first call. `otherData` holds each rank's offset and its error.
    """
    begin = min(
        (
            record["submitted_ns"] + alignment.offset_ns
            for process, alignment in zip(processes, alignments, strict=True)
            for _, records in process.groups.values()
            for record in records
        ),
        default=0,
    )
    events: list[dict[str, Any]] = []
    for process, alignment in zip(processes, alignments, strict=True):
        events += _process_events(process, alignment.offset_ns - begin, alignment)
    other = {
        f"rank {process.rank}": {
            "host": process.host,
            "pid": process.pid,
            "clock_offset_us": alignment.offset_ns / 1e3,
            "clock_error_us": None if alignment.error_ns is None else alignment.error_ns / 1e3,
        }
        for process, alignment in zip(processes, alignments, strict=True)
    }
    return {"displayTimeUnit": "ms", "otherData": {"job": job, **other}, "traceEvents": events}


def _process_events(process: Process, shift_ns: int, alignment: Alignment) -> Iterator[dict[str, Any]]:
    error = "unknown" if alignment.error_ns is None else f"{alignment.error_ns / 1e3:.0f} us"
    yield _name("process_name", process.rank, 0, f"rank {process.rank} on {process.host} (clock error {error})")
    yield {"ph": "M", "name": "process_sort_index", "pid": process.rank, "tid": 0, "args": {"sort_index": process.rank}}
    tracks: dict[int, str] = {}
    for number, (name, (_, records)) in enumerate(sorted(process.groups.items())):
        base = number * TRACKS_OF_GROUP
        for record in records:
            for event in _call_events(record, name, shift_ns, process.rank, base):
                tracks.setdefault(event["tid"], event.pop("track"))
                yield event
    for track, title in tracks.items():
        yield _name("thread_name", process.rank, track, title)


def _call_events(record: dict[str, Any], group: str, shift_ns: int, pid: int, base: int) -> Iterator[dict[str, Any]]:
    def span(title: str, begin: int, end: int, track: tuple[int, str], **args: Any) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": title,
            "cat": "gradwire",
            "ts": (begin + shift_ns) / 1e3,
            "dur": max(0, end - begin) / 1e3,
            "pid": pid,
            "tid": base + track[0],
            "track": track[1],
            "args": {"sequence": record["sequence"], **args},
        }

    title = f"{record['collective']} #{record['sequence']}"
    facts = ("preset", "elems", "lost_share", "bytes_sent", "bytes_received", "reduce_ended_by", "gather_ended_by")
    begin, end = record["submitted_ns"], record["ended_ns"]
    lane = record["sequence"] % LANES  # collectives overlap, and slices of one track must not
    track = (COLLECTIVE_TRACK + 2 * lane, f"{group}: collectives {lane}")
    yield span(title, begin, end, track, **{fact: record[fact] for fact in facts})
    if record["all_called_ns"] > begin:
        waits = (CALLS_TRACK + 2 * lane, f"{group}: waits for calls {lane}")
        yield span("waits for the last call", begin, min(end, record["all_called_ns"]), waits)
    for stage in ("reduce", "gather"):
        for peer in record[stage]:
            place = PEER_TRACK + LANES * (2 * peer["rank"] + (stage == "gather")) + lane
            args = {name: peer[name] for name in ("ended_by", "elems_received", "elems_expected")}
            name = f"{stage} from rank {peer['rank']}"
            # What came before this rank called waits for it.
            first = max(peer["first_ns"], begin)
            yield span(
                f"{name}, #{record['sequence']}", first, peer["ended_ns"], (place, f"{group}: {name} {lane}"), **args
            )


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def align_answers(answers: Iterable[dict[str, Any]]) -> tuple[list[Process], list[Alignment]]:
    """The processes in the answers, by rank, and how their clocks stand to each other."""
    processes = sorted(filter(None, map(Process.of, answers)), key=lambda process: process.rank)
    return processes, align(processes) if processes else []


# Collectives in flight at once that are told apart.
LANES = 4
# Tracks of one group: more than any rank's last.
TRACKS_OF_GROUP = 1 << 20
# Packets tell microseconds.
ROUNDING_NS = 1000
