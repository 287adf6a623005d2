"""What torchrun starts again after rank 1 ended while rank 0 waited for it to form a group.

Arguments: a folder; before which group it ends, 0: that of all ranks, 1: the next one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import gradwire.torch  # noqa: F401  (registers the backend)
import torch
import torch.distributed as dist
from gradwire import _board

PATIENCE_S = 120.0


def say_when_it_waits(folder: Path) -> None:
    """Rank 0 says in the folder when it has published its record of a group and waits for others."""
    collect, groups = _board.Board.collect, iter(range(2))

    def told(board: _board.Board, timeout_s: float) -> dict[int, dict[str, object]]:
        (folder / f"waits for {next(groups)}").touch()
        return collect(board, timeout_s)

    _board.Board.collect = told  # type: ignore[method-assign]


def end_when_waited_for(folder: Path, group: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while not (folder / f"waits for {group}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os._exit(1)


def main() -> None:
    folder, fatal = Path(sys.argv[1]), int(sys.argv[2])
    rank, is_first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first and rank == 0:
        say_when_it_waits(folder)
    if is_first and rank == 1 and fatal == 0:
        end_when_waited_for(folder, 0)
    dist.init_process_group("gradwire")
    if is_first and rank == 1:
        end_when_waited_for(folder, 1)
    group = dist.new_group([0, 1])
    values = torch.ones(3)
    dist.all_reduce(values, group=group)
    assert values.tolist() == [2.0] * 3
    if rank == 0:
        (folder / "restarts").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
