"""What a script does at exit; see bodies/at_exit.py."""

from __future__ import annotations

from pathlib import Path

from launch import launch


def test_functions_at_exit_may_call_and_the_goodbye_waits_for_no_child(tmp_path: Path) -> None:
    outcome = launch("at_exit", 2, tmp_path, backend="")
    outcome.require("last_calls")
    assert outcome.results[1].get("goodbye") == "ok", outcome.transcript()
    outcome.require_clean_exit()
