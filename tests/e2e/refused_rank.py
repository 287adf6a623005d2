"""A rank whose group cannot be formed: says why, and ends at once, rank 0 with the Store that the others look into.

Arguments: port of the Store, rank, world size, seconds to wait.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist
from gradwire.errors import GradwireError


def main(port: str, rank: int, world_size: int, timeout_s: float) -> None:
    try:
        dist.init_process_group(
            "gradwire",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except GradwireError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
