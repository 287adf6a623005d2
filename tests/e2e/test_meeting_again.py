"""A board that stays (`on_peer_loss="continue"`) is used again and again: by `sync`, `split`, the next life of a rank and the next
communicator."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from free_ports import free_port
from test_communicator import printed, start

SCRIPT = Path(__file__).parent / "meeting_again_rank.py"
WORLD_SIZE = 3
VARIABLES = {"GRADWIRE_ON_PEER_LOSS": "continue", "GRADWIRE_PEER_TIMEOUT_S": "10"}


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    """What each rank printed, and last the next life of the last one."""
    port = free_port()
    ranks = [start([str(SCRIPT)], rank, WORLD_SIZE, port, **VARIABLES) for rank in range(WORLD_SIZE)]
    printed_before = printed(ranks[-1])
    if ranks[-1].returncode == -signal.SIGKILL:
        ranks.append(start([str(SCRIPT)], WORLD_SIZE - 1, WORLD_SIZE, port, **VARIABLES, GRADWIRE_TEST_LIFE="1"))
    rest = {rank: printed(rank) for rank in [*ranks[:-2], ranks[-1]]}
    return [rest.get(rank, printed_before) for rank in ranks]


def test_rank_0_looks_at_the_board_and_meets_the_others_there_for_split(outputs: list[str]) -> None:
    assert all("splits" in output for output in outputs[:WORLD_SIZE]), outputs


def test_a_second_communicator_at_the_address_of_an_open_one_is_refused_at_once(outputs: list[str]) -> None:
    assert all("refused: " in output and "that is open" in output for output in outputs[:WORLD_SIZE]), outputs


def test_a_state_that_its_source_cannot_pack_is_an_error_on_all_ranks_and_the_group_goes_on(outputs: list[str]) -> None:
    told = "not packed: rank 1 cannot tell rank 0 what it has: ValueError: a state that nobody can send"
    assert all(told in output for output in outputs[:WORLD_SIZE]), outputs


def test_a_part_is_split_off_with_the_next_life_of_a_rank(outputs: list[str]) -> None:
    assert all("split again" in outputs[index] for index in (0, 1, -1)), outputs


def test_another_communicator_follows_when_the_first_is_closed(outputs: list[str]) -> None:
    assert all("another one" in outputs[index] for index in (0, 1, -1)), outputs


def test_the_board_has_room_for_any_number_of_communicators(outputs: list[str]) -> None:
    assert all("many" in outputs[index] for index in (0, 1, -1)), outputs
