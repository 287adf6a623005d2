"""A rank that is killed, started again and joins, in a program that forms a second group before its first `sync`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import InvalidRequestError
from rank import FOLDER, RANK, WORLD_SIZE

VICTIM, LOST_AT = 2, 3
LIFE = int(os.environ.get("GRADWIRE_TEST_LIFE", "0"))
STEPS_MAX = 20_000


def check_a_rank_that_is_back_forms_no_second_group_while_the_members_of_the_first_wait_for_it() -> None:
    if LIFE:
        with pytest.raises(InvalidRequestError, match=r"call sync\(\) there before group"):
            dist.new_group()
        return  # and it leaves
    second = dist.new_group()
    state = gradwire.torch.ElasticState(step=0)
    members, epochs = list(range(WORLD_SIZE)), {0}
    while state.step < STEPS_MAX and not (max(epochs) > 1 and VICTIM not in members):
        state.sync()
        if state.step == LOST_AT and RANK == VICTIM:
            Path(FOLDER / "lost").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        mean = torch.tensor([float(RANK)])
        report = gradwire.torch.all_reduce(mean, preset="reliable").report()
        members = list(report.members)
        epochs.add(report.epoch)
        assert mean.item() == pytest.approx(sum(members) / len(members))
        state.step += 1
    assert members == [rank for rank in range(WORLD_SIZE) if rank != VICTIM], "nobody has come, or it has stayed"
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=second)
