"""Large calls on a GPU's tensors, as several on pieces of them: while one is sent, the next is copied out and the last back.

The engine takes the memory of a call as a whole. A tensor of more than `gpu_chunk_mb` is therefore cut into equal parts, and
each part is a call of the engine's own: submitted when its copy has ended, copied back when its result is there. To the
caller they are one, with one Work, one place among the calls of the group and one report. Only collectives that treat
every element alike are cut, and ranks cut alike because they look at nothing but the size, the dtype and where the
tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import MismatchError
from gradwire.torch._streams import streams_of

# Elements: pieces are multiples of it, of every dtype whole pages.
ALIGNMENT = 4096


@dataclass(frozen=True)
class Piece:
    """A part of a call's tensors, or all of them.

    Attributes:
        written: the part of each that the call may write: of the result, then of the residual.
        read: of the tensor that is only read; None where the call has none, as in `written`.
        first: its first element in them.
        whole: elements of the whole.
        count: pieces of the call.
    """

    written: Sequence[Tensor | None]
    read: Tensor | None = None
    first: int = 0
    whole: int = 0
    count: int = 1

    @property
    def tensor(self) -> Tensor:
        """The part of the first tensor that there is."""
        return next(t for t in (*self.written, self.read) if t is not None)

    def mask(self, important: Any) -> Any:
        """The part of a mask over the whole tensor that is over this piece, in parts of a quarter of the mask's."""
        mask = None if important is None else torch.as_tensor(important)
        # What cannot be a mask is refused as it is.
        if mask is None or mask.dim() != 1 or not mask.numel() or self.count == 1:
            return important
        elems = self.tensor.numel()
        parts = max(1, min(elems, 4 * -(-mask.numel() * elems // self.whole)))
        middles = self.first + (torch.arange(parts, dtype=torch.float64) + 0.5) * (elems / parts)
        return mask[(middles * (mask.numel() / self.whole)).long().clamp(max=mask.numel() - 1)]


def cut(call: Piece, chunk_mb: int) -> tuple[list[Piece], Callable[[], None] | None]:
    """The pieces of a call, and what brings their results into tensors that are not contiguous, if there are such.

    Args:
        call: as one piece.
        chunk_mb: the most of a piece, in MiB; 0: never cut.
    """
    tensors = [t for t in (*call.written, call.read) if t is not None]
    # Tensors that do not fit together are refused when the call is prepared.
    if not all(_may_be_cut(t, tensors[0]) for t in tensors):
        return [call], None
    elems, whole = piece_elems(tensors[0], chunk_mb), tensors[0].numel()
    if elems >= whole:
        return [call], None
    count = -(-whole // elems)
    dense = [None if t is None else t.detach().contiguous() for t in (*call.written, call.read)]
    parts = [[None] * count if t is None else t.view(-1).split(elems) for t in dense]
    pieces = [
        Piece(written, read, at * elems, whole, count) for at, (*written, read) in enumerate(zip(*parts, strict=True))
    ]
    back = [
        partial(_copy_on_device, source, target.detach())
        for source, target in zip(dense, call.written, strict=False)  # without what is only read
        if source is not None and target is not None and not target.is_contiguous()
    ]
    return pieces, partial(_all, back) if back else None


def piece_elems(tensor: Tensor, chunk_mb: int) -> int:
    """Elements of each piece but the last one, which may be shorter."""
    most = (chunk_mb << 20) // tensor.element_size() // ALIGNMENT * ALIGNMENT
    if not chunk_mb or tensor.numel() <= most:
        return tensor.numel()
    count = -(-tensor.numel() // most)
    return -(-tensor.numel() // count // ALIGNMENT) * ALIGNMENT


def share_of(policy: dict[str, Any], count: int) -> dict[str, Any]:
    """The policy of one of `count` pieces, which share what the call may be delayed."""
    delay = policy["deadline_max_s"]
    return policy if delay is None else {**policy, "deadline_max_s": delay / count}


def explained(error: Exception | None, tensor: Tensor, chunk_mb: int) -> Exception | None:
    """Says of a disagreement between a whole and a piece where it comes from."""
    if not isinstance(error, MismatchError):
        return error
    sizes = {error.fields.get(side, {}).get("elems") for side in ("a", "b")}
    piece = piece_elems(tensor, chunk_mb)
    if sizes != {piece, tensor.numel()} or len(sizes) == 1:
        return error
    text = (
        f"{error}: a tensor on a GPU is sent in pieces of at most {chunk_mb} MiB (gpu_chunk_mb), one in host memory as a whole; "
        "all ranks of a call need the one or the other, or gpu_chunk_mb = 0"
    )
    return MismatchError(text, **error.fields)


def _may_be_cut(tensor: Any, like: Any) -> bool:
    if not isinstance(tensor, Tensor) or streams_of(tensor) is None:
        return False
    return tensor.shape == like.shape and tensor.dtype == like.dtype and tensor.device == like.device


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
