"""`on_peer_loss="continue"` where nobody is left to continue, on a Store that outlives the ranks; see bodies/all_lost.py."""

from __future__ import annotations

from pathlib import Path

from launch import launch

WORLD_SIZE = 2


def test_ranks_that_were_all_lost_form_a_new_group(tmp_path: Path) -> None:
    continues = {"GRADWIRE_ON_PEER_LOSS": "continue"}
    dead = range(WORLD_SIZE)
    launch("all_lost", WORLD_SIZE, tmp_path, env={**continues, "GRADWIRE_TEST_DIES": "1"}, expected_dead=dead)
    again = launch("all_lost", WORLD_SIZE, tmp_path, env=continues)
    again.require("check_the_group_is_formed")
    again.require_clean_exit()
