"""The collectives of `torch.distributed`, as C++ calls them: positional arguments, lists of tensors, one options object.

A mixin for both adapters (`_backend.py`). Each method checks and prepares memory and hands over to `GroupLink`; what is
never opted in to loss is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire._policy import algorithm_code
from gradwire.errors import InvalidRequestError, UnsupportedError
from gradwire.torch import _compat, _memory, _monitored, _profile, _sparse
from gradwire.torch._ending import without_frames
from gradwire.torch._group import Call, GroupLink
from gradwire.torch._own_works import remember
from gradwire.torch._pieces import Piece
from gradwire.torch._reduction import reduction
from gradwire.torch._staging import Staging
from gradwire.torch._work import GradwireWork


class Collectives:
    """Needs `self.link`, the group. `opts` are the C++ option structs; a missing one means defaults.

    Attributes:
        link: the group.
        is_recorded: torch's flight recorder follows each call to its end.
    """

    link: GroupLink
    is_recorded = False

    def __init__(self) -> None:
        self._coalesced: list[GradwireWork] | None = None

    # Every rank to every rank.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> GradwireWork | None:
        """In place, each tensor `[elems]`."""
        return self._call("all_reduce", tensors, opts, [partial(self._all_reduce, t, opts) for t in tensors])

    allreduce_coalesced = allreduce
    allreduce_sparse = allreduce  # to which torch >= 2.14 sends sparse tensors of a GPU

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> GradwireWork | None:
        """`outputs[i][r]` becomes rank r's `inputs[i]`."""
        starts = self._pairs("all_gather", self._all_gather, outputs, inputs, opts)
        return self._call("all_gather", inputs, opts, starts, outputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> GradwireWork | None:
        """`outputs[r][i]` becomes rank r's `inputs[i]`."""
        lengths = [len(rows) for rows in outputs]
        if lengths == [len(inputs)] * len(outputs):
            columns = [[rows[i] for rows in outputs] for i in range(len(inputs))]
            starts = self._pairs("all_gather", self._all_gather, columns, inputs, opts)
        else:
            problem = f"the lists of outputs have {lengths} tensors for {len(inputs)} inputs"
            starts = [partial(self.link.failed, "all_gather", InvalidRequestError(problem))]
        return self._call("all_gather", inputs, opts, starts, outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GradwireWork | None:
        """`tensor` `[elems]`, `output` `[world_size, elems]`."""
        starts = [partial(self._all_gather_single, output, tensor, opts)]
        return self._call("all_gather_into_tensor", [tensor], opts, starts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> GradwireWork | None:
        """Several of `all_gather_single`."""
        starts = self._pairs("all_gather", self._all_gather_single, outputs, inputs, opts)
        return self._call("all_gather_into_tensor", inputs, opts, starts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> GradwireWork | None:
        """`outputs[i]` becomes the reduction of every rank's `inputs[i][rank]`."""
        starts = self._pairs("reduce_scatter", self._reduce_scatter, outputs, inputs, opts)
        return self._call("reduce_scatter", inputs, opts, starts, outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GradwireWork | None:
        """`tensor` `[world_size, elems]`, `output` `[elems]`."""
        starts = [partial(self._reduce_scatter_single, output, tensor, opts)]
        return self._call("reduce_scatter_tensor", [tensor], opts, starts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> GradwireWork | None:
        """Several of `reduce_scatter_single`."""
        starts = self._pairs("reduce_scatter", self._reduce_scatter_single, outputs, inputs, opts)
        return self._call("reduce_scatter_tensor", inputs, opts, starts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> GradwireWork | None:
        """Rows of `tensor` to each rank, rows of `output` from each; empty lists of splits mean equal parts."""

        def prepare() -> Call:
            staging = Staging()
            splits = (self._split_bytes(tensor, input_splits), self._split_bytes(output, output_splits))
            target = _memory.writable(output, staging, load=False)
            source = _memory.readable(_memory.kept_from(output, tensor), staging)
            return Call("all_to_all", [output], source, target, staging, {**_copy(tensor), "splits": splits})

        return self._call("all_to_all", [tensor], opts, [partial(self._start, "all_to_all", opts, prepare)], [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> GradwireWork | None:
        """`inputs[r]` to rank r, `outputs[r]` from rank r; sizes may differ."""

        def prepare() -> Call:
            self._one_each(inputs)
            self._one_each(outputs)
            staging = Staging()
            source, target = _memory.joined(inputs, staging), _memory.parted(outputs, staging)
            splits = ([_nbytes(t) for t in inputs], [_nbytes(t) for t in outputs])
            return Call("all_to_all", list(outputs), source, target, staging, {**_copy(source), "splits": splits})

        return self._call("all_to_all", inputs, opts, [partial(self._start, "all_to_all", opts, prepare)], outputs)

    def barrier(self, opts: Any = None) -> GradwireWork | None:
        """Nobody returns before everybody has come."""
        return self._call("barrier", [], opts, [partial(self._start, "barrier", opts, lambda: Call("barrier", []))])

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that blocks; its error, at rank 0, names the first rank that did not come, or all of them.

        Raises:
            DeadlineError: ranks did not come within the timeout, or a call made before it did not end.
            GradwireError: the group failed for another reason; of a rank that was lost or has left, its error names that one. With
                `on_peer_loss="continue"` a PeerLostError on all who are left, whenever it was lost, and the group goes on.
        """
        self.link.owner.check_process()
        # Of a group that is gradwire's as a whole Python calls this itself, with the time in place of options.
        turn, timeout = self.link.deliveries.take_turn(), opts if isinstance(opts, timedelta) else _timeout(opts)
        barrier = _monitored.MonitoredBarrier(
            self.link.rank,
            self.link.world_size,
            self.link.monitored_barriers,
            self.link.timeout if timeout is None else timeout,
            wait_all=wait_all_ranks,
        )
        self.link.monitored_barriers += 1
        trace = _profile.begin("monitored_barrier", [], self.link)
        try:
            if self.link.owner.config.on_peer_loss == "continue":
                barrier.meet(self._meet)
            else:
                barrier.run(partial(self._signal, "send"), partial(self._signal, "receive"))
        finally:
            if trace is not None:
                trace.end()
        # All ranks have made the calls before it, so that they end.
        have_ended = self.link.deliveries.wait(turn, barrier.end_s, is_barrier=True)
        self.link.deliveries.join(turn)
        if not have_ended:
            raise barrier.too_late(
                f"Rank {self.link.rank} passed monitoredBarrier, but a call that was made before it is still in flight"
            )

    # One rank to or from every rank.

    def broadcast(self, tensors: list[Tensor], opts: Any) -> GradwireWork | None:
        """In place, from `opts.rootRank`."""

        def prepare(piece: Piece) -> Call:
            staging, part = Staging(), piece.tensor
            root = self._root(opts)
            is_root = root == self.link.rank
            buffer = _memory.readable(part, staging) if is_root else _memory.writable(part, staging, load=False)
            return Call("broadcast", [part], buffer, buffer, staging, {**_copy(part), "peer": root})

        start = partial(self.link.start_in_pieces, "broadcast", _timeout(opts), prepare=prepare)
        is_root = opts.rootRank == self.link.rank
        pieces = [Piece([], [t]) if is_root else Piece([t]) for t in tensors]
        return self._call("broadcast", tensors, opts, [partial(start, piece) for piece in pieces])

    def reduce(self, tensors: list[Tensor], opts: Any) -> GradwireWork | None:
        """In place at `opts.rootRank`; other ranks' tensors stay as they are."""

        def prepare(piece: Piece) -> Call:
            part, staging = piece.tensor, Staging()
            options = {**reduction(part, opts.reduceOp), "peer": self._root(opts)}
            if not piece.written:
                return Call("reduce", [part], _memory.readable(part, staging), None, staging, options)
            buffer = _memory.writable(part, staging, load=True)
            return Call("reduce", [part], buffer, buffer, staging, options)

        start = partial(self.link.start_in_pieces, "reduce", _timeout(opts), prepare=prepare)
        is_root = opts.rootRank == self.link.rank
        wholes = [Piece([t]) if is_root else Piece([], [t]) for t in tensors]
        return self._call("reduce", tensors, opts, [partial(start, whole) for whole in wholes])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> GradwireWork | None:
        """`outputs[0][r]` at the root becomes rank r's `inputs[0]`."""

        def prepare() -> Call:
            staging = Staging()
            source = _memory.readable(inputs[0], staging)
            options = {**_copy(source), "peer": self._root(opts)}
            if opts.rootRank != self.link.rank:
                return Call("gather", [], source, None, staging, options)
            self._one_each(outputs[0], like=inputs[0])
            return Call("gather", list(outputs[0]), source, _memory.scattered(outputs[0], staging), staging, options)

        return self._call("gather", inputs, opts, [partial(self._start, "gather", opts, prepare)], outputs)

    def gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> GradwireWork | None:
        """`output` `[world_size, elems]` at the root becomes every rank's `tensor` `[elems]`; elsewhere it is not looked at."""

        def prepare() -> Call:
            staging = Staging()
            options = {**_copy(tensor), "peer": self._root(opts)}
            if opts.rootRank != self.link.rank:
                return Call("gather", [], _memory.readable(tensor, staging), None, staging, options)
            self._rows_of("gather", output, tensor)
            target = _memory.writable(output, staging, load=False)
            return Call("gather", [output], _memory.readable(tensor, staging), target, staging, options)

        return self._call("gather", [tensor], opts, [partial(self._start, "gather", opts, prepare)])

    gather_into_tensor = gather_single

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> GradwireWork | None:
        """`outputs[0]` becomes the root's `inputs[0][rank]`."""

        def prepare() -> Call:
            staging = Staging()
            target = _memory.writable(outputs[0], staging, load=False)
            source = None
            if opts.rootRank == self.link.rank:
                self._one_each(inputs[0], like=outputs[0])
                source = _memory.stacked(inputs[0], staging)
            return Call("scatter", list(outputs), source, target, staging, {**_copy(target), "peer": self._root(opts)})

        start = partial(self._start, "scatter", opts, prepare)
        return self._call("scatter", inputs[0] if inputs else [], opts, [start], outputs)

    # One rank to one rank.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> GradwireWork | None:
        """Matched by tag with a receive of `dst`."""

        def prepare() -> Call:
            staging = Staging()
            source = _memory.readable(tensors[0], staging)
            return Call("send", list(tensors), source, None, staging, {**_copy(source), "peer": dst, "tag": _tag(tag)})

        return self._call("send", tensors, None, [partial(self._start, "send", None, prepare)])

    def recv(self, tensors: list[Tensor], src: int | None, tag: int = 0) -> GradwireWork | None:
        """Matched by tag with a send of `src`; None: of whoever sends first."""

        def prepare() -> Call:
            staging = Staging()
            target = _memory.writable(tensors[0], staging, load=False)
            return Call(
                "receive", list(tensors), None, target, staging, {**_copy(target), "peer": src, "tag": _tag(tag)}
            )

        name = "recvAnySource" if src is None else "recv"
        return self._call(name, tensors, None, [partial(self._start, "receive", None, prepare)])

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> GradwireWork | None:
        """From whoever sends first with this tag."""
        return self.recv(tensors, None, tag)

    # Several calls as one.

    def start_coalescing(self, device: Any = None) -> None:
        """Collects the works of the calls until `end_coalescing`."""
        del device
        self._coalesced = []

    def end_coalescing(self, device: Any = None) -> GradwireWork:
        """One work for everything that was called since `start_coalescing`."""
        del device
        works, self._coalesced = self._coalesced or [], None
        work = GradwireWork.joined(works, self.link.owner.completer)
        self.link.hand_out(work, is_waited_for=True)  # each of them has been handed out by itself
        remember(work)
        return work

    def stop_coalescing(self) -> None:
        """Without one: whatever went wrong between the two, later calls are calls again."""
        self._coalesced = None

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    # How each call is prepared.

    def _signal(self, kind: str, peer: int, tag: int, timeout: timedelta) -> GradwireWork:
        byte = _monitored.signal()
        call = Call(kind, [byte], options={**_copy(byte), "peer": peer, "tag": tag})
        if kind == "send":
            call.input = byte
        else:
            call.output = byte
        return self.link.start(kind, timeout, lambda: call)

    def _meet(self, timeout: timedelta) -> Sequence[int]:
        """A barrier; the members that took part."""
        work = self.link.start("barrier", timeout, lambda: Call("barrier", []))
        work.wait()
        return tuple(work.report().members)

    def _all_reduce(self, tensor: Tensor, opts: Any) -> GradwireWork:
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            return self._sparse_all_reduce(tensor, opts)

        def prepare(piece: Piece) -> Call:
            op, part = getattr(opts, "reduceOp", None), piece.tensor
            schedule = {"algorithm": algorithm_code(self.link.owner.config)}
            options = {**reduction(part, op), **schedule, **self.link.tolerance_of(part, op, piece.count)}
            staging = Staging()
            buffer = _memory.writable(part, staging, load=True)
            return Call("all_reduce", [part], buffer, buffer, staging, options)

        return self.link.start_in_pieces("all_reduce", _timeout(opts), Piece([tensor]), prepare)

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any) -> GradwireWork:
        def gather(rows: list[Tensor], own: Tensor) -> GradwireWork:
            return self._all_gather(rows, own, opts)

        try:
            _sparse.check(tensor, getattr(opts, "reduceOp", None))
            works, add = _sparse.start(tensor, self.link.world_size, gather)
        except Exception as error:  # noqa: BLE001  see the head of _group.py
            return self.link.failed("all_reduce", without_frames(error))
        return GradwireWork.following("all_reduce", works, [tensor], self.link.owner.completer, add)

    def _all_gather(self, rows: list[Tensor], tensor: Tensor, opts: Any) -> GradwireWork:
        def prepare(piece: Piece) -> Call:
            parts, (own,) = [part for part in piece.written if part is not None], piece.read
            self._one_each(parts, like=own)
            staging = Staging()
            target = _memory.scattered(parts, staging)
            return Call("all_gather", parts, _memory.readable(own, staging), target, staging, _copy(own))

        whole = Piece(rows, [tensor], self.link.world_size)
        return self.link.start_in_pieces("all_gather", _timeout(opts), whole, prepare, rows)

    def _all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> GradwireWork:
        def prepare(piece: Piece) -> Call:
            into, (own,) = piece.tensor, piece.read
            self._rows_of("all_gather", into, own)
            if not _memory.is_row_of(into, own, self.link.rank):
                own = _memory.kept_from(into, own)
            staging = Staging()
            target = _memory.writable(into, staging, load=False)
            return Call("all_gather", [into], _memory.readable(own, staging), target, staging, _copy(own))

        whole = Piece([output], [tensor], self.link.world_size)
        return self.link.start_in_pieces("all_gather", _timeout(opts), whole, prepare)

    def _reduce_scatter(self, output: Tensor, rows: list[Tensor], opts: Any) -> GradwireWork:
        def prepare(piece: Piece) -> Call:
            into = piece.tensor
            self._one_each(piece.read, like=into)
            options = reduction(into, getattr(opts, "reduceOp", None))
            staging = Staging()
            target = _memory.writable(into, staging, load=False)
            return Call("reduce_scatter", [into], _memory.stacked(piece.read, staging), target, staging, options)

        whole = Piece([output], rows, self.link.world_size)
        return self.link.start_in_pieces("reduce_scatter", _timeout(opts), whole, prepare)

    def _reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> GradwireWork:
        def prepare(piece: Piece) -> Call:
            into, (rows,) = piece.tensor, piece.read
            self._rows_of("reduce_scatter", rows, into)
            if not _memory.is_row_of(rows, into, self.link.rank):
                rows = _memory.kept_from(into, rows)
            options = reduction(into, getattr(opts, "reduceOp", None))
            staging = Staging()
            target = _memory.writable(into, staging, load=False)
            return Call("reduce_scatter", [into], _memory.readable(rows, staging), target, staging, options)

        whole = Piece([output], [tensor], self.link.world_size)
        return self.link.start_in_pieces("reduce_scatter", _timeout(opts), whole, prepare)

    # Around each call.

    def _pairs(
        self, kind: str, start: Callable[..., GradwireWork], outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
    ) -> list[Callable[[], GradwireWork]]:
        """Starts each output with its input. Lists of different lengths are one call that fails: see the head of _group.py."""
        if len(outputs) == len(inputs):
            return [partial(start, output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
        problem = f"{kind}: {len(outputs)} outputs for {len(inputs)} inputs"
        return [partial(self.link.failed, kind, InvalidRequestError(problem))]

    def _start(self, kind: str, opts: Any, prepare: Callable[[], Call]) -> GradwireWork:
        return self.link.start(kind, _timeout(opts), prepare)

    def _call(
        self,
        name: str,
        tensors: Sequence[Any],
        opts: Any,
        starts: Sequence[Callable[[], GradwireWork]],
        results: Sequence[Any] | None = None,
    ) -> GradwireWork | None:
        self.link.deliveries.bring()
        trace = _profile.begin(name, tensors, self.link, results)
        work = self.link.join_works([start() for start in starts])
        if trace is not None:
            trace.end_with(work)
        remember(work)
        is_waited_for = self._coalesced is None and getattr(opts, "asyncOp", True) is False
        self.link.hand_out(work, is_waited_for=is_waited_for)
        if self._coalesced is not None:
            self._coalesced.append(work)
        elif is_waited_for:
            work.wait()
            # torch takes None for "done": no future, no second call from C++ (torch >= 2.9). But its flight recorder would never see an
            # end of that, and its registry would keep it.
            return work if self.is_recorded or _compat.may_be_graph_input() else None
        return work

    def _root(self, opts: Any) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self.link.world_size:
            raise InvalidRequestError(f"root {root} in a group of {self.link.world_size} ranks")
        return root

    def _split_bytes(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        if not tensor.dim():
            raise InvalidRequestError(
                "all_to_all_single: a tensor without dimensions has no rows to divide among the ranks"
            )
        rows, world = tensor.shape[0], self.link.world_size
        if splits:
            if len(splits) != world or sum(splits) != rows or min(splits) < 0:
                raise InvalidRequestError(f"splits {list(splits)} do not divide {rows} rows among {world} ranks")
            row_bytes = _nbytes(tensor) // rows if rows else 0
            return [count * row_bytes for count in splits]
        if rows % world:
            raise InvalidRequestError(f"{rows} rows cannot be divided equally among {world} ranks")
        return [_nbytes(tensor) // world] * world

    def _one_each(self, rows: Sequence[Tensor], like: Tensor | None = None) -> None:
        if len(rows) != self.link.world_size:
            raise InvalidRequestError(f"a list has {len(rows)} tensors for {self.link.world_size} ranks")
        if like is not None:
            _memory.same_size(rows, like)

    def _rows_of(self, kind: str, whole: Tensor, part: Tensor) -> None:
        _memory.check(whole)
        _memory.check(part)
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self.link.world_size:
            raise InvalidRequestError(
                f"{kind}: the large tensor is {whole.dtype} with {whole.numel()} elements, the small one {part.dtype} with "
                f"{part.numel()}; {self.link.world_size} ranks need {part.numel() * self.link.world_size}"
            )


def _copy(tensor: Tensor) -> dict[str, Any]:
    """Options of a collective that only moves: the dtype is compared between ranks, where the engine knows it."""
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(f"expected a tensor, got {type(tensor).__name__}")
    return {"dtype": _memory.DTYPE_CODES.get(tensor.dtype, _memory.BYTES)}


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tag(tag: int) -> int:
    if tag < 0:  # -1 and down would be the numbers of monitored_barrier's own messages
        raise InvalidRequestError(f"the tag of a message is 0 or more, not {tag}")
    return tag


def _timeout(opts: Any) -> timedelta | None:
    """The call's own timeout; C++ says "none" by a negative one."""
    timeout = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout >= timedelta(0) else None
