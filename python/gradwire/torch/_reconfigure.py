"""A group that changes its members: torch's experimental `reconfigure` (2.14, `init_process_group(..., enable_reconfigure=True)`).

Torch reads the rank and size of a group from C++ fields of its backend, which Python cannot set again. Such a group is therefore a
`ProcessGroup` of ours, as every group is before torch 2.14: of that torch asks both at each call.

A member is known by its handle, which is spent by the reconfiguration that it takes part in. Members meet in the Store of the group,
below the number of the reconfiguration and a digest of the handles: who was told of other members meets nobody, and no group is formed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradwire import _native
from gradwire._rendezvous import Place
from gradwire._runtime import runtime
from gradwire.errors import GradwireError, InvalidRequestError, UnsupportedError
from gradwire.torch import _compat
from gradwire.torch._group import GroupLink
from gradwire.torch._work import GradwireWork

HANDLE = "gradwire:"


class _NoGroup:
    """Takes the place of the engine's group where there is none: every call fails with the reason."""

    def __init__(self, why: str) -> None:
        self._why = why

    def submit(self, call: _native.Call) -> _native.Op:
        raise InvalidRequestError(f"{call['kind']}: {self._why}")

    def stats(self) -> dict[str, Any]:
        raise InvalidRequestError(self._why)

    def abort(self) -> None:
        pass

    def leave(self, timeout_s: float) -> bool:  # noqa: ARG002  the engine's signature
        return True


class Membership:
    """What a process knows of the group between two reconfigurations.

    Args:
        store: where the members meet; it must outlive whoever leaves.
        place: what the user gave to init_process_group; rank and size are nobody's until the first reconfiguration.
    """

    def __init__(self, store: Any, place: Place) -> None:
        self.handle = _new_handle()
        self._store = store
        self._place = place
        self._spent: set[str] = set()
        self._numbers: set[int] = set()

    def without(self, why: str, timeout: timedelta) -> GroupLink:
        """A link of no group."""
        link = GroupLink(runtime(), _NoGroup(why), self._place)  # type: ignore[arg-type]
        link.timeout = timeout
        return link

    def place(self, opts: Any, timeout: timedelta) -> tuple[Any, Place]:
        """The Store below which the members meet, and this rank among them.

        Raises:
            InvalidRequestError, UnsupportedError: what is asked for cannot be; the group is as it was.
        """
        if opts.hints:
            raise UnsupportedError(f"reconfigure takes no hints, and was given {sorted(opts.hints)}")
        is_ordered = isinstance(opts.handles, (list, tuple))
        # Of a set the order is the handles': ranks of one host are neighbours.
        handles = list(opts.handles) if is_ordered else sorted(opts.handles)
        self._check(handles, opts.uuid)
        self._numbers.add(opts.uuid)
        told = hashlib.sha256("\n".join(handles).encode()).hexdigest()[:16]
        name = f"{self._place.name}/reconfigured/{opts.uuid}"
        place = Place(handles.index(self.handle), len(handles), name, timeout if opts.timeout is None else opts.timeout)
        return dist.PrefixStore(f"reconfigured/{opts.uuid}/{told}", self._store), place

    def spend(self) -> None:
        """The handle has been used; the next reconfiguration takes another one."""
        self._spent.add(self.handle)
        self.handle = _new_handle()

    def _check(self, handles: list[str], number: int) -> None:
        if number in self._numbers:
            raise InvalidRequestError(f"reconfigure: uuid = {number} was used before; each attempt needs a new one")
        foreign = [handle for handle in handles if not handle.startswith(HANDLE)]
        if foreign:
            raise InvalidRequestError(f"reconfigure: {foreign[0]!r} is no handle of gradwire's")
        if len(set(handles)) != len(handles):
            raise InvalidRequestError("reconfigure: a handle is there twice")
        if self.handle in handles:
            return
        if self._spent.intersection(handles):
            raise InvalidRequestError(
                "reconfigure: this rank's handle is of an earlier group; every rank hands out a new one for each reconfiguration"
            )
        raise InvalidRequestError(
            f"reconfigure: this rank's handle {self.handle} is not among the {len(handles)} given; a rank that leaves calls "
            "destroy_process_group"
        )


@functools.cache
def group_type(base: Any) -> type:
    """The adapter of groups that change their members.

    Args:
        base: the adapter that is a whole process group.
    """

    class ReconfigurableGroup(base):  # type: ignore[misc]
        """Adapter for torch >= 2.14, if the user asks for it."""

        supports_reconfigure = property(lambda _self: True)
        link: GroupLink

        def __init__(self, store: Any, place: Place) -> None:
            members = Membership(store, place)
            why = "the group has no members yet: reconfigure() comes before its collectives"
            base.__init__(self, store, members.without(why, place.timeout))
            self._members = members
            self._name = place.name
            self.link.owner.backends[self._name] = self

        def getGroupName(self) -> str:  # noqa: N802  torch's name
            """The name that torch gave the group, whoever its members are."""
            return self._name

        def get_reconfigure_handle(self) -> str:
            """What the others need of this rank for the next reconfiguration, and for no later one."""
            return self._members.handle

        def reconfigure(self, opts: Any) -> Any:
            """Leaves the present members and forms the group of those whose handles are given. All of them call it.

            Args:
                opts: `uuid`, the same on all of them and new for each attempt; `handles`, a list in the order of the ranks, or a set,
                    whose ranks are in the order of the handles; `timeout`, the group's where there is none. `hints` must be empty.

            Returns:
                A Work that has ended. `wait` raises why the group could not be formed (`MissingRankError`, or another
                `RendezvousError`); then it has no members, the handle is still good, and the next attempt takes another uuid.

            Raises:
                InvalidRequestError: a handle is of an earlier group, or of another backend, this rank's is not there; the uuid was used
                    before. The group is as it was.
                UnsupportedError: there are hints.
            """
            old = self.link
            store, place = self._members.place(opts, old.timeout)
            old.leave()
            old.owner.backends[self._name] = self
            try:
                link = GroupLink.formed(store, place)
            except GradwireError as error:
                self.link = self._members.without(
                    f"the group has no members, reconfigure() has failed: {error}", old.timeout
                )
                return GradwireWork("reconfigure", [], [], self.link.owner.completer, failure=error)
            link.timeout, link.is_reconfigured = old.timeout, True
            self.link = link
            self._members.spend()
            ranks = dist.distributed_c10d._world.pg_group_ranks
            if self in ranks:  # the default group; no other one can be made so
                ranks[self] = {rank: rank for rank in range(link.world_size)}
            return GradwireWork("reconfigure", [], [], link.owner.completer)

        def shutdown(self) -> None:
            """`destroy_process_group`."""
            base.shutdown(self)
            self.link.owner.backends.pop(self._name, None)

    _compat.hide_from_dynamo([ReconfigurableGroup])
    return ReconfigurableGroup


def _new_handle() -> str:
    return f"{HANDLE}{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
