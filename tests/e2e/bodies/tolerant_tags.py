"""A group whose all-reduces may lose, where the network is told which gradients matter."""

from __future__ import annotations

import logging

import gradwire.torch
import torch
import torch.distributed as dist

ELEMS = 500_000


def check_gradients_of_a_tolerant_group_are_told_apart_and_lost_results_are_warned_of() -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    whole = gradwire.torch.tolerant_group(preset="mlt", gather_loss_bound=0.0)
    assert not any("lost on their way back" in line for line in told)
    gradwire.torch.tolerant_group(preset="mlt")
    logging.getLogger("gradwire").removeHandler(handler)
    assert any("lost on their way back (0.1 of them)" in line for line in told)
    # Where half of them are zero the packets of the others are important.
    gradient = torch.where(torch.arange(ELEMS) < ELEMS // 2, 0.0, 1.0)
    dist.all_reduce(gradient, group=whole)
    (peer,) = gradwire.torch.stats(whole)["group"]["peers"]
    assert 0 < peer["tags"]["important_sent"] < peer["packets_sent"], peer
