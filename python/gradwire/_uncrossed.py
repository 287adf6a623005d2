"""Groups that run and that this process has joined, whose members wait for its first call."""

from __future__ import annotations

import weakref
from typing import Protocol

from gradwire.errors import InvalidRequestError


class Joined(Protocol):
    """What is known of such a group."""

    name: str

    def is_awaited(self) -> bool:
        """Whether the members wait for the first call of this rank."""


uncrossed: weakref.WeakSet[Joined] = weakref.WeakSet()


def check_that_all_are_crossed(name: str) -> None:
    """Before this process joins another group that runs.

    Raises:
        InvalidRequestError: it has joined one and not called its `sync`. The members of that wait there for it, and come to no `sync` of
            group `name` before: all would wait until the timeout, which ends the group for all.
    """
    for joined in [one for one in uncrossed if one.is_awaited()]:
        raise InvalidRequestError(
            f"this rank has joined group {joined.name!r} again, whose members wait for it in sync(): call sync() there before group "
            f"{name!r} is formed, on all ranks, as a rank that is started again runs the same program (docs/membership.md)"
        )
