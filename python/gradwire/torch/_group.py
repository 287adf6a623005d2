"""One rank of one process group, as the adapters see it: turns a prepared call into a Work.

Nothing here raises into the caller of a collective. An exception out of a collective would leave the gradient reducer of
DDP in the middle of its bookkeeping, so every failure, a wrong argument too, is delivered by the Work.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from gradwire import _native
from gradwire._boundary import Boundary
from gradwire._bounded import BoundedStore
from gradwire._entrance import Watch
from gradwire._outbox import Op
from gradwire._rendezvous import Formed, Place, form_group
from gradwire._runtime import Runtime
from gradwire._small_transfers import SmallTransfers
from gradwire.errors import DeadlineError, EngineError, ForkedError, ShutDownError
from gradwire.torch import _memory, _pieces
from gradwire.torch._callers import Callers
from gradwire.torch._deliveries import ALL, Deliveries
from gradwire.torch._ending import without_frames
from gradwire.torch._pieces import Piece
from gradwire.torch._reduction import name_of
from gradwire.torch._shrunk import Origin
from gradwire.torch._staging import Staging
from gradwire.torch._work import GradwireWork

logger = logging.getLogger("gradwire")

# How long a rank that leaves waits for the others to confirm that they know.
LEAVE_TIMEOUT_S = 2.0
POINT_TO_POINT = ("send", "receive")
AVERAGED = ("SUM", "AVG")


@dataclass
class Call:
    """A collective, ready to be submitted.

    Attributes:
        kind: name of the collective in the binding.
        result: tensors that hold the result.
        input, output: contiguous host tensors, or None where the rank reads or writes nothing.
        staging: copies between them and the caller's tensors.
        options: further keys of `_native.Call`.
        keep: what else must live until the end.
    """

    kind: str
    result: list[torch.Tensor]
    input: torch.Tensor | None = None
    output: torch.Tensor | None = None
    staging: Staging = field(default_factory=Staging)
    options: dict[str, Any] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)


class GroupLink:
    """The connection of an adapter to its group.

    Args:
        owner: the process's engine.
        native: the connected group.
        place: this rank in it.
    """

    def __init__(self, owner: Runtime, native: _native.Group, place: Place) -> None:
        self.owner = owner
        self.place = place
        self.rank = place.rank
        self.world_size = place.world_size
        self.name = place.name
        self.timeout = place.timeout
        self.store: Any = None
        # What a group is called that `shrink_group` makes of it.
        self.origin = Origin(place.name, None)
        # Where lost ranks come back; not in a group with dedicated servers.
        self.boundary: Boundary | None = None
        # By torch's `reconfigure`: other members may be here than in the group before.
        self.is_reconfigured = False
        self.calls = 0
        # Of which the ranks match each by its number, as it is made of messages: who joins is told it (`ElasticState`).
        self.monitored_barriers = 0
        # Options that make an all-reduce of gradients tolerant, in a group that was made for it.
        self.tolerance: dict[str, Any] | None = None
        # Threads whose calls have a place in the group's order.
        self.callers = Callers()
        # What calls that nobody waited for owe to their callers.
        self.deliveries = Deliveries(owner.pid)
        self._native = native
        self._transfers = SmallTransfers(native.stats, place.world_size)
        self._left = False
        self._has_ended = False

    @classmethod
    def formed(cls, store: Any, place: Place, origin: Origin | None = None) -> GroupLink:
        """Forms the group with the other ranks, or joins it where it runs.

        Args:
            store: of the group.
            place: this rank.
            origin: of a group that is shrunk; None: it is its own.

        Raises:
            GradwireError: the ranks could not form the group.
        """
        formed = form_group(store, place)
        link = cls(formed.owner, formed.native, place)
        link.store, link.origin = store, origin or Origin(place.name, store)
        if formed.round_number:
            link.open_entrance(formed)
        return link

    def open_entrance(self, formed: Formed) -> None:
        """Lets lost ranks come back to the round of the Store in which the group was formed."""
        store = BoundedStore(self.store, self.owner.config.peer_timeout_s)
        life = 0 if formed.heritage is None else formed.heritage.life
        watch = Watch(lambda: store, formed.round_number, self.rank, self.world_size, life=life)
        self.boundary = Boundary(self.owner, self._native, watch, self.place, is_new=formed.is_new)

    def tolerance_of(self, tensor: torch.Tensor, op: Any, count: int = 1) -> dict[str, Any]:
        """Options that the group's tolerance adds to an all-reduce, or to one of its pieces: none but for sums and means of gradients."""
        if self.tolerance is None or tensor.dtype not in _memory.TOLERANT_DTYPES or name_of(op) not in AVERAGED:
            return {}
        return {**self.tolerance, "policy": _pieces.share_of(self.tolerance["policy"], count)}

    def start(self, kind: str, timeout: timedelta | None, prepare: Callable[[], Call]) -> GradwireWork:
        """Prepares and submits a call; whatever goes wrong is in the Work."""
        return self._numbered(self._start(kind, timeout, prepare), timeout)

    def start_in_pieces(
        self,
        kind: str,
        timeout: timedelta | None,
        whole: Piece,
        prepare: Callable[[Piece], Call],
        result: Sequence[torch.Tensor] = (),
    ) -> GradwireWork:
        """The same of a call that may be cut into pieces (`_pieces.py`), each of which is prepared by itself.

        Args:
            kind: name of the collective in the binding.
            timeout: of the call.
            whole: the call's tensors.
            prepare: makes a call of a piece of them.
            result: of the whole; empty: its first tensor.
        """
        chunk_mb = self.owner.config.gpu_chunk_mb
        try:
            pieces, last = _pieces.cut(whole, chunk_mb)
        except Exception as error:  # noqa: BLE001  see the head of this file
            return self.failed(kind, without_frames(error))
        works = [self._start(kind, timeout, partial(prepare, piece)) for piece in pieces]
        work = works[0]
        if len(works) > 1:
            work = GradwireWork.following(kind, works, list(result) or [whole.tensor], self.owner.completer, last)
        work.ending.explain = partial(_pieces.explained, call=whole, chunk_mb=chunk_mb, count=len(works))
        return self._numbered(work, timeout)

    def _numbered(self, work: GradwireWork, timeout: timedelta | None) -> GradwireWork:
        """As what its caller may ask it for: the place among the calls of the group, and how long it may take."""
        if not work.is_message:
            self.callers.see()
            work.ending.explain = partial(self.callers.explained, work.ending.explain)
        self.calls += work.was_submitted
        work.sequence_number, work.timeout_of_call = self.calls, self.timeout if timeout is None else timeout
        return work

    def _start(self, kind: str, timeout: timedelta | None, prepare: Callable[[], Call]) -> GradwireWork:
        try:
            self.owner.check_process()
            call = prepare()
            op = self._send_off(call, self.timeout if timeout is None else timeout)
        except Exception as error:  # noqa: BLE001  see the head of this file
            return self.failed(kind, without_frames(error))
        return GradwireWork(kind, [op], call.result, self.owner.completer, staging=call.staging)

    def failed(self, kind: str, error: Exception) -> GradwireWork:
        """The Work of a call that could not be made."""
        self._stand_in(kind, error, self._send_off)
        return GradwireWork(kind, [], [], self.owner.completer, failure=error)

    def join_works(self, works: list[GradwireWork]) -> GradwireWork:
        """One Work for several."""
        if len(works) == 1:
            return works[0]
        work = GradwireWork.joined(works, self.owner.completer)
        work.ending.explain = partial(_pieces.half_done, what=f"these are {len(works)} calls as one")
        return work

    def hand_out(self, work: GradwireWork, *, is_waited_for: bool) -> None:
        """The Work goes to its caller, who waits for it at once or may never do so."""
        if work.is_message:
            return
        if not work.ending.ops:
            self.deliveries.was_not_made(work.ending, is_waited_for=is_waited_for)
            return
        if self.deliveries.admit(work.ending, is_waited_for=is_waited_for, is_barrier=work.is_barrier):
            work.deliveries = self.deliveries

    def stats(self) -> dict[str, Any]:
        """Counters of the connection to each peer."""
        return self._native.stats()

    def describe(self) -> dict[str, Any]:
        """The group, as torch.profiler's traces name it."""
        ranks = self.place.global_ranks or range(self.world_size)
        return {
            "Process Group Name": self.name,
            "Process Group Ranks": str(list(ranks)),
            "Group size": self.world_size,
            "Rank": self.rank,
        }

    def abort(self) -> None:
        """Ends everything in flight with ShutDownError, what still waits for its device too."""
        self._native.abort()
        self._end_what_waits()

    def finish(self) -> None:
        """Waits for what is in flight, not for long, and brings the results that nobody has waited for. Before `leave`."""
        if not self._left and not self._has_ended and os.getpid() == self.owner.pid:
            try:
                if not self.deliveries.wait(ALL, time.monotonic() + LEAVE_TIMEOUT_S, is_barrier=True):
                    logger.info("group %s: calls are still in flight, and it is left without their results", self.name)
            finally:
                self._join_all()

    def leave(self) -> None:
        """Says goodbye to the other ranks. Safe to call twice, and in a forked child, where it does nothing."""
        if self._left:
            return
        self._left = True
        self.owner.backends.pop(self.name, None)
        try:
            self.owner.check_process()
        except EngineError:
            return
        if self.boundary is not None:
            self.boundary.leave()
        if not self._native.leave(LEAVE_TIMEOUT_S):
            logger.info("group %s: not every rank confirmed the goodbye of rank %d", self.name, self.rank)
        self._end_what_waits()
        self.deliveries.first_in_flight(ALL)
        self._join_all()

    def _join_all(self) -> None:
        """What the caller's streams are given from now on comes after all results. A device that has failed keeps no rank from leaving."""
        try:
            self.deliveries.join(ALL)
        except RuntimeError as error:
            logger.info("group %s: its last results are not waited for: %s", self.name, error)

    def _end_what_waits(self) -> None:
        """Called when the engine has been told that the group has ended."""
        self._has_ended = True
        text = f"group {self.name} ended before the tensors of this call had been copied from their device"
        self.owner.outbox.drop(self, ShutDownError(text))

    def _send_off(self, call: Call, timeout: timedelta) -> Op:
        """Submits the call, or has it submitted when its memory is there and the calls before it are under way."""
        outbox = self.owner.outbox
        # Of a group that has ended the engine reads nothing, it says so at once.
        if self._has_ended or (not call.staging.fetched and not outbox.is_waiting(self)):
            return self._submit(call, timeout)

        def arrive() -> None:
            for fence in call.staging.fetched:
                fence.synchronize()

        def submit(failed: Exception | None) -> _native.Op:
            try:
                if failed is not None:
                    raise failed
                return self._submit(call, timeout)
            except Exception as error:
                self._stand_in(call.kind, error, self._submit)
                raise

        def overdue() -> Exception:
            self._has_ended = True
            self._native.abort()
            waited_s = timeout.total_seconds()
            text = (
                f"{call.kind}: its tensors had not been copied from their device {waited_s:g} s after the call: what the device has to "
                "do before takes longer, or never ends; raise the timeout of the group if it may"
            )
            return DeadlineError(text, during=call.kind, waited_s=waited_s, detail="not copied from the device")

        op = outbox.put(self, arrive, submit, timeout_s=timeout.total_seconds(), overdue=overdue)
        if self._has_ended:  # meanwhile, on another thread: what it dropped may not have had this call yet
            self._end_what_waits()
        return op

    def _submit(self, call: Call, timeout: timedelta) -> _native.Op:
        request: _native.Call = {
            "kind": call.kind,
            "input": _memory.address(call.input),
            "output": _memory.address(call.output),
            "timeout_s": timeout.total_seconds(),
            "keep": [*_memory.kept(call.input), *_memory.kept(call.output), *call.keep],
        }
        request.update(call.options)  # type: ignore[typeddict-item]
        self._transfers.see(request)
        return self._native.submit(request)

    def _stand_in(self, kind: str, error: Exception, submit: Callable[[Call, timedelta], Op]) -> None:
        """Takes the place of a call that failed before it was submitted.

        Ranks match collectives by their order. If this rank alone went on, its next call would meet the other ranks' present
        one, and with equal shapes nobody would notice. A barrier in its place meets either the other ranks' barriers (all
        failed alike, the group goes on) or another collective: a MismatchError on every rank.
        """
        if kind in POINT_TO_POINT or isinstance(error, ForkedError):
            return
        try:
            submit(Call("barrier", []), self.timeout)
        except Exception:
            logger.debug("no stand-in for a failed %s", kind, exc_info=True)
