"""Tensors as memory for the engine: address and length, staged through a contiguous host copy where they are not that.

The engine sees only addresses. Whatever it gets here is contiguous, in host memory, and kept alive by the call that
carries it. How a GPU's tensors come there is in `_staging.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import InvalidRequestError, UnsupportedError
from gradwire.torch._staging import Staging, has_its_memory, reach
from gradwire.torch._streams import streams_of

Memory = tuple[int, int]
EMPTY: Memory = (0, 0)

BYTES = 0
# Codes of `gradwire_collectives::Dtype`.
DTYPE_CODES = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
    torch.uint16: 11,
    torch.uint32: 12,
    torch.uint64: 13,
}
TOLERANT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")


def check(tensor: Tensor) -> None:
    """Whether the tensor has memory that can be sent.

    Raises:
        UnsupportedError: its device or layout. Fields: device or layout.
        InvalidRequestError: its storage was resized, and no longer holds it.
    """
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(f"expected a tensor, got {type(tensor).__name__}")
    device = tensor.device.type
    if device not in DEVICES:
        raise UnsupportedError(
            f"device {device!r} is not supported: gradwire moves {' and '.join(DEVICES)} tensors", device=device
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"layout {tensor.layout} is not supported: only dense tensors", layout=str(tensor.layout)
        )
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("collectives of gradwire cannot be captured in a CUDA graph", device=device)
    if not has_its_memory(tensor):
        raise InvalidRequestError("the memory of a tensor was given back (resize_ of its storage) before the call")
    if tensor.numel() and tensor.data_ptr() == 0:
        raise UnsupportedError("the tensor has no memory (a fake tensor?)", device=device)


def address(tensor: Tensor | None) -> Memory:
    """Address and length in bytes of a contiguous tensor in host memory.

    Raises:
        UnsupportedError: it is somewhere else, where the engine must not read. Fields: device.
    """
    if tensor is None or tensor.numel() == 0:
        return EMPTY
    if tensor.device.type != "cpu":
        device = str(tensor.device)
        raise UnsupportedError(
            f"the engine reads host memory, this tensor is on {device}: a bug of gradwire", device=device
        )
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def kept(tensor: Tensor | None) -> tuple[object, ...]:
    """What keeps the memory of a tensor that the engine uses.

    The tensor alone may get another one, by `tensor.data = other`; who has a finalizer on the tensor may give its memory to others.
    """
    return () if tensor is None else (tensor, tensor.untyped_storage())


def is_direct(tensor: Tensor) -> bool:
    """Whether the engine can use the tensor's own memory."""
    return streams_of(tensor) is None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: Tensor, staging: Staging) -> Tensor:
    """The tensor, or a contiguous copy of it in host memory, which is there when `staging` says so."""
    check(tensor)
    if is_direct(tensor):
        return tensor
    buffer = staging.buffer(tensor.shape, tensor)
    staging.fetch(tensor.detach(), buffer)
    return buffer


def writable(tensor: Tensor, staging: Staging, *, load: bool) -> Tensor:
    """The tensor, or a host copy whose contents go back to the tensor when the collective is done.

    Args:
        tensor: what the collective writes.
        staging: does the copying.
        load: whether the present contents matter (in-place collectives).

    Raises:
        InvalidRequestError: elements of it share memory.
    """
    check(tensor)
    if is_direct(tensor):
        return tensor
    check_that_elements_are_apart(tensor)
    tensor = tensor.detach()
    buffer = staging.buffer(tensor.shape, tensor)
    if load:
        staging.fetch(tensor, buffer)
    staging.deliver(buffer, tensor)
    return buffer


def check_that_elements_are_apart(tensor: Tensor) -> None:
    """Of an expanded tensor, or one of overlapping windows, no memory could hold the result.

    Raises:
        InvalidRequestError: it is one.
    """
    if tensor.numel() and _may_overlap(tensor) and _overlaps(tensor):
        raise InvalidRequestError(
            f"elements of a tensor that gets a result share memory: shape {list(tensor.shape)}, strides {list(tensor.stride())}; "
            "pass a copy (clone())"
        )


