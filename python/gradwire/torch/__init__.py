"""gradwire for PyTorch: the `torch.distributed` backend "gradwire", and the one line that opts gradients in to loss.

    import torch.distributed as dist, gradwire.torch
    dist.init_process_group("gradwire")
    model = DistributedDataParallel(model)
    gradwire.torch.tolerate_loss(model)

Importing registers the backend and starts nothing; the engine starts with the first process group.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from gradwire import _extras

_extras.require("torch", "torch", "gradwire.torch")

import torch.distributed as dist  # noqa: E402

from gradwire import _completer, _outbox, _policy, _rendezvous, _runtime  # noqa: E402
from gradwire.torch import _compat  # noqa: E402

_compat.require_torch()
_compat.require_numpy()

from gradwire._runtime import configure  # noqa: E402
from gradwire.torch import (  # noqa: E402  nothing of torch's newer interfaces may be touched before the check
    _backend,
    _callers,
    _coalescing,
    _deliveries,
    _drift,
    _early,
    _elastic,
    _ending,
    _finite,
    _group,
    _hook,
    _hyperparameters,
    _memory,
    _monitored,
    _ops,
    _own_works,
    _pinned,
    _profile,
    _reconfigure,
    _reduction,
    _residuals,
    _saved,
    _scalars,
    _serving,
    _sharded,
    _sparse,
    _split,
    _staging,
    _steps,
    _streams,
    _tags,
    _tolerant,
    _work,
    _wrapped,
)
from gradwire.torch._drift import Difference, DriftMeter, DriftReport  # noqa: E402
from gradwire.torch._early import EarlySteps  # noqa: E402
from gradwire.torch._elastic import ElasticState  # noqa: E402
from gradwire.torch._hook import LossTolerance, tolerate_loss  # noqa: E402
from gradwire.torch._sharded import ShardedLossTolerance  # noqa: E402
from gradwire.torch._steps import StepRecord  # noqa: E402
from gradwire.torch._tags import ShardedBucket  # noqa: E402
from gradwire.torch._tolerant import all_reduce, link_of, reduce_scatter, tolerant_group  # noqa: E402
from gradwire.torch._work import GradwireWork  # noqa: E402

__all__ = [
    "Difference",
    "DriftMeter",
    "DriftReport",
    "EarlySteps",
    "ElasticState",
    "GradwireWork",
    "LossTolerance",
    "ShardedBucket",
    "ShardedLossTolerance",
    "StepRecord",
    "all_reduce",
    "configure",
    "last_error",
    "members",
    "reduce_scatter",
    "register",
    "stats",
    "tolerant_group",
    "tolerate_loss",
]

DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Makes `init_process_group("gradwire")` known to torch. Called by import and by torch's entry point; may be repeated."""
    if not hasattr(dist.Backend, _backend.NAME.upper()):
        dist.Backend.register_backend(_backend.NAME, _backend.create, extended_api=True, devices=DEVICES)


def stats(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Counters of the connection to each peer of a group (None: the default group), and of the process's engine.

    Raises:
        UnsupportedError: the group has another backend.
    """
    link = link_of(group)
    return {"group": link.stats(), "engine": link.owner.engine.stats(), "features": link.owner.engine.features()}


def members(group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """The ranks of a group that are left (None: the default group), by the numbers that they began with.

    All of them, unless `on_peer_loss="continue"` lost some. torch goes on to call the first number the world size.

    Raises:
        UnsupportedError: the group has another backend.
    """
    link = link_of(group)
    epoch = link.stats()["epoch"]
    return tuple(range(link.world_size)) if epoch is None else tuple(epoch["members"])


def last_error() -> Exception | None:
    """The latest error of any collective in this process, with its type: `backward` passes errors on as RuntimeError.

    Without traceback and cause, so that what a failed step held does not stay in memory.
    """
    owner = _runtime.current()
    return None if owner is None else owner.completer.last_error


def _functions_of(module: types.ModuleType) -> list[Any]:
    return [member for member in vars(module).values() if getattr(member, "__module__", None) == module.__name__]


for _module in (
    _callers, _coalescing, _completer, _deliveries, _drift, _early, _elastic, _ending, _finite, _group, _hook, _hyperparameters,
    _memory, _monitored, _ops, _outbox, _own_works, _pinned, _policy, _profile, _reconfigure, _reduction, _rendezvous, _residuals,
    _runtime, _saved, _scalars, _serving, _sharded, _sparse, _split, _staging, _steps, _streams, _tags, _tolerant, _work, _wrapped,
    _backend,
):  # fmt: skip
    _compat.hide_from_dynamo(_functions_of(_module))
_compat.hide_from_dynamo(_functions_of(sys.modules[__name__]))
_own_works.install()
_split.install()
_coalescing.install()
register()
