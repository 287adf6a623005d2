"""`split_group` on a rank that is in none of the parts.

torch asks the backend of every rank of the parent; from one written in Python it cannot take "nothing" for an answer, it
crashes. A rank of a group that gradwire serves alone therefore answers before torch asks. In a mixed group ("cuda:nccl") the
other backend has to be asked too; there a rank outside of all parts gets an error.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gradwire.errors import UnsupportedError
from gradwire.torch import _compat
from gradwire.torch._group import GroupLink


def install() -> None:
    """Changes `ProcessGroup.split_group`, once, where torch has it."""
    group: Any = torch._C._distributed_c10d.ProcessGroup
    if not hasattr(group, "split_group") or hasattr(group, "_gradwire_split"):
        return
    group.split_group = _answering(group.split_group)
    group._gradwire_split = True


def outside(rank: int, ranks: list[int]) -> UnsupportedError:
    """The error of a rank that torch asks although it is in no part."""
    return UnsupportedError(
        f"rank {rank} is in none of the parts {ranks}: torch cannot take that answer from a backend written in Python in a mixed "
        "group; put every rank into a part, or use new_group"
    )


def _answering(split: Any) -> Any:
    @functools.wraps(split)
    def split_group(group: Any, ranks: Any, *args: Any, **kwargs: Any) -> Any:
        if group.rank() not in ranks and _is_ours_alone(group):
            return None
        return split(group, ranks, *args, **kwargs)

    _compat.hide_from_dynamo([split_group])
    return split_group


def _is_ours_alone(group: Any) -> bool:
    backends = [_compat.peeled(group._get_backend(device)) for device in group._device_types]
    return all(isinstance(getattr(backend, "link", None), GroupLink) for backend in backends)
