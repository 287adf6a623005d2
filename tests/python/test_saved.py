"""In which form residuals are saved, and whose are taken up."""

from __future__ import annotations

import logging

import pytest
import torch
from gradwire.torch._saved import Member, own_of, saved

OWED = {"weight": torch.ones(3)}
NOTHING = {"weight": torch.zeros(3)}


def test_each_rank_has_a_key_of_its_own_and_finds_it_among_those_of_others() -> None:
    everybodys = saved(Member(0, 2), OWED) | saved(Member(1, 2), NOTHING)
    assert len(everybodys) == 2
    assert own_of(everybodys, Member(0, 2)) == OWED


def test_ranks_of_the_same_number_in_several_groups_have_keys_of_their_own() -> None:
    everybodys = saved(Member(0, 2, (0, 4)), NOTHING) | saved(Member(0, 2, (1, 4)), OWED)
    assert len(everybodys) == 2
    assert own_of(everybodys, Member(0, 2, (1, 4))) == OWED


def test_what_earlier_versions_saved_in_a_part_of_all_ranks_is_taken_up_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert own_of({"rank 0 of 2": OWED, "rank 1 of 2": NOTHING}, Member(0, 2, (1, 4))) == OWED
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("residuals of rank 0 of 2 are used on rank 0 of 2 (rank 1 of 4 in all)")


def test_what_earlier_versions_saved_is_taken_up() -> None:
    assert own_of({"rank": 1, "world_size": 2, "residuals": OWED}, Member(1, 2)) == OWED


@pytest.mark.parametrize(
    ("state", "whose"),
    [
        (saved(Member(1, 2), OWED), "rank 1 of 2"),
        (saved(Member(0, 3), OWED) | saved(Member(1, 3), OWED), "rank 0 of 3, rank 1 of 3"),
        ({"rank": 1, "world_size": 2, "residuals": OWED}, "rank 1 of 2"),
        (saved(Member(0, 2, (2, 4)), OWED), "rank 0 of 2 (rank 2 of 4 in all)"),
        ({}, "nobody"),
    ],
)
def test_what_others_are_owed_is_left_out_with_a_warning(
    state: dict[str, object], whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert own_of(state, Member(0, 2)) is None
    assert [record.getMessage() for record in caplog.records] == [f"residuals of {whose} are not used on rank 0 of 2"]
