"""Whose block most replicas have, for many blocks and many ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from gradwire.torch._drift import COLUMNS_AT_ONCE, _majority


def one_by_one(table: torch.Tensor) -> list[int]:
    rows = []
    for column in table.T.tolist():
        counts = Counter(column)
        rows.append(max(range(len(column)), key=lambda rank: (counts[column[rank]], -rank)))
    return rows


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_it_is_the_lowest_rank_of_those_that_agree_with_most(ranks: int) -> None:
    extremes = torch.tensor([-(2**63), 2**63 - 1, 0])
    for values in (2, 3, ranks):
        drawn = torch.randint(values, (ranks, 500), generator=torch.Generator().manual_seed(10 * ranks + values))
        for table in (drawn, extremes[drawn % 3]):
            assert _majority(table) == one_by_one(table)


@pytest.mark.parametrize("columns", [0, 1, COLUMNS_AT_ONCE, COLUMNS_AT_ONCE + 1])
def test_tables_of_any_width_are_gone_through(columns: int) -> None:
    table = torch.arange(3 * columns).view(3, columns) % 2
    assert _majority(table) == one_by_one(table)


def test_nothing_is_held_of_each_pair_of_ranks() -> None:
    table = torch.randint(3, (64, 20_000), generator=torch.Generator().manual_seed(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        _majority(table)
    assert max(event.cpu_memory_usage for event in profile.events()) < table.nbytes
