"""The two adapters that torch talks to, over the same collectives.

torch >= 2.14 lets Python subclass `Backend`, which composes with other backends ("cpu:gloo,cuda:gradwire") and leaves the
process group to torch. Older versions only let Python subclass the whole `ProcessGroup`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire import _runtime
from gradwire._named import first_named
from gradwire._rendezvous import Place
from gradwire.errors import UnsupportedError
from gradwire.torch import _compat, _memory, _reconfigure
from gradwire.torch._group import GroupLink
from gradwire.torch._ops import Collectives
from gradwire.torch._shrunk import Origin
from gradwire.torch._split import outside

logger = logging.getLogger("gradwire")

NAME = "gradwire"


def create(options: Any, backend_options: Any = None) -> Any:
    """Called by torch on every member of a new group (extended API).

    Args:
        options: store, group_rank, group_size, timeout, group_id.
        backend_options: `pg_options` of the caller; not used, see `gradwire.torch.configure`.

    Raises:
        GradwireError: the ranks could not form the group.
    """
    del backend_options
    _runtime.have_futures()
    members = tuple(getattr(options, "global_ranks_in_group", None) or ())
    place = Place(options.group_rank, options.group_size, str(options.group_id), options.timeout, global_ranks=members)
    if not dist.is_initialized():
        place = dataclasses.replace(place, is_default=True)
    if getattr(options, "enable_reconfigure", False):
        return _reconfigure.group_type(_make_process_group_type())(options.store, place)
    return connect(options.store, place)


def connect(store: Any, place: Place, origin: Origin | None = None) -> Any:
    """This rank's adapter of a new group.

    Args:
        store: of the group.
        place: this rank.
        origin: of one that `shrink_group` makes.
    """
    link = GroupLink.formed(store, place, origin)
    base = _compat.backend_class()
    adapter = _process_group(store, link) if base is None else _backend(link)
    link.owner.backends[place.name] = adapter
    return adapter


def _backend(link: GroupLink) -> Any:
    return _make_backend_type()(link)


def _process_group(store: Any, link: GroupLink) -> Any:
    return _make_process_group_type()(store, link)


class _Lifetime(Collectives):
    """What both adapters share beside the collectives."""

    def shutdown(self) -> None:
        """`destroy_process_group` (torch >= 2.9)."""
        try:
            self.link.finish()
        finally:  # an interrupt ends the wait, and the other ranks are told so
            self.link.leave()
            self.link.owner.aborted.discard(self)

    def abort(self) -> None:
        """Ends everything in flight, and gives up its tensors. The group is torch's to hold from now on, which may forget it."""
        self.link.abort()
        if dist.get_debug_level() == dist.DebugLevel.DETAIL and not isinstance(self, dist.ProcessGroup):
            self.link.owner.aborted.add(self)  # torch does not hold this object then, and may still call it
        held = self.link.owner.backends
        for name in [name for name, adapter in held.items() if adapter is self]:
            del held[name]

    def set_timeout(self, timeout: timedelta) -> None:
        """Timeout of calls that bring none."""
        self.link.timeout = timeout

    def merge(self, store: Any, opts: Any, rank: int, size: int) -> Any:
        """`merge_remote_group`, called on every rank of the groups that become one; `store` is theirs together.

        Raises:
            GradwireError: the ranks could not form the group.
        """
        timeout = getattr(opts, "_timeout", None) or self.link.timeout
        return connect(store, Place(rank, size, str(opts.group_name), timeout))

    def _enable_collectives_timing(self) -> None:
        """Every call is timed: see `report()` and the metrics."""

    def get_reconfigure_handle(self) -> str:
        """Refused where the group was not made for it: see `_reconfigure.py`.

        Raises:
            UnsupportedError: always.
        """
        raise _cannot_reconfigure()

    def reconfigure(self, opts: Any) -> Any:  # noqa: ARG002  torch's signature
        """The same.

        Raises:
            UnsupportedError: always.
        """
        raise _cannot_reconfigure()

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """The name that the user gave to init_process_group."""
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        """Ranks agree on sequence numbers by themselves: the engine carries them in every packet."""

    def _get_sequence_number_for_group(self) -> int:
        return self.link.calls


