"""Tensors as memory for the engine: address and length, staged through a contiguous host copy where they are not that.

The engine sees only addresses. Whatever it gets here is contiguous, in host memory, and kept alive by the call that
carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.errors import InvalidRequestError, UnsupportedError

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
    if tensor.numel() and tensor.data_ptr() == 0:
        raise UnsupportedError("the tensor has no memory (a fake tensor?)", device=device)


def address(tensor: Tensor | None) -> Memory:
    """Address and length in bytes of a contiguous tensor in host memory."""
    if tensor is None or tensor.numel() == 0:
        return EMPTY
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def is_direct(tensor: Tensor) -> bool:
    """Whether the engine can use the tensor's own memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy of it in host memory."""
    check(tensor)
    if is_direct(tensor):
        return tensor
    staged = host_buffer(tensor.shape, tensor)
    staged.copy_(tensor.detach())
    return staged


def writable(tensor: Tensor, after: list[Callable[[], None]], *, load: bool) -> Tensor:
    """The tensor, or a host copy whose contents go back to the tensor when the collective is done.

    Args:
        tensor: what the collective writes.
        after: gets the copying back.
        load: whether the present contents matter (in-place collectives).
    """
    check(tensor)
    if is_direct(tensor):
        return tensor
    tensor = tensor.detach()
    staged = host_buffer(tensor.shape, tensor)
    if load:
        staged.copy_(tensor)
    after.append(lambda: copy_back(tensor, staged))
    return staged


def host_buffer(shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty contiguous host tensor of the dtype of `like`; page-locked where `like` is on a GPU."""
    return torch.empty(tuple(shape), dtype=like.dtype, pin_memory=like.device.type == "cuda")


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """A copy of equally large tensors, one after the other: `[len(rows), elems]`."""
    same_size(rows)
    buffer = host_buffer((len(rows), rows[0].numel()), rows[0])
    for row, tensor in zip(buffer, rows, strict=True):
        row.copy_(tensor.detach().reshape(-1))
    return buffer


def scattered(rows: Sequence[Tensor], after: list[Callable[[], None]]) -> Tensor:
    """A buffer `[len(rows), elems]` whose rows are copied into the tensors when the collective is done."""
    same_size(rows)
    buffer = host_buffer((len(rows), rows[0].numel()), rows[0])

    def copy() -> None:
        for row, tensor in zip(buffer, rows, strict=True):
            copy_back(tensor.detach(), row.view(tensor.shape))

    after.append(copy)
    return buffer


def same_size(tensors: Sequence[Tensor]) -> None:
    """Checks that the tensors of a list agree in dtype and number of elements.

    Raises:
        InvalidRequestError: they do not, or there are none.
    """
    if not tensors:
        raise InvalidRequestError("a list of tensors is empty")
    for index, tensor in enumerate(tensors):
        check(tensor)
        if tensor.dtype != tensors[0].dtype or tensor.numel() != tensors[0].numel():
            raise InvalidRequestError(
                f"tensor {index} of the list is {tensor.dtype} with {tensor.numel()} elements, "
                f"tensor 0 is {tensors[0].dtype} with {tensors[0].numel()}"
            )


def devices_of(tensors: Sequence[Tensor]) -> list[torch.device]:
    """The GPUs that the tensors are on, as `torch.futures.Future` wants them."""
    found = {t.device for t in tensors if isinstance(t, Tensor) and t.device.type == "cuda"}
    return sorted(found, key=str)


def copy_back(tensor: Tensor, staged: Tensor) -> None:
    """Copies a staging buffer into the caller's tensor of the same shape."""
    with torch.no_grad():
        tensor.copy_(staged)
    if tensor.device.type == "cuda":
        # Whoever waits may read from any stream: the copy must be over, not only enqueued on this thread's stream.
        torch.cuda.current_stream(tensor.device).synchronize()
