"""Exact sums over two cards on hosts that route by destination alone, with a third card that leads nowhere.

The test says in the environment from which local addresses the further paths must go (GRADWIRE_TEST_WAYS); the first goes
as the kernel routes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE

GLOO = dist.new_group(backend="gloo")
WAYS = json.loads(os.environ["GRADWIRE_TEST_WAYS"])[RANK]
ELEMS, ROUNDS = 1 << 19, 10
# A busy machine gives each of the paths little now and then; without its card in use a path has nothing of it at all.
LEAST_SHARE = 0.1
CUT = """
table inet gradwire_test {
    chain input {
        type filter hook input priority 0;
        iifname "eth1" counter drop
    }
}
"""


def nft(text: str) -> None:
    """Changes the packet filter of this rank's host."""
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)


def paths() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gradwire.torch.stats()["group"]["peers"][0]["paths"]
    return found


def sent() -> dict[str, int]:
    """Bytes that each device of this rank's host has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(counters.split()[8]) for name, counters in (line.split(":") for line in lines)}


def shares() -> dict[str, float]:
    """Share of each device in the bytes that this rank's host sends during some exact reductions."""
    before = sent()
    for _ in range(ROUNDS):
        tensor = torch.full((ELEMS,), float(RANK + 1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((ELEMS,), float(sum(range(1, WORLD_SIZE + 1)))))
    bytes_of = {name: count - before[name] for name, count in sent().items() if name != "lo"}
    return {name: count / sum(bytes_of.values()) for name, count in bytes_of.items()}


def until(holds: Callable[[dict[str, float]], bool], attempts: int = 60) -> dict[str, float]:
    """The shares as soon as `holds` is true of them on every rank, or after the last of some attempts."""
    for _ in range(attempts):
        found = shares()
        everywhere: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(everywhere, bool(holds(found)), group=GLOO)
        if all(everywhere):
            break
    print(found, paths(), flush=True)
    return found


def both_carry(found: dict[str, float]) -> bool:
    return min(found["eth0"], found["eth1"]) > LEAST_SHARE


def have_their_ways() -> bool:
    ways = [path["local_address"] for path in paths()]
    return ways[0] is None and set(ways[1:]) == set(WAYS)


def check_paths_take_every_card_that_leads_to_the_peer_and_no_other() -> None:
    # test of: mlt/spray
    found = until(lambda found: both_carry(found) and have_their_ways())
    assert have_their_ways(), (paths(), WAYS)
    assert both_carry(found), found
    assert found.get("useless0", 0.0) < 0.001, found


def check_a_cut_card_costs_no_sum_and_carries_its_part_again_once_it_is_mended() -> None:
    # test of: mlt/gray-path
    nft(CUT)
    dist.barrier(group=GLOO)
    cut = until(lambda found: found["eth1"] < LEAST_SHARE)
    dist.barrier(group=GLOO)
    nft("delete table inet gradwire_test")
    dist.barrier(group=GLOO)
    mended = until(both_carry)
    assert cut["eth1"] < LEAST_SHARE, cut
    assert both_carry(mended), mended
