"""Ray Train over gradwire: two lines differ from any other Ray Train script, marked (1) and (2).

    python examples/with_ray.py

Ray starts the workers, on the nodes of its cluster or, as here, on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import ray.train.torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

RANKS = 2


def train(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    import gradwire.torch
    import torch
    import torch.distributed as dist
    from framework_task import network, result, samples
    from torch.utils.data import DataLoader

    model = ray.train.torch.prepare_model(network())
    tolerance = gradwire.torch.tolerate_loss(model) if settings["tolerant"] else None  # (2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = ray.train.torch.prepare_data_loader(DataLoader(samples(), batch_size=32))
    loss = torch.tensor(0.0)
    for _ in range(settings["epochs"]):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(result(model.module, loss.detach(), dist.get_backend(), tolerance), flush=True)


def main() -> None:
    from framework_task import arguments

    args = arguments(__doc__)
    here = str(Path(__file__).parent)
    ray.init(num_cpus=RANKS, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
    trainer = TorchTrainer(
        train,
        train_loop_config={"tolerant": args.tolerant, "epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=RANKS),
        torch_config=TorchConfig(backend=args.backend),  # (1)
        run_config=RunConfig(name="gradwire"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
