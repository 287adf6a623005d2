"""Hugging Face Accelerate over gradwire: two lines differ from any other Accelerate script, marked (1) and (2).

    torchrun --nproc-per-node 2 examples/with_accelerate.py

Accelerate takes up a process group that exists. Asked to make one for CPUs it would allow only gloo and MPI.
"""

from __future__ import annotations

import gradwire.torch
import torch
import torch.distributed as dist
from accelerate import Accelerator
from framework_task import arguments, network, result, samples
from torch.utils.data import DataLoader


def main() -> None:
    args = arguments(__doc__)
    dist.init_process_group(args.backend)  # (1)
    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(samples(), batch_size=32)
    )
    tolerance = gradwire.torch.tolerate_loss(model) if args.tolerant else None  # (2)
    loss = torch.tensor(0.0)
    for _ in range(args.epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
    mean_loss = accelerator.gather(loss.detach().reshape(1)).mean()
    if accelerator.is_main_process:
        print(result(accelerator.unwrap_model(model), mean_loss, dist.get_backend(), tolerance), flush=True)
    accelerator.end_training()  # destroys the process group


if __name__ == "__main__":
    main()
