"""Lightning over gradwire: two lines differ from any other Lightning script, marked (1) and (2).

    python examples/with_lightning.py

Lightning starts the second process by itself.
"""

from __future__ import annotations

from typing import Any

import gradwire.torch
import lightning
import torch
import torch.distributed as dist
from framework_task import arguments, network, result, samples
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

RANKS = 2


class Regression(lightning.LightningModule):
    """The task as a module of Lightning.

    Args:
        tolerant: whether gradients may be lost.
    """

    def __init__(self, *, tolerant: bool) -> None:
        super().__init__()
        self.network, self.tolerant = network(), tolerant
        self.latest = torch.tensor(0.0)
        self.tolerance: Any = None

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """The loss of one batch."""
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.network(inputs), targets)
        self.latest = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain descent: what differs between backends would show."""
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_start(self) -> None:
        """The model is wrapped, no gradient was made yet: the place to opt in to loss."""
        if self.tolerant:
            self.tolerance = gradwire.torch.tolerate_loss(self.trainer.strategy.model)  # (2)


def main() -> None:
    args = arguments(__doc__)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend=args.backend),  # (1)
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Regression(tolerant=args.tolerant)
    trainer.fit(model, DataLoader(samples(), batch_size=32))
    if trainer.is_global_zero:
        print(result(model, model.latest, dist.get_backend(), model.tolerance), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
