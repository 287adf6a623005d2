"""One rank of a job that no launcher has named: meets the other one, and prints what `gradwire monitor` would find.

Arguments: how the ranks meet (`tcp://...`, `file://...`, or `store://host:port`, a Store of the program's own), rank, world size.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.observe.client import find_sockets

TIMEOUT = timedelta(seconds=60)


def main(method: str, rank: int, world_size: int) -> None:
    if method.startswith("store://"):
        # Ranks of one host may reach it by another name than those of others.
        host, port = method.removeprefix("store://").split(":")
        store = dist.TCPStore(host if rank == 0 else "localhost", int(port), world_size, rank == 0, TIMEOUT)
        dist.init_process_group("gradwire", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    else:
        dist.init_process_group("gradwire", init_method=method, rank=rank, world_size=world_size, timeout=TIMEOUT)
    dist.all_reduce(torch.ones(4))
    seen = gradwire.stats()
    facts = {"job": seen["job"], "meeting": seen["meeting"]}
    facts["found"] = {what: len(find_sockets(what)) for what in facts.values()}
    print(json.dumps(facts), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
