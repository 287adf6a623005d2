"""Training that torchrun starts again: rank 1 kills itself once, and the new workers go on from the checkpoint.

Arguments: folder of the checkpoint, steps, the step before which rank 1 dies, how the ranks meet.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 10, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def main() -> None:
    folder, steps, fatal, method = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpoint, died = folder / "checkpoint.pt", folder / "died"
    import gradwire.torch

    dist.init_process_group("gradwire", init_method=method, rank=rank, world_size=world_size)
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(10, 10))
    state = gradwire.torch.tolerate_loss(model, preset="reliable")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["step"]
    for step in range(first, steps):
        if step == fatal and dist.get_rank() == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, folder / "next.pt")
            (folder / "next.pt").rename(checkpoint)
        dist.barrier()
    assert len(state.steps) == steps - first
    if dist.get_rank() == 0:
        weights = model.module.weight.detach().flatten().tolist()
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")  # None without torchrun
        torch.save({"first": first, "restarts": restarts, "weights": weights}, folder / "result.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
