"""One rank of the training study: trains small models as ordered, over links that lose what the environment says.

    {"do": "train", "task": "digits", "method": {..}, "seed": 1, "steps": 100}
        ->  {"loss": validation loss, "accuracy": .., "expected": bytes, "received": bytes, "ended_by_time": transfers,
             "overflows": datagrams, "identical": .., "seconds": ..}

The model, the batches and the validation set follow from task and seed alone, so that runs differ in what was lost and in
nothing else. All gradients travel in one bucket, under a contract without any deadline that sends nothing again: when
everything has been sent once, what is missing is what the network lost, however long it took.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from gradwire.lab import crew

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

# Enough that nothing of what was lost is asked for again at the losses of the study.
LOSS_BOUND = 0.9
NEVER = timedelta(0)
ONE_BUCKET_MB = 1000


@dataclass
class Task:
    """A model to train: `step_loss(model, step, seed, rank)` is a batch's loss, `judge(model)` (loss, accuracy)."""

    model: Any
    optimizer: Any
    step_loss: Any
    judge: Any


def digits(seed: int, steps: int) -> Task:
    """A convolutional network on scikit-learn's digits: 1797 pictures of 8 x 8, of which a fifth is for validation."""
    import torch
    from torch import nn
    from torch.nn import functional

    x, y = _pictures()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, validation = order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(48 * 16, 96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps + 1, cycle_momentum=False)

    def step_loss(replica: Any, step: int, rank: int) -> Any:
        if step > 0:
            schedule.step()
        generator = torch.Generator().manual_seed(seed << 40 | step << 8 | rank)
        chosen = train[torch.randint(len(train), (16,), generator=generator)]
        return functional.cross_entropy(replica(x[chosen]), y[chosen])

    def judge() -> tuple[float, float]:
        logits = model(x[validation])
        accuracy = (logits.argmax(1) == y[validation]).float().mean().item()
        return functional.cross_entropy(logits, y[validation]).item(), accuracy

    return Task(model, optimizer, step_loss, judge)


def transformer(seed: int, steps: int) -> Task:
    """The transformer of `examples/`, shrunk, on the standard library's sources; accuracy is that of the next byte.

    Trained with SGD: AdamW divides each parameter's gradient by its usual size, so that gradients which zero-fill makes smaller
    would come out as large as ever, and no length of training would show it. Weights start larger than in the example, whose
    start is made for AdamW: with SGD it stays for long where it predicts nothing but how frequent a byte is.
    """
    import torch
    from gpt import Corpus, Gpt, ModelSize, batch_at, loss_of

    size = ModelSize(layers=1, width=64, heads=4, context=48)
    corpus = _corpus(Corpus)
    torch.manual_seed(seed)
    model = Gpt(size)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False
    )

    def step_loss(replica: Any, step: int, rank: int) -> Any:
        if step > 0:
            schedule.step()
        return loss_of(replica, *batch_at(corpus.train, size, 6, seed, step, rank))

    def judge() -> tuple[float, float]:
        inputs, targets = batch_at(corpus.validation, size, 192, -1)
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
        return loss, (logits.argmax(-1) == targets).float().mean().item()

    return Task(model, optimizer, step_loss, judge)


TASKS = {"digits": digits, "transformer": transformer}


@cache
def _corpus(kind: Any) -> Any:
    """The text."""
    return kind.of_standard_library()


@cache
def _pictures() -> tuple[Any, Any]:
    """`[1797, 1, 8, 8] float32` from 0 to 1 and `[1797] int64`, of scikit-learn's file: importing it takes longer than a training."""
    import numpy
    import torch

    package = importlib.util.find_spec("sklearn")
    if package is None or package.submodule_search_locations is None:
        raise ModuleNotFoundError("the digits are scikit-learn's: install it (requirements-dev.txt)")
    file = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
    return table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()


class Worker:
    """The process group of this rank."""

    def __init__(self, say: Any) -> None:
        import gradwire.torch  # noqa: F401  registers the backend
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._say = say
        dist.init_process_group("gradwire")

    def obey(self, order: crew.Answer) -> None:
        """Trains one model and says how good it became."""
        import gradwire.torch
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        started, rank = time.monotonic(), dist.get_rank()
        task = TASKS[order["task"]](order["seed"], order["steps"])
        model = DistributedDataParallel(task.model, bucket_cap_mb=ONE_BUCKET_MB, gradient_as_bucket_view=True)
        full_buffers = gradwire.torch.stats()["engine"]["receive_overflows"]
        state = gradwire.torch.tolerate_loss(
            model, preset="auto", loss_bound=LOSS_BOUND, deadline=NEVER, algorithm="transpose", **order["method"]
        )
        for step in range(order["steps"]):
            task.optimizer.zero_grad()
            task.step_loss(model, step, rank).backward()
            task.optimizer.step()
        task.model.eval()
        with torch.no_grad():
            loss, accuracy = task.judge() if rank == 0 else (0.0, 0.0)
        identical = state.drift.check().identical
        self._say(
            {
                "loss": loss,
                "accuracy": accuracy,
                "identical": identical,
                "expected": state.total.bytes_expected,
                "received": state.total.bytes_received,
                "ended_by_time": state.total.ended_by_time,
                "overflows": gradwire.torch.stats()["engine"]["receive_overflows"] - full_buffers,
                "seconds": time.monotonic() - started,
            }
        )

    def close(self) -> None:
        """Leaves the group."""
        import torch.distributed as dist

        dist.destroy_process_group()


def main() -> None:
    """Serves until the input ends."""
    crew.serve(Worker)


if __name__ == "__main__":
    sys.exit(main())