@functools.cache
def _make_backend_type() -> type:
    base: Any = _compat.backend_class()

    class GradwireBackend(_Lifetime, base):  # type: ignore[misc, valid-type]
        """Adapter for torch >= 2.14."""

        def __init__(self, link: GroupLink) -> None:
            base.__init__(self, link.rank, link.world_size)
            _Lifetime.__init__(self)
            self.link = link
            self.is_recorded = _compat.records_flights()

        @property
        def options(self) -> Any:
            """Name and timeout, as torch reads them back."""
            return base.Options(NAME, self.link.timeout)

        def split(self, store: Any, ranks: list[int], opts: Any) -> Any:
            """`split_group`, called on every rank; `ranks` are of this group.

            Raises:
                GradwireError: the ranks could not form the group.
            """
            timeout = getattr(opts, "_timeout", None) or self.link.timeout
            return self._part(store, list(ranks), str(opts.group_name), timeout)

        def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
            """`shrink_group`: a backend of the other ranks, which alone call it. The group's Store must have survived.

            Raises:
                GradwireError: the ranks could not form the group.
            """
            if shrink_flags:  # SHRINK_ABORT
                self.link.abort()
            excluded = set(ranks_to_exclude)
            left = [rank for rank in range(self.link.world_size) if rank not in excluded]
            origin = self.link.origin.without(excluded)
            logger.info("group %s: ranks %s of it go on as %s", self.link.name, first_named(left), origin.shrunk)
            timeout = getattr(opts_override, "_timeout", None) or self.link.timeout
            return self._part(dist.PrefixStore(origin.shrunk, origin.store), left, origin.shrunk, timeout, origin)

        def _part(
            self, store: Any, ranks: list[int], name: str, timeout: timedelta, origin: Origin | None = None
        ) -> Any:
            if self.link.rank not in ranks:
                raise outside(self.link.rank, ranks)
            members = self.link.place.global_ranks or range(self.link.world_size)
            own = tuple(members[rank] for rank in ranks)
            return connect(
                store, Place(ranks.index(self.link.rank), len(ranks), name, timeout, global_ranks=own), origin
            )

        # torch asks the Python object for these; where it finds only the C++ property it asks again, without end.
        # Messages in a batch have a work each then, as with gloo; there is nothing to gain from one for all.
        supports_coalescing = property(lambda _self: False)
        supports_splitting = property(lambda _self: True)
        supports_shrinking = property(lambda _self: True)
        supports_reconfigure = property(lambda _self: False)
        supports_window = property(lambda _self: False)
        _supports_time_estimate = property(lambda _self: False)

        def perform_nocolor_split(self, device: Any = None) -> None:
            """Called on ranks that are not in a new group; nothing to do."""

        def get_error(self) -> Any:
            """Errors come with the works that failed."""
            return torch._C._distributed_c10d.ErrorType.SUCCESS

    _compat.hide_from_dynamo([GradwireBackend])
    return GradwireBackend


def _cannot_reconfigure() -> UnsupportedError:
    return UnsupportedError(
        "only a group made with init_process_group(..., enable_reconfigure=True) can be reconfigured (torch 2.14 or newer). Of this one "
        "shrink_group goes on without lost ranks, and torchrun --max-restarts replaces them"
    )


def _other_backend(group: Any, tensors: Sequence[Any]) -> UnsupportedError | None:
    """Why a tensor's device is not this group's, if the user gave that device to another backend.

    Before 2.14 torch lets what Python makes of one device take the place of the whole group.
    """
    config = str(dist.distributed_c10d._world.pg_backend_config.get(group, ""))  # "cpu:gradwire,cuda:nccl"
    backends = dict(part.split(":") for part in config.split(",") if ":" in part)
    devices = {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}
    for device in devices:
        if backends.get(device, NAME) != NAME:
            return UnsupportedError(
                f"{device} tensors of this group are {backends[device]}'s, but torch {torch.__version__} gives a group with "
                "gradwire to gradwire alone: use torch 2.14 or newer, or a group for each backend",
                device=device,
            )
    return None


class _WholeGroup(_Lifetime):
    """Refuses tensors that the user gave to another backend of the group, and answers for backends that C++ knows nothing of."""

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices that it serves. None until torch holds it: for them torch would ask C++ to record each call."""
        is_held = self in dist.distributed_c10d._world.pg_map
        return [torch.device(device) for device in _memory.DEVICES] if is_held else []

    def _get_backend(self, device: Any) -> Any:  # noqa: ARG002  one for all of them
        return self

    get_backend = _get_backend
    supports_coalescing = property(lambda _self: False)
    supports_splitting = property(lambda _self: False)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """The same, also of one tensor without a list and by a reduction in place of options, as DDP's `join` calls groups of C++."""
        if isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
            options = dist.AllreduceOptions()
            options.reduceOp = opts
            opts = options
        return super().allreduce([tensors] if isinstance(tensors, torch.Tensor) else tensors, opts)

    def _call(self, name: str, tensors: Any, opts: Any, starts: Any, results: Any = None) -> Any:
        other = _other_backend(self, tensors)
        if other is not None:
            kind = "receive" if name.startswith("recv") else name
            starts = [functools.partial(self.link.failed, kind, other)]
        return super()._call(name, tensors, opts, starts, results)


@functools.cache
def _make_process_group_type() -> type:
    class GradwireProcessGroup(_WholeGroup, dist.ProcessGroup):
        """Adapter for torch 2.9 to 2.13."""

        def __init__(self, store: Any, link: GroupLink) -> None:
            try:
                dist.ProcessGroup.__init__(self, store, link.rank, link.world_size)
            except TypeError:  # torch 2.9 makes an object that Python cannot subclass there
                dist.ProcessGroup.__init__(self, link.rank, link.world_size)
            _Lifetime.__init__(self)
            self.link = link
            self._desc = "undefined"

        def getRank(self) -> int:  # noqa: N802
            """This rank."""
            return self.link.rank

        def getSize(self) -> int:  # noqa: N802
            """Ranks in the group."""
            return self.link.world_size

        def getGroupName(self) -> str:  # noqa: N802
            """The name that torch gave the group."""
            return self.link.name

        def setGroupName(self, name: str) -> None:  # noqa: N802
            """Torch repeats the name that it gave to `create`."""

        def getGroupDesc(self) -> str:  # noqa: N802
            """The user's description."""
            return self._desc

        def setGroupDesc(self, desc: str) -> None:  # noqa: N802
            """The user's description."""
            self._desc = desc

    _compat.hide_from_dynamo([GradwireProcessGroup])
    return GradwireProcessGroup
