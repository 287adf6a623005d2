"""Trains a small transformer with PyTorch DDP; the gradients travel over gloo (TCP) or gradwire.

    torchrun --nproc-per-node 4 examples/train_gpt.py --backend gradwire --steps 300
    torchrun --nproc-per-node 4 examples/train_gpt.py --backend gloo --steps 300     # the same, over TCP

Two lines make a DDP script a gradwire script; both are in `Trainer`: the name of the backend, and `tolerate_loss`, which
lets gradients (and nothing else) be reduced without waiting for every last packet.

What is on disk after `--checkpoint DIR`: a folder for each saved step with one file for each rank, and `latest`, which
names the newest complete one. Starting again with the same folder goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from comm_meter import CommMeter
from gpt import Corpus, Gpt, ModelSize, batch_at, loss_of
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Settings:
    """Everything that decides the course of a run. Equal settings and equal seeds give equal batches and weights."""

    backend: str = "gradwire"
    preset: str = "auto"
    loss_bound: float | None = None
    steps: int = 300
    batch: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    seed: int = 1
    validation_batches: int = 16
    size: ModelSize = field(default_factory=ModelSize)


@dataclass(frozen=True)
class StepRecord:
    """What one step took and gave on this rank; times in milliseconds (defined in `comm_meter`).

    `bytes_lost_share` is the share of the other ranks' gradients that did not come in time to be averaged here, 0 to 1. It is
    not gone: `tolerate_loss` adds it to the next step's gradient.
    """

    step: int
    loss: float
    step_ms: float
    comm_ms: float
    blocked_ms: float
    bytes_lost_share: float


class ReplicaMismatch(RuntimeError):
    """Ranks that must hold the same parameters, bit by bit, do not."""


class Trainer:
    """One replica of the model on this rank, its optimizer and its data.

    Args:
        settings: must be equal on all ranks.
        corpus: the text; the same on all ranks.
        group: process group to train in, or None for the default one.
    """

    def __init__(self, settings: Settings, corpus: Corpus, group: dist.ProcessGroup | None = None) -> None:
        self.settings, self.corpus, self.group = settings, corpus, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.step_index = 0
        torch.manual_seed(settings.seed)
        self.model = DistributedDataParallel(Gpt(settings.size), process_group=group, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
        self.meter = CommMeter()
        self.meter.watch(self.model)
        self.hook_state = self._choose_hook()

    def _choose_hook(self) -> Any:
        if self.settings.backend != "gradwire":
            self.model.register_comm_hook(self.group, allreduce_hook)
            return None
        import gradwire.torch  # needed for this backend alone, so gloo runs without it

        return gradwire.torch.tolerate_loss(
            self.model, preset=self.settings.preset, loss_bound=self.settings.loss_bound
        )

    def step(self) -> StepRecord:
        """One optimizer step on this rank's share of the batch."""
        started = time.perf_counter()
        inputs, targets = batch_at(
            self.corpus.train, self.settings.size, self.settings.batch, self.settings.seed, self.step_index, self.rank
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        loss = loss_of(self.model, inputs, targets)
        loss.backward()
        comm = self.meter.backward_returned()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_index += 1
        elapsed_ms = (time.perf_counter() - started) * 1e3
        return StepRecord(
            self.step_index,
            loss.item(),
            elapsed_ms,
            comm.comm_ms,
            comm.blocked_ms,
            self._lost_share(),
        )

    def _learning_rate(self) -> float:
        """Linear warm-up, then half a cosine down to a tenth."""
        settings, step = self.settings, self.step_index
        if step < settings.warmup_steps:
            return settings.learning_rate * (step + 1) / settings.warmup_steps
        progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
        return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))

    def _lost_share(self) -> float:
        if self.hook_state is None:
            return 0.0  # TCP loses nothing; it waits
        return float(self.hook_state.steps[-1].lost_share)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss in nats for each byte over a fixed set of windows, shared out among the ranks; equal on all."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for index in range(self.rank, self.settings.validation_batches, self.world_size):
            # The key differs from every training key, and does not depend on the seed: all runs are judged alike.
            batch = batch_at(self.corpus.validation, self.settings.size, 16, -1, index)
            sums += torch.tensor([loss_of(self.model.module, *batch).item(), 1.0], dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        self.model.train()
        return (sums[0] / sums[1]).item()

    def parameters_digest(self) -> bytes:
        """SHA-256 of all parameters; equal on two ranks when their parameters are equal bit by bit."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy())
        return digest.digest()

    def check_replicas(self) -> None:
        """Compares the parameters of all ranks.

        Raises:
            ReplicaMismatch: naming the ranks that differ from rank 0.
        """
        mine = torch.frombuffer(bytearray(self.parameters_digest()), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self.group)
        different = [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, everyone[0])]
        if different:
            raise ReplicaMismatch(f"after step {self.step_index}, parameters on ranks {different} differ from rank 0's")

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on; the hook's state holds gradients that are still owed, so it is per rank."""
        hook = self.hook_state.state_dict() if hasattr(self.hook_state, "state_dict") else None
        return {
            "step": self.step_index,
            "settings": asdict(self.settings),
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "hook": hook,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the checkpoint is of another model."""
        if state["settings"]["size"] != asdict(self.settings.size):
            raise ValueError(f"checkpoint of a model {state['settings']['size']}, this is {self.settings.size}")
        self.step_index = state["step"]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if state["hook"] is not None and self.hook_state is not None:
            self.hook_state.load_state_dict(state["hook"])


def save(trainer: Trainer, folder: Path) -> None:
    """Writes one file for each rank, and names the step in `latest` only when all of them are complete."""
    target = folder / f"step-{trainer.step_index:06d}"
    target.mkdir(parents=True, exist_ok=True)
    torch.save(trainer.state_dict(), target / f"rank-{trainer.rank}.pt")
    dist.barrier(group=trainer.group)
    if trainer.rank == 0:
        marker = folder / "latest.tmp"
        marker.write_text(target.name)
        os.replace(marker, folder / "latest")


def resume(trainer: Trainer, folder: Path) -> None:
    """Loads the newest complete checkpoint, if there is one; raises FileNotFoundError where this rank's part is missing.

    Rank 0, which wrote it, says which one that is: ranks of hosts whose folders differ would train on from different steps.
    """
    marker = folder / "latest"
    latest = [marker.read_text() if trainer.rank == 0 and marker.exists() else None]
    dist.broadcast_object_list(latest, group=trainer.group, group_src=0)
    if latest[0] is not None:
        part = folder / latest[0] / f"rank-{trainer.rank}.pt"
        trainer.load_state_dict(torch.load(part, weights_only=True))


@contextmanager
def progress_bar(rank: int, total: int, done: int) -> Iterator[Any]:
    """Gives a function `(completed, text)`; only rank 0 draws."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, disable=rank != 0) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda completed, text: progress.update(task, completed=completed, description=text)


def train(trainer: Trainer, args: argparse.Namespace, log: TextIO | None) -> float:
    """Runs to the last step; returns the final validation loss in nats for each byte."""
    steps = trainer.settings.steps
    with progress_bar(trainer.rank, steps, trainer.step_index) as show:
        while trainer.step_index < steps:
            record = asdict(trainer.step())
            step = trainer.step_index
            if args.check_replicas:
                trainer.check_replicas()
            if step % args.validate_every == 0:
                record["val_loss"] = trainer.validation_loss()
            if args.checkpoint and (step % args.checkpoint_every == 0 or step == steps):
                save(trainer, args.checkpoint)
            show(step, f"loss {record['loss']:.3f}  step {record['step_ms']:.0f} ms  comm {record['comm_ms']:.0f} ms")
            if log is not None:
                print(json.dumps(record), file=log, flush=True)
    return trainer.validation_loss()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "gradwire"), default="gradwire")
    parser.add_argument(
        "--preset", default="auto", help="gradwire: auto, mlt, dlcp, ltp, ultima, reliable (default: %(default)s)"
    )
    parser.add_argument(
        "--loss-bound", type=float, help="gradwire: share of each transfer that may be missing, 0 to 0.9"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="windows of text for each rank and step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    for name, value in asdict(ModelSize()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="model size (default: %(default)s)")
    parser.add_argument("--validate-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here, and go on from here if it exists")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--check-replicas", action="store_true", help="after each step, fail if parameters differ")
    parser.add_argument("--json-out", type=Path, metavar="FILE", help="rank 0 writes one JSON object for each step")
    return parser.parse_args()


def settings_from(args: argparse.Namespace) -> Settings:
    size = ModelSize(args.layers, args.width, args.heads, args.context)
    chosen = {name: getattr(args, name) for name in ("backend", "preset", "loss_bound", "steps", "batch", "seed")}
    return Settings(size=size, learning_rate=args.learning_rate, **chosen)


def main() -> None:
    args = parse_arguments()
    settings = settings_from(args)
    if settings.backend == "gradwire":
        import gradwire.torch  # noqa: F401  registers the backend
    dist.init_process_group(settings.backend)
    try:
        trainer = Trainer(settings, Corpus.of_standard_library())
        if args.checkpoint:
            resume(trainer, args.checkpoint)
        log = args.json_out.open("a") if args.json_out and trainer.rank == 0 else None
        loss = train(trainer, args, log)
        if trainer.rank == 0:
            print(f"validation loss {loss:.4f} nats for each byte after {trainer.step_index} steps")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
