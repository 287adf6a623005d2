"""The form in which residuals are saved: each rank has its own, under a key of its own.

`torch.distributed.checkpoint` takes values under the same key on all ranks for one and the same, and writes each from any of them. It
reads into what `state_dict()` shows, so that every parameter shows something from the start. Where a model is replicated in a part of all
ranks, others may have another part of it under the same names in theirs: there the key says which rank of all it is, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("gradwire")


class Member(NamedTuple):
    """Whose residuals they are.

    Attributes:
        rank: in the group that exchanges gradients.
        world_size: of that group.
        in_all: rank of the process and their number, where the group is a part of them.
    """

    rank: int
    world_size: int
    in_all: tuple[int, int] | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Member:
        """This process in a group; None: in the default one."""
        own, everybody = (dist.get_rank(group), dist.get_world_size(group)), (dist.get_rank(), dist.get_world_size())
        return cls(*own) if own[1] == everybody[1] else cls(*own, everybody)

    @property
    def key(self) -> str:
        """Under which its residuals are saved."""
        within = "" if self.in_all is None else f" (rank {self.in_all[0]} of {self.in_all[1]} in all)"
        return f"rank {self.rank} of {self.world_size}{within}"


def saved(member: Member, residuals: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What to save for this rank: `{"rank 0 of 2": {"layer.weight": ..}}`."""
    return {member.key: dict(residuals)}


def own_of(state: Mapping[str, Any], member: Member) -> Mapping[str, Tensor] | None:
    """The residuals of this rank in what was saved, also by an earlier version; None, with a warning: they are others'.

    A state of several ranks may hold this one's. Of a part of all ranks earlier versions saved the rank in the group alone.
    """
    if "residuals" in state:
        state = {Member(state["rank"], state["world_size"]).key: state["residuals"]}
    earlier = member._replace(in_all=None).key
    key = member.key if member.key in state else earlier
    own: Mapping[str, Tensor] | None = state.get(key)
    if own is None:
        logger.warning("residuals of %s are not used on %s", ", ".join(state) or "nobody", member.key)
    elif key != member.key:
        logger.warning(
            "residuals of %s are used on %s: what saved them did not say of which group they are", key, member.key
        )
    return own
