"""Large calls on a GPU's tensors, as several on pieces of them: while one is sent, the next is copied out and the last back.

The engine takes the memory of a call as a whole. A tensor of more than `gpu_chunk_mb` is therefore cut into equal parts, and
each part is a call of the engine's own: submitted when its copy has ended, copied back when its result is there. To the
caller they are one, with one Work, one place among the calls of the group and one report. Only collectives that treat
every element alike are cut, and ranks cut alike because they look at nothing but the size, the dtype and where the
tensor is. Where a tensor holds a row for each rank, as an all-gather's result does, all rows are cut at the same places:

    rows of 4 ranks      piece 0   piece 1   piece 2
    rank 0 [.........]   [...      |   ...   |   ...]
    rank 1 [.........]   [...      |   ...   |   ...]   a piece is a column of them
    ..
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import MismatchError, PeerLostError
from gradwire.torch._memory import check_that_elements_are_apart, share_memory
from gradwire.torch._streams import streams_of
from gradwire.torch._tags import mask_of

# Elements: pieces are multiples of it, of every dtype whole pages.
ALIGNMENT = 4096


@dataclass(frozen=True)
class Piece:
    """A part of a call's tensors, or all of them.

    Attributes:
        written: the part of each that the call may write: of the result, then of the residual; None where the call has none.
        read: of each that is only read.
        rows: ranks that tensors of so many times the elements of the others hold a row for, one after the other.
        first: its first element in each row.
        whole: elements of a row of the whole.
        count: pieces of the call.
    """

    written: Sequence[Tensor | None]
    read: Sequence[Tensor] = ()
    rows: int = 1
    first: int = 0
    whole: int = 0
    count: int = 1

    @property
    def tensors(self) -> list[Tensor]:
        """All that there are."""
        return [t for t in (*self.written, *self.read) if t is not None]

    @property
    def tensor(self) -> Tensor:
        """The part of the first tensor that there is."""
        return self.tensors[0]

    @property
    def elems(self) -> int:
        """Elements of a row; of tensors without rows, all."""
        return min(t.numel() for t in self.tensors)

    def mask(self, important: Any) -> Any:
        """The part of a mask over the whole tensor that is over this piece, in parts of a quarter of the mask's."""
        mask = None if important is None else mask_of(important)
        # What cannot be a mask is refused as it is.
        if mask is None or mask.dim() != 1 or not mask.numel() or self.count == 1:
            return important
        elems, whole = self.elems, self.rows * self.whole
        parts = max(1, min(elems, 4 * -(-mask.numel() * elems // whole)))
        middles = self.first + (torch.arange(parts, dtype=torch.float64, device=mask.device) + 0.5) * (elems / parts)
        rows = torch.arange(self.rows, dtype=torch.float64, device=mask.device) * self.whole
        middles = (rows[:, None] + middles).flatten()
        return mask[(middles * (mask.numel() / whole)).long().clamp(max=mask.numel() - 1)]


def cut(call: Piece, chunk_mb: int) -> tuple[list[Piece], Callable[[], None] | None]:
    """The pieces of a call, and what brings their results into tensors that are not contiguous, if there are such.

    Args:
        call: as one piece.
        chunk_mb: the most of a piece, in MiB, of its largest tensor; 0: never cut.
    """
    # Tensors that do not fit together are refused when the call is prepared.
    if not _may_be_cut(call):
        return [call], None
    elems, whole = piece_elems(call, chunk_mb), call.elems
    if elems >= whole:
        return [call], None
    count = -(-whole // elems)
    for tensor in call.written:
        if tensor is not None:
            check_that_elements_are_apart(tensor)
    written = [None if t is None else t.detach().contiguous() for t in call.written]
    read = [_kept_from(written, t.detach().contiguous(), whole) for t in call.read]
    parts = [[None] * count if t is None else _columns(t, whole, elems) for t in (*written, *read)]
    pieces = [
        Piece(column[: len(written)], column[len(written) :], call.rows, at * elems, whole, count)
        for at, column in enumerate(zip(*parts, strict=True))
    ]
    back = [
        partial(_copy_on_device, source, target.detach())
        for source, target in zip(written, call.written, strict=True)
        if source is not None and target is not None and not target.is_contiguous()
    ]
    return pieces, partial(_all, back) if back else None


def piece_elems(call: Piece, chunk_mb: int) -> int:
    """Elements of a row of each piece but the last one, which may be shorter."""
    elems, elem_bytes = call.elems, call.tensor.element_size()
    most = max(1, (chunk_mb << 20) // (elem_bytes * call.rows) // ALIGNMENT) * ALIGNMENT
    if not chunk_mb or elems <= most:
        return elems
    count = -(-elems // most)
    return -(-elems // count // ALIGNMENT) * ALIGNMENT


def share_of(policy: dict[str, Any], count: int) -> dict[str, Any]:
    """The policy of one of `count` pieces, which share what the call may be delayed."""
    delay = policy["deadline_max_s"]
    return policy if delay is None else {**policy, "deadline_max_s": delay / count}


def explained(error: Exception | None, call: Piece, chunk_mb: int, count: int) -> Exception | None:
    """Says of a disagreement between a whole and a piece where it comes from, and of a loss what is left of a call in `count` pieces."""
    if count > 1:
        error = half_done(error, f"the tensor was sent in {count} pieces of at most {chunk_mb} MiB (gpu_chunk_mb)")
    if not isinstance(error, MismatchError):
        return error
    sizes = {error.fields.get(side, {}).get("elems") for side in ("a", "b")}
    if sizes != {piece_elems(call, chunk_mb), call.elems} or len(sizes) == 1:
        return error
    text = (
        f"{error}: a tensor on a GPU is sent in pieces of at most {chunk_mb} MiB (gpu_chunk_mb), one in host memory as a whole; "
        "all ranks of a call need the one or the other, or gpu_chunk_mb = 0"
    )
    return MismatchError(text, **error.fields)


def half_done(error: Exception | None, what: str) -> Exception | None:
    """Says of a loss, after which a group may go on, that parts of the call may have ended before: it is not as if it had never been made.

    Args:
        error: of one of the parts.
        what: of which parts the call is made.
    """
    if not isinstance(error, PeerLostError):
        return error
    text = (
        f"{error}; {what}, of which some may have ended and left their results: make the call again only with the values that "
        "the tensors had before"
    )
    return PeerLostError(text, **error.fields)


def _may_be_cut(call: Piece) -> bool:
    tensors = call.tensors
    if not all(isinstance(t, Tensor) and streams_of(t) is not None for t in tensors):
        return False
    like, sizes = tensors[0], (call.elems, call.elems * call.rows)
    return all(t.numel() in sizes and t.dtype == like.dtype and t.device == like.device for t in tensors)


def _kept_from(written: Sequence[Tensor | None], read: Tensor, row_elems: int) -> Tensor:
    """`read`, or a copy where results of a piece would be written over what a later one reads: not where both are the same columns."""
    for target in written:
        if target is None or not share_memory(target, read):
            continue
        if (read.data_ptr() - target.data_ptr()) % (row_elems * read.element_size()):
            return read.clone()
    return read


def _columns(tensor: Tensor, row_elems: int, elems: int) -> Sequence[Tensor]:
    """The parts of a contiguous tensor of one row, flat, or of several rows, of each the same columns `[rows, elems]`."""
    flat = tensor.view(-1)
    return flat.split(elems) if flat.numel() == row_elems else flat.view(-1, row_elems).split(elems, dim=1)


def _all(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()


def _copy_on_device(source: Tensor, target: Tensor) -> None:
    streams = streams_of(target)
    assert streams is not None
    stream = streams.current(target.device)
    streams.copy(stream, target, source)
    streams.hold(source, stream)
    streams.hold(target, stream)
