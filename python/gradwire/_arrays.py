"""NumPy arrays as memory for the engine: what `torch/_memory.py` is for tensors.

The engine sees only addresses. Whatever it gets from here is contiguous, in the machine's byte order, and kept alive by the
call that carries it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.errors import InvalidRequestError, UnsupportedError

Array = NDArray[Any]
Memory = tuple[int, int]
EMPTY: Memory = (0, 0)

BYTES = 0
# Codes of `gradwire_collectives::Dtype`, by NumPy's names; NumPy has bfloat16 by the package ml_dtypes.
DTYPE_CODES = {
    "float32": 1, "float64": 2, "float16": 3, "bfloat16": 4, "uint8": 5, "int8": 6, "int16": 7, "int32": 8, "int64": 9,
    "bool": 10, "uint16": 11, "uint32": 12, "uint64": 13,
}  # fmt: skip
# The parts of a complex number are reduced like two real ones where the reduction is linear.
COMPLEX_CODES = {"complex64": 1, "complex128": 2}
TOLERANT_DTYPES = ("float32", "bfloat16", "float16")
# In the order of the binding's codes (crates/gradwire-py/src/call.rs).
REDUCTIONS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
LINEAR = ("sum", "mean")
BITWISE = ("band", "bor", "bxor")
# Of fewer there is no mean of whole numbers, nor of booleans.
WHOLE_MEAN_BYTES_MIN = 4
# Steps of NumPy's search for an element that two arrays share: enough for views of a few dimensions, and less than a millisecond.
SEARCH_STEPS = 10_000


def check(array: Array) -> None:
    """Whether this is an array that can be sent.

    Raises:
        UnsupportedError: it is no array, or one of Python objects. Fields: dtype.
    """
    if not isinstance(array, np.ndarray):
        raise UnsupportedError(f"expected a NumPy array, got {type(array).__name__}: numpy.asarray() makes one")
    if array.dtype.hasobject:
        raise UnsupportedError("Python objects cannot be sent, only numbers", dtype=str(array.dtype))


def address(array: Array | None) -> Memory:
    """Address and length in bytes of a contiguous array."""
    if array is None or array.size == 0:
        return EMPTY
    return array.ctypes.data, array.nbytes


def is_direct(array: Array) -> bool:
    """Whether the engine can use the array's own memory."""
    return bool(array.flags.c_contiguous and array.dtype.isnative and array.flags.aligned)


def share_memory(one: Array, other: Array) -> bool:
    """Whether an element of one is where one of the other is; also where that could not be found out soon."""
    # The stubs have two numbers only, NumPy's documentation any.
    return np.may_share_memory(one, other, max_work=SEARCH_STEPS)  # type: ignore[arg-type]


def readable(array: Array, beside: Array | None = None) -> Array:
    """The array, or a contiguous copy: also where it shares memory with `beside`, which is written meanwhile."""
    check(array)
    if is_direct(array) and (beside is None or not np.may_share_memory(array, beside)):
        return array
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)


def check_writable(array: Array) -> None:
    """Whether a result can be written there.

    Raises:
        UnsupportedError: as `check`.
        InvalidRequestError: the array is read-only, or some of its elements share memory.
    """
    check(array)
    if not array.flags.writeable:
        raise InvalidRequestError("the array that gets the result is read-only")
    if array.size and array.itemsize and not is_direct(array) and _may_overlap(array) and _overlaps(array):
        raise InvalidRequestError(
            f"elements of an array that gets a result share memory: shape {array.shape}, strides {array.strides}; pass a copy"
        )


def writable(array: Array, after: list[Callable[[], None]], *, load: bool) -> Array:
    """The array, or a copy whose contents go back to the array when the collective is done.

    Args:
        array: what the collective writes.
        after: gets the copying back.
        load: whether the present contents matter (in-place collectives).

    Raises:
        InvalidRequestError: the array is read-only, or some of its elements share memory.
    """
    check_writable(array)
    if is_direct(array):
        return array
    staged = np.empty(array.shape, dtype=array.dtype.newbyteorder("="))
    if load:
        np.copyto(staged, array)
    after.append(lambda: np.copyto(array, staged))
    return staged


def _may_overlap(array: Array) -> bool:
    """Whether a dimension begins again within what those of smaller strides reach."""
    reach = array.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def _overlaps(array: Array) -> bool:
    """The same for certain: places of strides that interleave may all differ."""
    if any(stride == 0 and size > 1 for stride, size in zip(array.strides, array.shape, strict=True)):
        return True
    span = array.itemsize + sum(
        abs(stride) * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)
    )
    if array.nbytes > span:
        return True
    places = np.zeros((), dtype=np.int64)
    for stride, size in zip(array.strides, array.shape, strict=True):
        places = np.add.outer(places, np.arange(size) * stride)
    return bool((np.diff(np.sort(places, axis=None)) < array.itemsize).any())


def out_like(out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`out`, or a new array.

    Raises:
        InvalidRequestError: `out` has another shape or dtype, or there is no memory for the result.
    """
    if out is None:
        try:
            return np.empty(shape, dtype=dtype)
        except (ValueError, MemoryError) as error:
            raise InvalidRequestError(f"no memory for the result, {dtype} {shape}: {error}") from error
    check_like("out", out, "the result", shape, dtype)
    return out


def check_like(name: str, array: Array, of: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Whether an argument has the shape and dtype of something.

    Args:
        name: of the argument.
        array: the argument.
        of: whose shape and dtype they are, in words.
        shape: of that.
        dtype: of that.

    Raises:
        InvalidRequestError: it has others.
    """
    check(array)
    if array.shape != shape or array.dtype != dtype:
        raise InvalidRequestError(f"{name} is {array.dtype} {array.shape}, {of} is {dtype} {shape}")


def copy_options(array: Array) -> dict[str, Any]:
    """Options of a collective that only moves: the dtype is compared between ranks, where the engine knows it."""
    return {"dtype": DTYPE_CODES.get(array.dtype.name, BYTES)}


def reduce_options(array: Array, op: str) -> dict[str, Any]:
    """Options of a reducing call: dtype, reduce, factor.

    Raises:
        InvalidRequestError: there is no such reduction.
        UnsupportedError: it is not possible on this dtype. Fields: dtype, op.
    """
    check(array)
    if op not in REDUCTIONS:
        raise InvalidRequestError(f"op = {op!r} is not allowed: one of {', '.join(REDUCTIONS)}")
    name = array.dtype.name
    code = DTYPE_CODES.get(name, COMPLEX_CODES.get(name, BYTES) if op in LINEAR else BYTES)
    if code == BYTES or (op in BITWISE and array.dtype.kind not in "biu"):
        raise UnsupportedError(f"reduction {op} of {name} is not supported", dtype=name, op=op)
    if op == "mean" and array.dtype.kind in "biu" and array.itemsize < WHOLE_MEAN_BYTES_MIN:
        why = "the sum that is divided may not fit: convert to int32 or wider, or take the sum"
        raise UnsupportedError(f"reduction mean of {name} is not supported: {why}", dtype=name, op=op)
    return {"dtype": code, "reduce": REDUCTIONS.index(op), "factor": 1.0}
