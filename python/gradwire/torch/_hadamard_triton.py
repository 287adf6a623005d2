"""The randomised Hadamard transform of `gradwire_collectives::Hadamard` for tensors on a GPU, in Triton.

The same matrix, signs, butterflies and scale as in Rust, in the same order and in float32: float32 gives the same bits. So below
2^17 elements a rank could rotate on its GPU what another one turns back on its processor; from there on the engine has another matrix
(`WholeHadamard`), which is not here. No collective uses this module yet. Needs the package `triton`, which comes with torch
where torch has GPUs; importing this module without it raises ImportError. `TRITON_INTERPRET=1` runs it on the CPU.
"""

# Triton reads the kernels' source: their arguments are pointers and numbers of its own, constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]

# As in crates/gradwire-collectives/src/kernels/hadamard.rs.
BLOCKS = (4096, 1024, 256, 64, 16)
LANES_STEP = 16
LANES_MIN = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Columns that one program transforms: a strip of 4096 rows then fits the registers of a block of threads.
STRIP_LANES = 4


@dataclass(frozen=True)
class Shape:
    """The matrix that a tensor of `elems` elements is taken as, here and by `gradwire_collectives::Hadamard`.

    Attributes:
        elems: elements of the tensor.
        block: rows, a power of four.
        lanes: columns, a multiple of 16.
    """

    elems: int
    block: int
    lanes: int

    @classmethod
    def of(cls, elems: int) -> Shape | None:
        """The shape for `elems` elements; None for fewer than 2048, which are not rotated."""
        block = next((block for block in BLOCKS if block <= elems // LANES_MIN), None)
        if block is None:
            return None
        lanes = -(-elems // block)
        return cls(elems, block, -(-lanes // LANES_STEP) * LANES_STEP)

    @property
    def padded(self) -> int:
        """Elements of the matrix."""
        return self.block * self.lanes


def spread(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Rotates a tensor.

    Args:
        tensor: flat, contiguous, float32, float16 or bfloat16, at least 2048 elements.
        seed: the same on all ranks, another one in each step, below 2**64.

    Returns:
        `[padded]` of the same dtype and device.

    Raises:
        ValueError: another dtype, or too few elements.
    """
    shape = _shape_of(tensor.numel(), tensor)
    target = torch.empty(shape.padded, dtype=tensor.dtype, device=tensor.device)
    _launch(tensor, target, shape, seed, inverse=False)
    return target


def restore(rotated: torch.Tensor, elems: int, seed: int) -> torch.Tensor:
    """The inverse of `spread`, up to rounding.

    Args:
        rotated: `[padded]`, as `spread` returns it.
        elems: elements of the tensor that was rotated.
        seed: that of `spread`.

    Returns:
        `[elems]` of the same dtype and device.

    Raises:
        ValueError: another dtype, too few elements, or a tensor that no `spread` of `elems` elements returns.
    """
    shape = _shape_of(elems, rotated)
    if rotated.numel() != shape.padded:
        raise ValueError(f"{rotated.numel()} elements are not the rotation of {elems}, which has {shape.padded}")
    target = torch.empty(elems, dtype=rotated.dtype, device=rotated.device)
    _launch(rotated, target, shape, seed, inverse=True)
    return target


def _shape_of(elems: int, tensor: torch.Tensor) -> Shape:
    if tensor.dtype not in DTYPES or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"a flat contiguous tensor of {', '.join(map(str, DTYPES))}, not {tensor.dtype} {tensor.shape}"
        )
    shape = Shape.of(elems)
    if shape is None:
        raise ValueError(f"{elems} elements are too few to be rotated")
    return shape


def _launch(source: torch.Tensor, target: torch.Tensor, shape: Shape, seed: int, *, inverse: bool) -> None:
    # The states of the signs' generator; 64-bit constants travel as signed integers.
    key = _signed(_mix(seed))
    grid = (triton.cdiv(shape.lanes, STRIP_LANES),)
    _transform[grid](
        source,
        target,
        source.numel(),
        target.numel(),
        shape.lanes,
        -(-shape.lanes // 64),
        key,
        1.0 / math.sqrt(shape.block),
        BLOCK=shape.block,
        STAGES=shape.block.bit_length() - 1,
        LANES=STRIP_LANES,
        INVERSE=inverse,
        num_warps=8 if shape.block >= 1024 else 4,
    )


@triton.jit
def _signs(rows, columns, words_per_row, key):  # type: ignore[no-untyped-def]
    """Whether each element is flipped: bit `column % 64` of word `row * words_per_row + column / 64` of SplitMix64."""
    word = rows.to(tl.uint64) * words_per_row + (columns // 64).to(tl.uint64)
    value = key.to(tl.uint64) + word * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    value = value ^ (value >> 31)
    return ((value >> (columns % 64).to(tl.uint64)) & 1) != 0


@triton.jit
def _transform(  # type: ignore[no-untyped-def]
    source,
    target,
    source_elems,
    target_elems,
    lanes,
    words_per_row,
    key,
    scale,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LANES: tl.constexpr,
    INVERSE: tl.constexpr,
):
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.program_id(0) * LANES + tl.arange(0, LANES)[None, :]
    places = rows.to(tl.int64) * lanes + columns
    is_column = columns < lanes
    values = tl.load(source + places, mask=is_column & (places < source_elems), other=0.0).to(tl.float32)
    flips = _signs(rows, columns, words_per_row, key)
    if not INVERSE:
        values = tl.where(flips, -values, values)
    # From neighbouring rows to distant ones, as in Rust: the same pairs in the same order.
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(values, (BLOCK // (2 << stage), 2, LANES << stage))
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        joined = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        values = tl.reshape(joined, (BLOCK, LANES))
    values = values * scale
    if INVERSE:
        values = tl.where(flips, -values, values)
    mask = is_column & (places < target_elems)
    tl.store(target + places, values.to(target.dtype.element_ty), mask=mask)


def _mix(value: int) -> int:
    """SplitMix64's finaliser after one step, as in Rust."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
