"""How long a training step spends in communication, measured alike for every backend.

`CommMeter.watch` times whatever DDP communication hook is registered after it, so that gloo's all-reduce and gradwire's
loss-tolerant one are read by the same clock at the same two places. Used by `train_gpt.py`, `gradwire demo` and the
benchmarks. Definitions, in milliseconds of wall time within one step:

- `comm_ms`: from the moment the first bucket of the backward pass is handed to the backend until `backward()` returns.
  DDP returns from `backward()` only when the last bucket is reduced and copied back, so this is the time during which
  the step has gradients under way.
- `blocked_ms`: the part of it after the *last* bucket was handed over. The backward pass has nothing left to compute by
  then, so this is the time for which the step does nothing but wait.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class StepComm:
    """Communication of one backward pass.

    Attributes:
        comm_ms: first bucket handed over until `backward()` returned.
        blocked_ms: last bucket handed over until `backward()` returned.
    """

    comm_ms: float
    blocked_ms: float


class CommMeter:
    """Stop watch around a DDP model's communication hook. One for each model; not thread-safe, as backward is not."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0

    def watch(self, model: DistributedDataParallel) -> None:
        """Times the hook that is registered on `model` from now on. Call it before registering."""
        register = model.register_comm_hook

        def register_timed(state: object, hook: Callable[[Any, dist.GradBucket], Any]) -> None:
            # DDP checks this signature: the name `bucket` and these annotations, as objects and not as strings.
            def timed(hook_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
                self._bucket_issued()
                return hook(hook_state, bucket)

            register(state, timed)

        model.register_comm_hook = register_timed  # type: ignore[method-assign]

    def _bucket_issued(self) -> None:
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last

    def backward_returned(self) -> StepComm:
        """Ends the measurement of one step; call it right after `loss.backward()`.

        Raises:
            RuntimeError: no bucket was seen, so the hook was registered before `watch`, or not at all.
        """
        now = time.perf_counter()
        if self._first is None:
            raise RuntimeError("no gradient bucket was seen: call watch(model) before the communication hook is set")
        result = StepComm((now - self._first) * 1e3, (now - self._last) * 1e3)
        self._first = None
        return result
