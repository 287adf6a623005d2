"""What a user writes, started by torchrun; the first argument is where rank 0 writes that all went well."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gradwire")  # torch >= 2.14 finds the backend by its entry point
    import gradwire.torch

    model = DistributedDataParallel(torch.nn.Linear(10, 10))
    gradwire.torch.tolerate_loss(model)
    for _ in range(3):
        model(torch.ones(2, 10)).sum().backward()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(f"{dist.get_backend()} {dist.get_world_size()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
