"""Clocks are aligned by what the collectives of two ranks say about each other, and the error is never too small."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from gradwire.observe.timeline import (
    Alignment,
    Process,
    align_answers,
    chrome_trace,
    last_calls,
    needs_more,
    shown_apart,
)

# Of the processes, in nanoseconds: what is added to their times to get true ones.
OFFSETS = (5_000_000, 700_000_000, 40_000_000_000)


def answers(
    calls: int, least_way_ns: int = 50_000, one_way: bool = False, *, epoch: int = 0, lasts_ns: int = 3 * 10**6
) -> list[dict[str, Any]]:
    """What three ranks would answer about an exact all-reduce in which each hears of the others' calls."""
    random.seed(7)
    records: list[list[dict[str, Any]]] = [[] for _ in OFFSETS]
    for sequence in range(calls):
        called = [(10 + epoch) * 10**10 + sequence * 10**7 + random.randrange(10**6) for _ in OFFSETS]
        for rank, offset in enumerate(OFFSETS):
            peers = [
                {"rank": peer, "called_ns": called[peer] + least_way_ns + random.randrange(300_000) - offset,
                 "first_ns": called[rank] + 10**6 - offset, "ended_ns": called[rank] + lasts_ns - 10**6 - offset,
                 "ended_by": "all_arrived", "elems_received": 10, "elems_expected": 10}
                for peer in range(len(OFFSETS))
                if peer != rank and not (one_way and peer > rank)
            ]  # fmt: skip
            records[rank].append({
                "collective": "all_reduce/transpose", "preset": "auto", "sequence": sequence,
                "in_sequence": True, "epoch": epoch, "elems": 30, "lost_share": 0.0,
                "submitted_ns": called[rank] - offset, "ended_ns": called[rank] + lasts_ns - offset,
                "all_called_ns": max(called) - offset, "bytes_sent": 1, "bytes_received": 1, "reduce_ended_by": "all_arrived",
                "gather_ended_by": "", "reduce": peers, "gather": [], "taken_ns": [],
            })  # fmt: skip
    clock = {"monotonic_ns": 0}
    return [
        {"rank": rank, "host": "h", "pid": rank, "groups": [
            {"name": "g", "rank": rank, "clock": {**clock, "wall_ns": OFFSETS[rank] + 123}, "asked_ns": 2 * 10**11 - OFFSETS[rank],
             "waiting": None, "calls": records[rank]}]}
        for rank in range(len(OFFSETS))
    ]  # fmt: skip


def records_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = answer["groups"][0]["calls"]
    return records


def point_to_point(like: dict[str, Any], number: int, later_ns: int) -> dict[str, Any]:
    """A receive with a number of its rank's own, so much later than that collective."""
    sent = {**like["reduce"][0], "called_ns": None}
    moved = {name: like[name] + later_ns for name in ("submitted_ns", "ended_ns", "all_called_ns")}
    own = {"collective": "send/receive", "sequence": number, "in_sequence": False, "reduce": [], "gather": [sent]}
    return {**like, **moved, **own}


def check_offsets(processes: list[Process], alignments: list[Alignment]) -> None:
    for process, alignment in zip(processes, alignments, strict=True):
        assert alignment.error_ns is not None
        assert abs(alignment.offset_ns - (OFFSETS[process.rank] - OFFSETS[0])) <= alignment.error_ns
        assert alignment.error_ns < 400_000


