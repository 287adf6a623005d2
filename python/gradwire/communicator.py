"""The collectives on NumPy arrays, without any framework.

    with gradwire.Communicator("10.0.0.1:29400", rank=0, world_size=4) as communicator:
        communicator.all_reduce(gradients, "mean")

The ranks meet over TCP (`_joining.py`) and form a group exactly as under torch (`_rendezvous.py`); each call is prepared here
and carried by the process's one engine. Everything is exact but an all-reduce or reduce-scatter with
`tolerate_loss=True`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from gradwire import _arguments, _arrays, _joining, _native
from gradwire._arrays import Array
from gradwire._board import RANKS_MAX
from gradwire._boundary import Boundary
from gradwire._durations import seconds
from gradwire._operation import Call, Operation
from gradwire._opting_in import check_opted_in, tolerant_options
from gradwire._parts import Parts
from gradwire._policy import algorithm_code, of_one_stage
from gradwire._rendezvous import Formed, Place
from gradwire._small_transfers import SmallTransfers
from gradwire.config import Config
from gradwire.errors import (
    ConfigError,
    EngineError,
    GradwireError,
    InvalidRequestError,
    ShutDownError,
    UnsupportedError,
)

__all__ = ["Communicator", "Operation"]

logger = logging.getLogger("gradwire")

DEFAULT_TIMEOUT = timedelta(minutes=10)
LEAVE_TIMEOUT_S = 2.0
POINT_TO_POINT = ("send", "receive")


class Communicator:
    """A group of ranks that call collectives on NumPy arrays, each rank the same ones in the same order.

    Arrays may have any shape and strides; what is not contiguous is copied and the result written back. Every dtype can be
    moved but Python objects. Reduced are float16, float32, float64, the integers and bool, bfloat16 of the package
    `ml_dtypes`, and by `sum` and `mean` complex numbers. Each call returns an `Operation`, which has ended unless
    `async_op` is given; at most one thread makes calls.

    Args:
        rendezvous: `host:port`, a TCP address of rank 0's host: rank 0 listens there while the group is formed. None: the
            configuration's, `GRADWIRE_RENDEZVOUS`.
        rank: of this process, 0 to `world_size` - 1. None: the variable RANK.
        world_size: number of ranks. None: the variable WORLD_SIZE.
        timeout: longest wait for the ranks to appear (of other ranks than 0 for rank 0, and then for the others), and for each call to end.
        config: settings, if this is the first group of the process. `GRADWIRE_*` variables win.

    Raises:
        ConfigError: an argument or a setting is wrong; the engine runs already with another `config`; with `on_peer_loss="continue"`,
            another communicator is open at this address.
        PortInUseError, AddressError: rank 0 cannot listen there, or the engine cannot.
        MissingRankError: ranks did not appear within `timeout`. Fields: ranks.
        WorldSizeError, SettingsMismatchError, SecretMismatchError: a rank was started differently.
        UnreachableError: a rank answers no packet.
        RendezvousError: another rank could not start; a rank was started twice; the port is another program's.

    # Loss
    Nothing is lost but by `all_reduce` and `reduce_scatter` with `tolerate_loss=True`.
    """

    def __init__(
        self,
        rendezvous: str | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        config: Config | None = None,
    ) -> None:
        self.world_size: int = _joining.number("world_size", "WORLD_SIZE", world_size, 1, RANKS_MAX)
        self.rank: int = _joining.number("rank", "RANK", rank, 0, self.world_size - 1)
        if seconds("timeout", timeout) <= 0:
            raise ConfigError(f"timeout = {timeout} is not allowed: more than 0", field="timeout", value=timeout)
        self._timeout = timeout
        self._closed = False
        self._address = _joining.address(rendezvous, config)
        if config is not None:  # last of all: what is refused leaves nothing behind
            _joining.apply(config)
        _joining.take(self._address, self)
        try:
            place, formed = _joining.meet(self._address, self.rank, self.world_size, timeout)
            self._parts: Parts | None = Parts(self._address, place.name, timeout)
            self._become(place, formed)
        except BaseException:
            # Who raised this may be kept for long, by its traceback.
            _joining.leave(self._address, self)
            raise

    # Every rank to every rank.

    def all_reduce(
        self,
        array: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        async_op: bool = False,
        tolerate_loss: bool = False,
        preset: str | None = None,
        loss_bound: float | None = None,
        deadline: timedelta | None = None,
        residual: Array | None = None,
    ) -> Operation:
        """Reduces `array` over all ranks, in place or into `out`.

        Args:
            array: `[...]`, the same shape and dtype on every rank.
            op: `sum`, `mean`, `product`, `min` or `max`. Integers and booleans also `band`, `bor` and `bxor`, bit by bit. Sums
                of integers wrap around as NumPy's do. Their mean is such a sum divided and cut off: there is none of 8 and
                16 bits, and one of more is wrong where the sum does not fit.
            out: like `array`, gets the result instead of it.
            async_op: return at once.
            tolerate_loss: a bounded share of the contributions may be left behind. Needs float32, bfloat16 or float16 and
                `sum` or `mean`; the following arguments need it. With `Config.gather_fill` `previous` it needs `out`.
            preset: the rule, not the rate control: `auto`, `mlt`, `dlcp`, `ltp`, `ultima` or `reliable`. None: the configuration's.
            loss_bound: share of each transfer that may be missing, 0 to 0.9; in a ring of N > 4 ranks 4 / N of it. None: the preset's.
            deadline: after which a transfer is closed with what has arrived. None: the preset's; zero: never.
            residual: like `array`. What this rank's values that did not count still owe to the mean is written here at their
                places, all else stays as it is: add it to the next array and clear it, and nothing is lost, only late.

        Returns:
            The operation; `report()` says what was delivered.

        Raises:
            InvalidRequestError: the arguments do not fit together. Nothing was sent.
            ConfigError: there is no such `preset`, or `loss_bound` or `deadline` is out of range or of another type.
            UnsupportedError: the dtype, or this reduction of it.
            GroupError: the call failed (without `async_op`).

        # Loss
        With `tolerate_loss` an element that contributions are missing for is the mean over the others (`Config.divide_by`), a
        sum is that mean times the number of `members`. All ranks get the same bits, unless the preset may lose results too (`mlt`, `dlcp`,
        `ultima`): then `report().filled` says where.
        """

        def prepare() -> Call:
            options = _arrays.reduce_options(array, op)
            asked = {"preset": preset, "loss_bound": loss_bound, "deadline": deadline, "residual": residual}
            check_opted_in(array, op, asked, tolerate_loss=tolerate_loss)
            call = Call("all_reduce", array, array if out is None else _arrays.out_like(out, array.shape, array.dtype))
            call.options = options
            call.load()
            options["algorithm"] = algorithm_code(self._owner.config)
            if tolerate_loss:
                call.options |= tolerant_options(self._owner.config, preset, loss_bound, deadline)
            if residual is not None:
                call.add_residual(residual)
            return call

        return self._start("all_reduce", prepare, async_op)

    def all_gather(self, array: Array, *, out: Array | None = None, async_op: bool = False) -> Operation:
        """Every rank gets every rank's `array`.

        Args:
            array: `[...]`, the same shape and dtype on every rank.
            out: `[world_size, ...]`; None: a new array, `Operation.result`.
            async_op: return at once.

        Raises:
            InvalidRequestError, UnsupportedError, GroupError: as `all_reduce`.
        """

        def prepare() -> Call:
            _arrays.check(array)
            return Call("all_gather", array, _arrays.out_like(out, (self.world_size, *array.shape), array.dtype)).copy()

        return self._start("all_gather", prepare, async_op)

    def reduce_scatter(
        self,
        array: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        async_op: bool = False,
        tolerate_loss: bool = False,
        preset: str | None = None,
        loss_bound: float | None = None,
        deadline: timedelta | None = None,
        residual: Array | None = None,
    ) -> Operation:
        """Rank r gets the reduction of every rank's `array[r]`.

        Args:
            array: `[world_size, ...]`, the same shape and dtype on every rank.
            op: as in `all_reduce`.
            out: `[...]`; None: a new array, `Operation.result`.
            async_op: return at once.
            tolerate_loss: as in `all_reduce`, like the next three.
            preset: the rule; what it says of results that are sent back means nothing here, and nothing is rotated.
            loss_bound: share of each transfer that may be missing.
            deadline: after which a transfer is closed with what has arrived.
            residual: like `array`, on every rank or on none. What this rank owes to later steps is written here, all else stays as it
                is: its values that did not count, and in its own row less the mean for each rank that was missing, which does not
                learn it (docs/error-feedback.md, "Without the results"). Add it to the next array and clear it.

        Returns:
            The operation; places in `report().uncounted` are in `array`, flat.

        Raises:
            InvalidRequestError, ConfigError, UnsupportedError, GroupError: as `all_reduce`.
            MismatchError: some ranks passed a residual, others none.

        # Loss
        With `tolerate_loss` an element that contributions are missing for is the mean over the others (`Config.divide_by`), a sum is that
        mean times the world size; with a residual, too few to be a majority divide by the world size. The owner's own always counts.
        """

        def prepare() -> Call:
            options = _arrays.reduce_options(array, op)
            asked = {"preset": preset, "loss_bound": loss_bound, "deadline": deadline, "residual": residual}
            check_opted_in(array, op, asked, tolerate_loss=tolerate_loss)
            call = Call(
                "reduce_scatter", array, _arrays.out_like(out, _arguments.row_of(array, self.world_size), array.dtype)
            )
            call.options = options
            if tolerate_loss:
                call.options |= tolerant_options(self._owner.config, preset, loss_bound, deadline)
                call.options["policy"] = of_one_stage(call.options["policy"])
            if residual is not None:
                call.add_residual(residual)
            return call

        return self._start("reduce_scatter", prepare, async_op)

    def all_to_all(
        self,
        array: Array,
        *,
        out: Array | None = None,
        send_rows: Sequence[int] = (),
        receive_rows: Sequence[int] = (),
        async_op: bool = False,
    ) -> Operation:
        """Sends each rank its rows of `array` and gets the rows that each rank has for this one, by rank.

        Args:
            array: `[rows, ...]`.
            out: `[rows received, ...]`; None: a new array, `Operation.result`.
            send_rows: how many rows go to each rank, in order. Empty: equal parts.
            receive_rows: how many come from each rank. Empty: as many as this rank sends it.
            async_op: return at once.

        Raises:
            InvalidRequestError, UnsupportedError, GroupError: as `all_reduce`.
        """

        def prepare() -> Call:
            _arrays.check(array)
            sent = _arguments.rows(array, send_rows, self.world_size)
            received = _arguments.counts("receive_rows", receive_rows, self.world_size) or sent
            call = Call(
                "all_to_all", array, _arrays.out_like(out, (sum(received), *array.shape[1:]), array.dtype)
            ).copy()
            row_bytes = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
            call.options["splits"] = ([n * row_bytes for n in sent], [n * row_bytes for n in received])
            return call

        return self._start("all_to_all", prepare, async_op)

    def barrier(self, *, async_op: bool = False) -> Operation:
        """Nobody goes on before everybody has come.

        Raises:
            GroupError: a rank is lost, has left, or did not come within the timeout.
        """
        return self._start("barrier", lambda: Call("barrier", None, None), async_op)

    # One rank to or from every rank.

    def broadcast(self, array: Array, root: int = 0, *, async_op: bool = False) -> Operation:
        """Every rank's `array` `[...]` becomes that of `root`, in place.

        Raises:
            InvalidRequestError, UnsupportedError, GroupError: as `all_reduce`.
        """

        def prepare() -> Call:
            call = Call("broadcast", array, array, peer=self._peer(root)).copy()
            call.only_reads() if self._is_root(root) else call.load()
            return call

        return self._start("broadcast", prepare, async_op)

    def reduce(
        self, array: Array, op: str = "sum", root: int = 0, *, out: Array | None = None, async_op: bool = False
    ) -> Operation:
        """Reduces `array` over all ranks; `root` gets the result in place or in `out`, other ranks' arrays stay as they are.

        Args:
            array: `[...]`, the same shape and dtype on every rank.
            op: as in `all_reduce`.
            root: who gets the result.
            out: like `array`; counts at `root` only.
            async_op: return at once.

        Raises:
            InvalidRequestError, UnsupportedError, GroupError: as `all_reduce`.
        """

        def prepare() -> Call:
            options = _arrays.reduce_options(array, op)
            target = None
            if self._is_root(root):
                target = array if out is None else _arrays.out_like(out, array.shape, array.dtype)
            call = Call("reduce", array, target, peer=self._peer(root))
            call.options |= options
            call.load()
            return call

        return self._start("reduce", prepare, async_op)

    def gather(self, array: Array, root: int = 0, *, out: Array | None = None, async_op: bool = False) -> Operation:
        """`root` gets every rank's `array`.

        Args:
            array: `[...]`, the same shape and dtype on every rank.
            root: who gets them.
            out: `[world_size, ...]`; None: a new array, `Operation.result`. Counts at `root` only.
            async_op: return at once.

        Raises:
            InvalidRequestError, UnsupportedError, GroupError: as `all_reduce`.
        """

        def prepare() -> Call:
            _arrays.check(array)
            shape = (self.world_size, *array.shape)
            target = _arrays.out_like(out, shape, array.dtype) if self._is_root(root) else None
            return Call("gather", array, target, peer=self._peer(root)).copy()

        return self._start("gather", prepare, async_op)

    def scatter(self, array: Array | None, out: Array, root: int = 0, *, async_op: bool = False) -> Operation:
        """Rank r gets `array[r]` of `root`.

        Args:
            array: `[world_size, ...]` at `root`; not looked at elsewhere.
            out: `[...]`, gets the row; the same shape and dtype on every rank.
            root: who has the rows.
            async_op: return at once.

        Raises:
            InvalidRequestError, UnsupportedError, GroupError: as `all_reduce`.
        """

        def prepare() -> Call:
            _arrays.check(out)
            source = array if self._is_root(root) else None
            if source is not None:
                _arrays.check(source)
                _arrays.check_like(
                    "out", out, "a row of the array", _arguments.row_of(source, self.world_size), source.dtype
                )
            elif self._is_root(root):
                raise InvalidRequestError("scatter needs an array at the root")
            return Call("scatter", source, out, peer=self._peer(root)).copy()

        return self._start("scatter", prepare, async_op)

    # One rank to one rank.

    def send(self, array: Array, to: int, *, tag: int = 0, async_op: bool = False) -> Operation:
        """Sends `array` `[...]` to rank `to`, whose `recv` has the same tag, 0 to 4294967295.

        Raises:
            InvalidRequestError, UnsupportedError, GroupError: as `all_reduce`.
        """

        def prepare() -> Call:
            call = Call("send", array, None, peer=self._peer(to)).copy()
            call.options["tag"] = _arguments.tag(tag)
            return call

        return self._start("send", prepare, async_op)

    def recv(self, array: Array, source: int | None = None, *, tag: int = 0, async_op: bool = False) -> Operation:
        """Receives into `array` `[...]` what rank `source` sends with the same tag; None: whoever sends first.

        Raises:
            InvalidRequestError, UnsupportedError, GroupError: as `all_reduce`.
        """

        def prepare() -> Call:
            call = Call("receive", None, array, peer=None if source is None else self._peer(source)).copy()
            call.options["tag"] = _arguments.tag(tag)
            return call

        return self._start("receive", prepare, async_op)

    # The communicator itself.

    def stats(self) -> dict[str, Any]:
        """Counters of the connection to each peer, and of the process's engine."""
        engine = self._owner.engine
        return {"group": self._native.stats(), "engine": engine.stats(), "features": engine.features()}

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that are left, by the numbers that they began with: all, unless `on_peer_loss="continue"` lost some.

        Operations that are in flight may end under other ones: `report().members` says which.
        """
        epoch = self._native.stats()["epoch"]
        return tuple(range(self.world_size)) if epoch is None else tuple(epoch["members"])

    def sync(self, *arrays: Array) -> bool:
        """Lets a rank that was lost and started again join, and gives it what the others have (`on_peer_loss="continue"`).

        All ranks call it between two steps; a rank that was started again before any other call. At most one joins in a call. It costs
        one small all-reduce, and nothing with `on_peer_loss="raise"`.

        Args:
            arrays: all that a rank needs to go on: parameters, state of the optimizer, the number of the step; of any dtype and shape,
                the same on every rank, and none read-only. A rank that joins gets the others' here, exactly.

        Returns:
            Whether a rank has joined, this one or another.

        Raises:
            InvalidRequestError: an array is read-only, or some of its elements share memory, whether somebody joins or not; on the rank
                that joins: the arrays are not those of the others.
            UnsupportedError: this is a part of a split, or what was passed is no array of numbers.
            GroupError: the group has ended, or the communicator is closed.
        """
        self._check_open("sync")
        if self._boundary is None:
            raise UnsupportedError("nobody can join a part: call sync of the whole")
        return self._boundary.sync(arrays)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks with the same `color`; every rank of this one calls it.

        The ranks meet again where they met for this communicator. It and the new one are closed each for itself, in any order.

        Args:
            color: which part this rank is of, 0 or more; None: of none.
            key: orders the ranks of a part, the smallest first; equal ones keep the order that they have here.

        Returns:
            This rank's part, or None.

        Raises:
            InvalidRequestError: `color` or `key` is no number of 64 bits, or `color` is negative.
            UnsupportedError: this is a part itself. Its ranks have no place to meet: split the whole once more.
            PortInUseError, AddressError, EngineError: rank 0 cannot listen again, or this rank cannot come there; a RendezvousError on the
                others. This communicator goes on.
            GroupError: a rank is lost, or calls something else.
            UnreachableError, RendezvousError: a part could not be formed.
        """

        def prepare() -> Call:
            if self._parts is None:
                raise UnsupportedError(
                    "a part cannot be split: its ranks have no place to meet; split the whole once more"
                )
            asked = self._parts.asked(color, key)
            return Call("all_gather", asked, np.empty((self.world_size, asked.size), asked.dtype)).copy()

        asked = self._start("all_gather", prepare, async_op=False).result
        assert asked is not None, "every rank gets the result of an all-gather"
        assert self._parts is not None, "a part was refused"
        place = self._parts.place(self.rank, asked)
        formed = self._parts.form(self, place)
        return None if formed is None or place is None else self._part(place, formed)

    def _become(self, place: Place, formed: Formed) -> None:
        owner, native = self._owner, self._native = formed.owner, formed.native
        self._transfers = SmallTransfers(native.stats, self.world_size)
        self._boundary: Boundary | None = None
        if formed.round_number:
            watch = _joining.watch(self._address, formed.round_number, place, formed.heritage)
            self._boundary = Boundary(owner, native, watch, place, is_new=formed.is_new)
            # Of one that is lost without `close`. This waits for nobody, on whichever thread it is collected; at the end of the process
            # both the connection and the thread end anyway.
            weakref.finalize(self, watch.close).atexit = False

    def _part(self, place: Place, formed: Formed) -> Communicator:
        part = Communicator.__new__(Communicator)
        part.rank, part.world_size = place.rank, place.world_size
        part._timeout, part._closed, part._address, part._parts = self._timeout, False, self._address, None
        part._become(place, Formed(*formed[:2]))
        return part

    def close(self) -> None:
        """Says goodbye to the other ranks. Safe to call twice, and in a forked child, where it does nothing.

        It waits for no call, and calls end in any order: wait for every operation first. Those in flight fail with `ShutDownError`,
        and on the ranks that needed this one for them with `PeerLeftError`.
        """
        if self._closed:
            return
        self._closed = True
        if self._parts is not None:
            _joining.leave(self._address, self)
        with contextlib.suppress(EngineError):
            self._owner.check_process()
            if self._boundary is not None:
                self._boundary.leave()
            if not self._native.leave(LEAVE_TIMEOUT_S):
                logger.info("not every rank confirmed the goodbye of rank %d", self.rank)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self, kind: str) -> None:
        self._owner.check_process()
        if self._closed:
            raise ShutDownError(f"{kind}: the communicator is closed", during=kind)

    def _start(self, kind: str, prepare: Callable[[], Call], async_op: bool) -> Operation:
        self._check_open(kind)
        try:
            call = prepare()
            op = self._submit(call)
        except Exception as error:
            self._stand_in(kind, error)
            raise
        operation = Operation(op, kind, call.result, call.after)
        if not async_op:
            operation.wait()
        return operation

    def _submit(self, call: Call) -> _native.Op:
        request = call.request(self._timeout.total_seconds())
        self._transfers.see(request)
        return self._native.submit(request)

    def _stand_in(self, kind: str, error: Exception) -> None:
        """Takes the place of a call that this rank could not make.

        Ranks match calls by their order. If this rank went on, its next call would meet the other ranks' present one, and with
        equal shapes nobody would notice. A barrier in its place meets the barriers of ranks that failed alike, or it is a
        MismatchError on every rank.
        """
        if kind in POINT_TO_POINT or isinstance(error, EngineError):
            return
        try:
            self._submit(Call("barrier", None, None))
        except GradwireError:
            logger.debug("no stand-in for a failed %s", kind, exc_info=True)

    def _peer(self, rank: int) -> int:
        number = _arguments.whole("rank", rank)
        if not 0 <= number < self.world_size:
            raise InvalidRequestError(f"there is no rank {rank} of {self.world_size}")
        return number

    def _is_root(self, rank: int) -> bool:
        return self._peer(rank) == self.rank