def _may_overlap(tensor: Tensor) -> bool:
    """Whether a dimension begins again within what those of smaller strides reach."""
    end = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += stride * max(size - 1, 0)
    return False


def _overlaps(tensor: Tensor) -> bool:
    """The same for certain: places of strides that interleave may all differ."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return True
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return places.unique().numel() < tensor.numel()


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one device have an element in common. Of those with gaps, whose elements may interleave, the first decides."""
    if not one.numel() or not other.numel():
        return False
    if one.data_ptr() == other.data_ptr():
        return True
    first, second = sorted((one, other), key=Tensor.data_ptr)
    are_dense = reach(one) == one.numel() and reach(other) == other.numel()
    return are_dense and second.data_ptr() < first.data_ptr() + first.numel() * first.element_size()


def kept_from(output: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it where its memory would get results before it is read.

    Raises:
        InvalidRequestError, UnsupportedError: as `check` says of either.
    """
    check(output)
    check(tensor)
    if is_direct(output) and is_direct(tensor) and share_memory(tensor, output):
        return tensor.detach().clone()
    return tensor


def is_row_of(large: Tensor, small: Tensor, rank: int) -> bool:
    """Whether the small tensor is the rank's own part of the large one, which collectives read or write in place."""
    return small.data_ptr() == large.data_ptr() + rank * small.numel() * small.element_size()


def stacked(rows: Sequence[Tensor], staging: Staging) -> Tensor:
    """A copy of equally large tensors, one after the other: `[len(rows), elems]`."""
    same_size(rows)
    return joined(rows, staging).view(len(rows), -1)


def scattered(rows: Sequence[Tensor], staging: Staging) -> Tensor:
    """A buffer `[len(rows), elems]` whose rows are copied into the tensors when the collective is done."""
    same_size(rows)
    return parted(rows, staging).view(len(rows), -1)


def joined(tensors: Sequence[Tensor], staging: Staging) -> Tensor:
    """A flat copy of tensors of one dtype, one after the other."""
    for tensor in tensors:
        check(tensor)
    buffer = staging.buffer([sum(t.numel() for t in tensors)], tensors[0])
    for tensor, part in zip(tensors, buffer.split([t.numel() for t in tensors]), strict=True):
        staging.fetch(tensor.detach(), part.view(tensor.shape))
    return buffer


def parted(tensors: Sequence[Tensor], staging: Staging) -> Tensor:
    """A flat buffer whose parts are copied into the tensors, of one dtype, when the collective is done.

    Raises:
        InvalidRequestError: elements of one share memory.
    """
    for tensor in tensors:
        check(tensor)
        check_that_elements_are_apart(tensor)
    buffer = staging.buffer([sum(t.numel() for t in tensors)], tensors[0])
    for tensor, part in zip(tensors, buffer.split([t.numel() for t in tensors]), strict=True):
        staging.deliver(part.view(tensor.shape), tensor.detach())
    return buffer


def same_size(tensors: Sequence[Tensor], like: Tensor | None = None) -> None:
    """Checks that the tensors of a list agree in dtype and number of elements, also with `like`, the one that is beside the list.

    Raises:
        InvalidRequestError: they do not, or there are none.
    """
    if not tensors:
        raise InvalidRequestError("a list of tensors is empty")
    first, what = (tensors[0], "tensor 0") if like is None else (like, "the tensor beside it")
    check(first)
    for index, tensor in enumerate(tensors):
        check(tensor)
        if tensor.dtype != first.dtype or tensor.numel() != first.numel():
            raise InvalidRequestError(
                f"tensor {index} of the list is {tensor.dtype} with {tensor.numel()} elements, "
                f"{what} is {first.dtype} with {first.numel()}"
            )


def devices_of(tensors: Sequence[Tensor]) -> list[torch.device]:
    """The GPUs that the tensors are on, as `torch.futures.Future` wants them."""
    found = {t.device for t in tensors if isinstance(t, Tensor) and t.device.type == "cuda"}
    return sorted(found, key=str)
