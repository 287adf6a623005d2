"""Two ranks with four paths, of which one loses 30 % of its packets for a while, in one direction."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE

GLOO = dist.new_group(backend="gloo")
ELEMS = 1 << 19
GRAY = 2
LOSS_PERCENT = 30
RULES = """
table inet gradwire_test {{
    chain input {{
        type filter hook input priority 0;
        udp sport {port} numgen random mod 100 < {percent} counter drop
    }}
}}
"""


def nft(text: str) -> None:
    """Changes the packet filter of this rank's host."""
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)


def reduce_exactly(rounds: int) -> None:
    for _ in range(rounds):
        tensor = torch.full((ELEMS,), float(RANK + 1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((ELEMS,), float(sum(range(1, WORLD_SIZE + 1)))))


def paths() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gradwire.torch.stats()["group"]["peers"][0]["paths"]
    return found


def share(rounds: int) -> float:
    """Share of the data packets of this rank that took the gray path, copies left out, over some reductions."""
    sent = [path["packets_sent"] - path["copies_sent"] for path in paths()]
    reduce_exactly(rounds)
    sent = [path["packets_sent"] - path["copies_sent"] - before for path, before in zip(paths(), sent, strict=True)]
    return sent[GRAY] / sum(sent)


def share_once(holds: Callable[[float], bool]) -> float:
    """The share of rank 0 as soon as `holds` is true of it, or after the last of some attempts."""
    for _ in range(20):
        found = [share(rounds=10)]
        dist.broadcast_object_list(found, 0, group=GLOO)
        if holds(found[0]):
            break
    return found[0]


def check_a_gray_path_loses_its_share_and_gets_it_back_and_sums_stay_exact() -> None:
    # test of: mlt/gray-path
    ports: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(ports, [path["source_port"] for path in paths()], group=GLOO)
    assert len(set(ports[RANK])) == 4
    # Four paths over one link: at any moment one of them may have little of it.
    good = share_once(lambda share: share > 0.1)
    if RANK == 1:
        nft(RULES.format(port=ports[0][GRAY], percent=LOSS_PERCENT))
    dist.barrier(group=GLOO)
    bad = share_once(lambda share: share < good / 3)
    gray = paths()[GRAY]
    if RANK == 1:
        nft("delete table inet gradwire_test")
    dist.barrier(group=GLOO)
    healed = share_once(lambda share: share > good / 3)
    print(f"share of the gray path: {good:.3f}, {bad:.3f}, {healed:.3f}; {paths()}")
    if RANK == 0:
        assert good > 0.1
        # It was suspended and tried, not just slowed down by its rate controller.
        assert gray["packets_lost"] > 0
        assert gray["copies_sent"] > 0
        assert bad < good / 3
        assert healed > good / 3
