"""The form in which residuals are saved: each rank has its own, under a key of its own.

`torch.distributed.checkpoint` takes values under the same key on all ranks for one and the same, and writes each from any of them. It
reads into what `state_dict()` shows, so that every parameter shows something from the start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

logger = logging.getLogger("gradwire")


def saved(rank: int, world_size: int, residuals: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What to save for this rank: `{"rank 0 of 2": {"layer.weight": ..}}`."""
    return {_key(rank, world_size): dict(residuals)}


def own_of(state: Mapping[str, Any], rank: int, world_size: int) -> Mapping[str, Tensor] | None:
    """The residuals of this rank in what was saved, also by an earlier version; None, with a warning: they are others'.

    A state of several ranks may hold this one's.
    """
    if "residuals" in state:
        state = {_key(state["rank"], state["world_size"]): state["residuals"]}
    own: Mapping[str, Tensor] | None = state.get(_key(rank, world_size))
    if own is None:
        logger.warning("residuals of %s are not used on %s", ", ".join(state) or "nobody", _key(rank, world_size))
    return own


def _key(rank: int, world_size: int) -> str:
    return f"rank {rank} of {world_size}"
