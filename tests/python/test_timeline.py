"""Clocks are aligned by what the collectives of two ranks say about each other, and the error is never too small."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

from gradwire.observe.timeline import align_answers, chrome_trace, last_calls

# Of the processes, in nanoseconds: what is added to their times to get true ones.
OFFSETS = (5_000_000, 700_000_000, 40_000_000_000)


def answers(calls: int, least_way_ns: int = 50_000, one_way: bool = False) -> list[dict[str, Any]]:
    """What three ranks would answer about an exact all-reduce in which each hears of the others' calls."""
    random.seed(7)
    records: list[list[dict[str, Any]]] = [[] for _ in OFFSETS]
    for sequence in range(calls):
        called = [10**11 + sequence * 10**7 + random.randrange(10**6) for _ in OFFSETS]
        for rank, offset in enumerate(OFFSETS):
            peers = [
                {"rank": peer, "called_ns": called[peer] + least_way_ns + random.randrange(300_000) - offset,
                 "first_ns": called[rank] + 10**6 - offset, "ended_ns": called[rank] + 2 * 10**6 - offset,
                 "ended_by": "all_arrived", "elems_received": 10, "elems_expected": 10}
                for peer in range(len(OFFSETS))
                if peer != rank and not (one_way and peer > rank)
            ]  # fmt: skip
            records[rank].append({
                "collective": "all_reduce/transpose", "preset": "auto", "sequence": sequence, "elems": 30, "lost_share": 0.0,
                "submitted_ns": called[rank] - offset, "ended_ns": called[rank] + 3 * 10**6 - offset,
                "all_called_ns": max(called) - offset, "bytes_sent": 1, "bytes_received": 1, "reduce_ended_by": "all_arrived",
                "gather_ended_by": "", "reduce": peers, "gather": [], "taken_ns": [],
            })  # fmt: skip
    clock = {"monotonic_ns": 0}
    return [
        {"rank": rank, "host": "h", "pid": rank, "groups": [
            {"name": "g", "rank": rank, "clock": {**clock, "wall_ns": OFFSETS[rank] + 123}, "calls": records[rank]}]}
        for rank in range(len(OFFSETS))
    ]  # fmt: skip


def test_the_offset_of_two_clocks_is_off_by_no_more_than_the_error_that_is_told() -> None:
    for calls in (1, 10, 200):
        processes, alignments = align_answers(answers(calls))
        assert (alignments[0].offset_ns, alignments[0].error_ns) == (0, 0)
        for process, alignment in zip(processes, alignments, strict=True):
            assert alignment.error_ns is not None
            assert abs(alignment.offset_ns - (OFFSETS[process.rank] - OFFSETS[0])) <= alignment.error_ns
            assert alignment.error_ns < 400_000
    assert alignments[2].error_ns is not None
    assert 50_000 < alignments[2].error_ns < 70_000, "of many the fastest packets count"


def test_where_one_direction_alone_is_known_the_hosts_clocks_stand_in_and_the_error_is_unknown() -> None:
    _, alignments = align_answers(answers(5, one_way=True))
    assert [alignment.error_ns for alignment in alignments[1:]] == [None, None]
    assert alignments[1].offset_ns == OFFSETS[1] - OFFSETS[0]


def test_no_two_slices_of_one_track_overlap_by_halves_and_all_ranks_show_the_same_collectives() -> None:
    found = answers(40)
    found[1]["groups"][0]["calls"].pop()  # it has not ended there yet
    processes, alignments = align_answers(found)
    trace = chrome_trace(last_calls(processes, 4), alignments, "job")
    json.dumps(trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    shown = {rank: {event["args"]["sequence"] for event in spans if event["pid"] == rank} for rank in range(3)}
    assert shown == {rank: {35, 36, 37, 38} for rank in range(3)}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        slices.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(slices))
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert set(tracks) <= named


def test_without_collectives_there_is_no_timeline() -> None:
    assert align_answers([{"rank": 0, "host": "h", "pid": 1, "groups": []}]) == ([], [])