def check_slices(trace: dict[str, Any]) -> None:
    """Of no track do two slices overlap by halves, and each has a name."""
    json.dumps(trace)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans_of(trace):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        slices.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(slices))
    named = [(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert sorted(tracks) == sorted(named)


def spans_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_the_offset_of_two_clocks_is_off_by_no_more_than_the_error_that_is_told() -> None:
    for calls in (1, 10, 200):
        processes, alignments = align_answers(answers(calls))
        assert (alignments[0].offset_ns, alignments[0].error_ns) == (0, 0)
        check_offsets(processes, alignments)
    assert alignments[2].error_ns is not None
    assert 50_000 < alignments[2].error_ns < 70_000, "of many the fastest packets count"


def test_where_one_direction_alone_is_known_the_hosts_clocks_stand_in_and_the_error_is_unknown() -> None:
    _, alignments = align_answers(answers(5, one_way=True))
    assert [alignment.error_ns for alignment in alignments[1:]] == [None, None]
    assert alignments[1].offset_ns == OFFSETS[1] - OFFSETS[0]


@pytest.mark.parametrize("lasts_ns", [3 * 10**6, 10**8], ids=["one in flight", "ten in flight"])
def test_no_two_slices_of_one_track_overlap_by_halves_and_all_ranks_show_the_same_collectives(lasts_ns: int) -> None:
    found = answers(40, lasts_ns=lasts_ns)
    records_of(found[1]).pop()  # it has not ended there yet
    processes, alignments = align_answers(found)
    trace = chrome_trace(last_calls(processes, 12), alignments, "job")
    check_slices(trace)
    shown = {
        rank: {event["args"]["sequence"] for event in spans_of(trace) if event["pid"] == rank} for rank in range(3)
    }
    assert shown == {rank: set(range(27, 39)) for rank in range(3)}


def test_sends_and_receives_which_ranks_number_on_their_own_align_nothing_and_are_shown_with_what_was_called_meanwhile() -> (
    None
):
    found = answers(20)
    records = records_of(found[0])
    last = records[16]
    del records[17:]  # they have not ended there yet, and something else has these numbers
    records += [point_to_point(last, number, 2 * 10**9 + number) for number in (17, 18, 19)]
    records.insert(5, point_to_point(records[5], 16, 1))
    processes, alignments = align_answers(found)
    check_offsets(processes, alignments)
    trace = chrome_trace(last_calls(processes, 4), alignments, "job")
    check_slices(trace)
    whole = [event["name"] for event in spans_of(trace) if event["pid"] == 0 and "preset" in event["args"]]
    collectives = [f"all_reduce/transpose #{number}" for number in (13, 14, 15, 16)]
    assert whole == [*collectives, "send/receive #17", "send/receive #18", "send/receive #19"]


def test_of_a_group_that_only_sends_and_receives_the_latest_are_shown() -> None:
    found = answers(20)[:1]
    like = records_of(found[0])[0]
    found[0]["groups"][0]["calls"] = [point_to_point(like, number, number * 10**7) for number in range(10)]
    processes, alignments = align_answers(found)
    spans = spans_of(chrome_trace(last_calls(processes, 2), alignments, "job"))
    assert {event["args"]["sequence"] for event in spans} == {8, 9}


def test_calls_that_cannot_be_one_collective_align_nothing() -> None:
    found = answers(20)
    late = records_of(found[0])[7]
    late["submitted_ns"] += 2 * 10**9  # by another rank's clock it had called before
    _, alignments = align_answers(found)
    assert alignments[0] == Alignment(OFFSETS[0] - OFFSETS[1], None), "the others are aligned to each other still"
    assert [alignment.is_reference for alignment in alignments] == [False, True, False]


def test_where_clocks_drift_by_more_than_packets_take_the_error_is_how_far_they_can_have() -> None:
    faster = 5e-4
    found = answers(200)
    began = records_of(found[1])[0]["submitted_ns"]

    def drifted(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: part + round((part - began) * faster) if name.endswith("_ns") and part else drifted(part)
                for name, part in value.items()
                if name != "taken_ns"
            }
        return [drifted(part) for part in value] if isinstance(value, list) else value

    found[1]["groups"][0]["calls"] = drifted(records_of(found[1]))
    _, alignments = align_answers(found)
    offset_ns, error_ns = alignments[1].offset_ns, alignments[1].error_ns
    assert error_ns is not None
    first = OFFSETS[1] - OFFSETS[0]
    last = first - round(200 * 10**7 * faster)
    assert max(abs(offset_ns - first), abs(offset_ns - last)) <= error_ns < 10**7


def test_with_each_epoch_numbers_begin_anew_and_the_latest_are_those_of_the_last_one() -> None:
    found, later = answers(20), answers(5, epoch=1)
    for answer, more in zip(found, later, strict=True):
        records_of(answer).extend(records_of(more))
    for record in records_of(found[0]):  # one call of the first epoch was late by far
        if (record["epoch"], record["sequence"]) == (0, 3):
            record["submitted_ns"] += 2 * 10**8
            record["all_called_ns"] += 2 * 10**8
    for answer in found[1:]:
        records_of(answer)[3]["reduce"][0]["called_ns"] += 2 * 10**8
    processes, alignments = align_answers(found)
    check_offsets(processes, alignments)
    shown = last_calls(processes, 3)
    for process in shown:
        assert [(one["epoch"], one["sequence"]) for one in process.groups["g"].calls] == [(1, 2), (1, 3), (1, 4)]


def test_processes_of_one_rank_are_apart_in_the_trace() -> None:
    # Two groups of one name: of each host's processes, as data-parallel halves have them.
    found = [{**answer, "host": host, "pid": 7} for host in ("h", "k") for answer in answers(10)[:2]]
    records_of(found[1]).pop()  # as many have not ended in each
    records_of(found[2]).pop()
    processes, alignments = align_answers(found)
    trace = chrome_trace(processes, alignments, "job")
    assert {event["pid"] for event in spans_of(trace)} == {0, 1, 2, 3}
    check_slices(trace)
    others = [f"rank {rank} on {host}, process 7" for rank in (0, 1) for host in ("h", "k")]
    assert list(trace["otherData"]) == ["job", *others]
    assert [trace["otherData"][one]["clock_error_us"] for one in others] == [0, None, None, None], (
        "who called what is unknown"
    )
    named = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert [named[pid].partition(" (")[0] for pid in range(4)] == others


def told_of(answer: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Of its collectives the rank has told these alone."""
    (group,) = answer["groups"]
    return {**answer, "groups": [{**group, "calls": group["calls"][begin:end]}]}


def shown_of(processes: list[Process]) -> list[list[tuple[int, int]]]:
    return [
        [(one["epoch"], one["sequence"]) for group in process.groups.values() for one in group.calls]
        for process in processes
    ]


def test_of_ranks_that_were_asked_far_apart_all_are_wanted_and_else_the_latest_of_each_shown_with_a_word() -> None:
    found = answers(400)
    apart = [told_of(answer, 100 * rank, 100 * rank + 160) for rank, answer in enumerate(found)]
    processes, _ = align_answers(apart)
    assert needs_more(processes, 32, 160)
    assert shown_of(last_calls(processes, 3)) == [
        [(0, 100 * rank + number) for number in (157, 158, 159)] for rank in range(3)
    ]
    assert shown_apart(processes) == [
        "group g: its ranks have kept no collective of the latest epoch that all have ended; there each one's own latest are shown"
    ]
    some = align_answers([told_of(answer, 70 * rank, 70 * rank + 160) for rank, answer in enumerate(found)])[0]
    assert needs_more(some, 32, 160), "no more than 20 are common"
    assert not needs_more(some, 20, 160)
    assert shown_apart(some) == []
    few = align_answers([told_of(answer, 10 * rank, 10 * rank + 12) for rank, answer in enumerate(found)])[0]
    assert not needs_more(few, 32, 160), "they have no more"


def test_who_stands_still_in_an_epoch_before_is_shown_with_its_own_latest_and_named() -> None:
    found = answers(20)
    for answer, more in list(zip(found, answers(9, epoch=1), strict=True))[1:]:
        answer["groups"][0]["calls"] = records_of(more)
    records_of(found[1]).pop()  # it has not ended there yet
    processes, _ = align_answers(found)
    assert shown_of(last_calls(processes, 2)) == [[(0, 18), (0, 19)], [(1, 6), (1, 7)], [(1, 6), (1, 7)]]
    assert shown_apart(processes) == [
        "group g: no collective of the latest epoch has ended at rank 0 on h, process 0; there each one's own latest are shown"
    ]


def test_of_groups_of_one_name_each_ranks_own_latest_are_shown_with_a_word() -> None:
    halves = answers(1000)[:2], [{**told_of(answer, 0, 700), "host": "k"} for answer in answers(1000)[:2]]
    found = [told_of(answer, -160, 1000) for half in halves for answer in half]
    processes, _ = align_answers(found)
    assert [process.host for process in processes] == ["h", "k", "h", "k"]
    h, k = [(0, 998), (0, 999)], [(0, 698), (0, 699)]
    assert shown_of(last_calls(processes, 2)) == [h, k, h, k]
    assert shown_apart(processes) == ["group g: several groups have this name; there each one's own latest are shown"]
    assert not needs_more(processes, 32, 160), "it would stay so"


WAITING = {"during": "all_reduce/ring #0 (9 x F32)", "sequence": 0, "waited_s": 30.0, "straggler": 2, "cause": "compute",
           "bytes_received": 0, "bytes_expected": 36, "silent_s": 0.5}  # fmt: skip


def hangs_in_its_first_call(answer: dict[str, Any], **clock: int) -> None:
    group = answer["groups"][0]
    group.update(calls=[], waiting=WAITING, clock={**group["clock"], **clock})


def test_where_the_first_rank_hangs_in_its_first_call_the_others_are_aligned_to_each_other() -> None:
    found = answers(20)
    hangs_in_its_first_call(found[0])
    _, alignments = align_answers(found)
    assert [alignment.is_reference for alignment in alignments] == [False, True, False]
    assert alignments[0] == Alignment(OFFSETS[0] - OFFSETS[1], None)
    offset_ns, error_ns = alignments[2].offset_ns, alignments[2].error_ns
    assert error_ns is not None
    assert abs(offset_ns - (OFFSETS[2] - OFFSETS[1])) <= error_ns < 400_000


def test_a_rank_whose_clock_nobody_knows_does_not_say_when_the_trace_begins() -> None:
    hour_ns = 3600 * 10**9
    found = answers(20)
    hangs_in_its_first_call(found[2], wall_ns=OFFSETS[2] - hour_ns)
    found[2]["groups"][0]["asked_ns"] = 10**11 + 31 * 10**9 - OFFSETS[2]
    processes, alignments = align_answers(found)
    trace = chrome_trace(processes, alignments, "job")
    firsts = {rank: min(event["ts"] for event in spans_of(trace) if event["pid"] == rank) for rank in range(3)}
    assert min(firsts[0], firsts[1]) == 0
    assert firsts[2] == 0, "and not before"
    alone = chrome_trace(processes[2:], alignments[2:], "job")
    assert min(event["ts"] for event in spans_of(alone)) == 0


def test_what_has_not_ended_is_shown_until_now_with_whom_it_waits_for() -> None:
    found = answers(20)
    waiting = {"during": "all_reduce/ring #20 (9 x F32)", "sequence": 20, "waited_s": 30.0, "straggler": 2, "cause": "compute",
               "bytes_received": 0, "bytes_expected": 36, "silent_s": 0.5}  # fmt: skip
    found[0]["groups"][0]["waiting"] = waiting
    processes, alignments = align_answers(found)
    trace = chrome_trace(last_calls(processes, 4), alignments, "job")
    check_slices(trace)
    (stuck,) = [event for event in spans_of(trace) if event["args"]["sequence"] == 20]
    assert stuck["name"] == "all_reduce/ring #20 (9 x F32): has not ended, waits for rank 2"
    assert (stuck["pid"], stuck["dur"], stuck["args"]["cause"]) == (0, 30e6, "compute")
    only = [{**found[0], "groups": [{**found[0]["groups"][0], "calls": []}]}]
    (event,) = spans_of(chrome_trace(*align_answers(only), "job"))
    assert (event["ts"], event["dur"]) == (0, 30e6), "the first call of all may be the one that hangs"


def test_a_rank_of_a_version_that_says_less_is_shown_too() -> None:
    found = answers(20)
    for answer in found:
        group = answer["groups"][0]
        del group["waiting"], group["asked_ns"]
        for record in group["calls"]:
            del record["epoch"], record["in_sequence"]
    processes, alignments = align_answers(found)
    check_offsets(processes, alignments)
    check_slices(chrome_trace(last_calls(processes, 4), alignments, "job"))


def test_without_collectives_there_is_no_timeline() -> None:
    assert align_answers([{"rank": 0, "host": "h", "pid": 1, "groups": []}]) == ([], [])
