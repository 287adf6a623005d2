"""Tagged gradients through a switch: what was asked for arrives, and what is important is lost less."""

from __future__ import annotations

import json
import os
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from rank import FOLDER, RANK

GLOO = dist.new_group(backend="gloo")
CLASS = 1
ROUNDS = 10
ELEMS = 500_000


def counters() -> list[dict[str, Any]]:
    """The other rank's connection to this one and this one's to it, when nothing is on its way any more."""
    dist.barrier()
    (peer,) = gradwire.torch.stats()["group"]["peers"]
    rows: list[Any] = [None, None]
    dist.all_gather_object(rows, peer, group=GLOO)
    return [rows[1 - RANK], rows[RANK]]


def check_important_packets_are_lost_less() -> None:
    # test of: mlt/gradient-aware-queueing, mlt/magnitude-drop
    # Every second stretch of a hundred packets has far larger gradients.
    large = (torch.arange(ELEMS) // 35_000) % 2 == 0
    for _ in range(ROUNDS):
        gradient = torch.where(large, 1.0, 0.001) * (1 + torch.rand(ELEMS))
        gradwire.torch.all_reduce(gradient, traffic_class=CLASS, preset="auto", loss_bound=0.5)
    sender, receiver = counters()
    sent, received = sender["tags"], receiver["tags"]
    important = sent["important_sent"] - received["important_received"]
    others = (sender["packets_sent"] - sent["important_sent"]) - (
        sum(received["received"]) - received["important_received"]
    )
    shares = {
        "important": important / sent["important_sent"],
        "others": others / (sender["packets_sent"] - sent["important_sent"]),
        "marked": received["congestion_received"],
        "sent": sent["important_sent"],
    }
    print(json.dumps(shares), flush=True)
    (FOLDER / f"shares-{RANK}").write_text(json.dumps(shares))
    assert sent["important_sent"] > 100
    assert received["received"][CLASS] > 0, received
    # Barriers name no class: theirs is 0.
    assert sum(received["received"]) == received["received"][0] + received["received"][CLASS], received
    assert received["ecn_capable_received"] > 0, received
    if "GRADWIRE_TEST_RED" in os.environ:
        assert shares["marked"] > 0, "the queue was never long: the test has shown nothing"
        assert shares["others"] > 0, "nothing was dropped: the test has shown nothing"
        assert shares["important"] < shares["others"] / 2, shares
