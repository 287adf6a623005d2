"""What benchmarks take for a right sum: every rank's values once, each at its place and of this call."""

import ctypes
from itertools import combinations_with_replacement, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire.bench.collectives import PATTERN, Task, values, weight

ELEMS, RANKS = 200, 3
# What a broken collective may do with the ranks' values `[RANKS, ELEMS]`, beside the right one.
SUMS: dict[str, Any] = {
    "right": lambda held: held.sum(0),
    "moved by a place": lambda held: np.roll(held.sum(0), 1),
    "without a rank": lambda held: held[:-1].sum(0),
    "a rank twice for another": lambda held: held[[0, 1, 1]].sum(0),
    "a rank three times for two": lambda held: held[[0, 0, 0]].sum(0),
}


def held(call: int) -> Any:
    return np.array([values(ELEMS, call, weight(rank, RANKS)) for rank in range(RANKS)], dtype=np.float32)


def test_values_are_those_of_their_call_and_place():
    assert [values(130, 60, 3.0)[place] for place in (0, 1, 61, 62)] == [183, 3, 183, 3]
    assert len(values(0, 0, 1.0)) == 0
    assert all(before != after for before, after in pairwise(values(PATTERN + 1, 7, 5.0)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_no_ranks_that_are_in_a_sum_several_times_make_up_for_those_that_are_missing(ranks):
    """Of all choices of up to two more than there are ranks."""
    tasks = [Task("all_reduce", 61, rank, ranks) for rank in range(ranks)]
    values = torch.stack([task.fresh(3)[0] for task in tasks])
    for chosen in range(1, ranks + 3):
        for inside in combinations_with_replacement(range(ranks), chosen):
            found = values[list(inside)].sum(0)
            assert tasks[0].wrong_bits(found, 3) == (0 if inside == tuple(range(ranks)) else 61), inside
            for count in range(1, ranks + 1):
                is_right = len(set(inside)) == chosen == count
                wrong = tasks[0].wrong_means(found / count, torch.full((61,), count), 3)
                assert wrong == (0 if is_right else 61), (inside, count)


@pytest.mark.parametrize("fault", SUMS)
def test_an_engines_sum_is_right_or_wrong(load_benchmark, monkeypatch, fault):
    monkeypatch.setenv("RANK", "0")
    said: list[dict[str, Any]] = []
    worker = load_benchmark("engine_worker").Worker(said.append)

    class Group:
        def submit(self, call: dict[str, Any]) -> Any:
            address, length = call["output"]
            mine = np.frombuffer((ctypes.c_char * length).from_address(address), dtype=np.float32)
            assert (mine == held(len(said))[0]).all(), "other ranks' are made in the same way"
            mine[:] = SUMS[fault](held(len(said)))
            return SimpleNamespace(wait=lambda _: True, error=lambda: None)

    worker._groups["engine"] = Group()
    for _ in range(2):
        worker.obey(
            {"do": "reduce", "name": "engine", "ranks": RANKS, "elems": ELEMS, "algorithm": None, "at": 0.0},
        )
    assert [answer["wrong"] == 0 for answer in said] == [fault == "right"] * 2


@pytest.mark.parametrize("fault", SUMS)
def test_a_sum_during_a_flood_is_right_or_wrong(load_benchmark, fault):
    module = load_benchmark("flood_worker")
    worker, said = object.__new__(module.Worker), []  # a whole one would meet others

    def all_reduce(gradient: Any) -> None:
        assert (gradient == held(len(said))[0]).all()
        gradient[:] = SUMS[fault](held(len(said)))

    worker._say, worker._steps = said.append, 0
    worker._communicator = SimpleNamespace(rank=0, world_size=RANKS, all_reduce=all_reduce)
    for _ in range(2):
        worker.obey({"do": "step", "compute_ms": 0, "elems": ELEMS, "at": 0.0})
    assert [answer["right"] for answer in said] == [fault == "right"] * 2
