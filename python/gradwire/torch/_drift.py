"""Whether replicas still hold the same bits, by how much they differ, and making them equal again.

For training with results that may be lost on their way back (presets `mlt`, `dlcp` and `ultima`, `gather_loss_bound`): a replica
that missed one differs from the others for good. Tensors are compared by fingerprints of blocks, so that ranks which agree
exchange 16 bytes each, and ranks which do not exchange 8 bytes for each block and the blocks that differ. Everything here is
exact, and collective: every rank of the group calls it at the same point of its program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire.errors import InvalidRequestError

logger = logging.getLogger("gradwire")

# Little enough that one lost packet (at most 64 KB) costs a repair of about itself, and a fingerprint 8 in 65,536 bytes.
BLOCK_BYTES = 1 << 16
# Of blocks that differ, as many are compared over all ranks at a time: of 1,024 ranks 32 MB of fingerprints, and a few times that beside.
COLUMNS_AT_ONCE = 1 << 12

# Whose states of the parameters are covered too: one, or those that have a part of the parameters each.
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@dataclass(frozen=True)
class DriftReport:
    """Where replicas differ; equal on every rank.

    Attributes:
        step: training steps before it was taken.
        tensors, blocks, bytes: what was compared.
        names: tensors of which some rank holds other bits than most do, in order.
        blocks_differing, bytes_differing: of these, what is not the same everywhere.
        ranks: ranks of the group that hold other bits than most do. Of two equally large parties the one of the lowest rank
            counts as most.
    """

    step: int = 0
    tensors: int = 0
    blocks: int = 0
    bytes: int = 0
    names: tuple[str, ...] = ()
    blocks_differing: int = 0
    bytes_differing: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def identical(self) -> bool:
        """Every rank holds the same bits."""
        return self.blocks_differing == 0

    def __str__(self) -> str:
        if self.identical:
            return f"after step {self.step} all replicas are identical ({self.tensors} tensors, {self.bytes} bytes)"
        named = ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if len(self.names) > 3 else "")
        return (
            f"after step {self.step} replicas differ in {self.blocks_differing} of {self.blocks} blocks "
            f"({self.bytes_differing} of {self.bytes} bytes, in {named}); ranks {list(self.ranks)} differ from most"
        )


@dataclass(frozen=True)
class Difference:
    """The largest difference of one element between any two ranks, and the tensor that it is in ("" where there is none)."""

    value: float = 0.0
    name: str = ""


@dataclass
class _Piece:
    """A tensor as bytes in host memory: its own, or a copy of them."""

    name: str
    tensor: torch.Tensor
    flat: torch.Tensor
    blocks: int
    first: int

    def part(self, block: int) -> torch.Tensor:
        """Bytes of a block, numbered over all tensors."""
        start = (block - self.first) * BLOCK_BYTES
        return self.flat[start : start + BLOCK_BYTES]

    def put_back(self) -> None:
        """Writes a copy back into the tensor."""
        if self.flat.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.flat.view(self.tensor.dtype).view(self.tensor.shape))


@dataclass
class _Comparison:
    """The tensors of this rank, and which blocks differ."""

    pieces: list[_Piece]
    differing: list[int] = field(default_factory=list)
    # For each differing block the fingerprints of all ranks `[world_size]`, and the rank whose bits most hold.
    table: torch.Tensor | None = None
    sources: list[int] = field(default_factory=list)

    def piece_of(self, block: int) -> _Piece:
        return next(p for p in self.pieces if p.first <= block < p.first + p.blocks)

    def report(self, step: int) -> DriftReport:
        found = [self.piece_of(block) for block in self.differing]
        ranks: set[int] = set()
        for column, source in enumerate(self.sources):
            assert self.table is not None
            ranks.update((self.table[:, column] != self.table[source, column]).nonzero().flatten().tolist())
        return DriftReport(
            step=step,
            tensors=len(self.pieces),
            blocks=sum(piece.blocks for piece in self.pieces),
            bytes=sum(piece.flat.numel() for piece in self.pieces),
            names=tuple(dict.fromkeys(piece.name for piece in found)),
            blocks_differing=len(self.differing),
            bytes_differing=sum(p.part(block).numel() for p, block in zip(found, self.differing, strict=True)),
            ranks=tuple(sorted(ranks)),
        )


# claim: auto/drift-meter
class DriftMeter:
    """Compares the parameters of a model between the ranks of a group, and repairs them.

    Not covered unless it is asked for: buffers (those of batch normalisation differ by right while ranks see different data)
    and the state of the optimizer, without which repaired parameters drift apart again. Residuals of error feedback differ
    by right and are never touched.

    Args:
        module: whose parameters are compared.
        group: its process group, of backend gradwire; every collective used here is exact.
        every: steps between checks that the hook makes on its own; 0: none.

    Attributes:
        latest: the report of the latest check.
        finish: is called before parameters are looked at: takes the steps that wait for the next forward pass (`step_in_forward`).
    """

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup, every: int = 0) -> None:
        self._module = module
        self._group = group
        self._every = every
        self.step = 0
        self.latest: DriftReport | None = None
        self.finish: Callable[[], None] = lambda: None

    def check(self, *, buffers: bool = False, optimizer: Optimizers = None) -> DriftReport:
        """Compares fingerprints, and warns (rank 0) where replicas differ. Call it between `optimizer.step()` and the next forward.

        Args:
            buffers: the module's buffers too.
            optimizer: its state of these parameters too; those of several: `steps.optimizers` of `step_in_forward`.

        Raises:
            InvalidRequestError: the ranks do not have the same tensors.
            GradwireError: the exchange failed, or that of gradients whose step was still to be taken.
        """
        self.finish()
        return self._check(buffers, optimizer)

    def _check(self, buffers: bool = False, optimizer: Optimizers = None) -> DriftReport:
        report = self._compare(buffers, optimizer).report(self.step)
        self.latest = report
        if not report.identical and dist.get_rank(self._group) == 0:
            logger.warning("%s; resynchronize() makes them equal", report)
        return report

    @torch.no_grad()
    def largest_difference(self, *, buffers: bool = False, optimizer: Optimizers = None) -> Difference:
        """The largest difference of an element between any two ranks, over the tensors that differ.

        Infinite for NaN, and where only some ranks have an infinity. Real and imaginary parts are elements of their own.

        Raises:
            InvalidRequestError, GradwireError: as `check`.
        """
        self.finish()
        compared = self._compare(buffers, optimizer)
        largest = Difference()
        for name in compared.report(self.step).names:
            tensor = next(piece.tensor for piece in compared.pieces if piece.name == name)
            high = _comparable(tensor.detach())
            low = high.clone()
            dist.all_reduce(high, dist.ReduceOp.MAX, group=self._group)
            dist.all_reduce(low, dist.ReduceOp.MIN, group=self._group)
            value = _distance(high, low).max().item()
            if value > largest.value:
                largest = Difference(value, name)
        return largest

    @torch.no_grad()
    def resynchronize(self, *, buffers: bool = False, optimizer: Optimizers = None) -> DriftReport:
        """Gives every rank the bits that most ranks hold, block by block; only blocks that differ are sent, exactly.

        Call it between `optimizer.step()` and the next forward.

        Returns:
            What was repaired.

        Raises:
            InvalidRequestError, GradwireError: as `check`.
        """
        self.finish()
        compared = self._compare(buffers, optimizer)
        for source in sorted(set(compared.sources)):
            blocks = [b for b, s in zip(compared.differing, compared.sources, strict=True) if s == source]
            parts = [compared.piece_of(block).part(block) for block in blocks]
            sent = torch.cat(parts)
            dist.broadcast(sent, dist.get_global_rank(self._group, source), group=self._group)
            for part, bits in zip(parts, sent.split([part.numel() for part in parts]), strict=True):
                part.copy_(bits)
        for piece in {id(p): p for p in map(compared.piece_of, compared.differing)}.values():
            piece.put_back()
        return compared.report(self.step)

    def before_step(self) -> None:
        """The hook is about to exchange the gradients of a new step: parameters are those after the step before."""
        if self._every > 0 and self.step > 0 and self.step % self._every == 0:
            self._check()
        self.step += 1

    def _compare(self, buffers: bool, optimizer: Optimizers) -> _Comparison:
        pieces: list[_Piece] = []
        marks: list[int] = []
        for name, tensor in self._tensors(buffers, optimizer):
            flat = _bytes_of(tensor)
            found = _native.fingerprints((flat.data_ptr(), flat.numel()), BLOCK_BYTES)
            pieces.append(_Piece(name, tensor, flat, len(found), len(marks)))
            marks.extend(found)
        mine = torch.tensor(marks, dtype=torch.int64, device="cpu")
        [digest] = _native.fingerprints((mine.data_ptr(), mine.numel() * 8), max(8, mine.numel() * 8)) or [0]
        digests = self._gathered(torch.tensor([digest, len(marks)], dtype=torch.int64, device="cpu"))
        if (digests == digests[0]).all():
            return _Comparison(pieces)
        if (digests[:, 1] != digests[0, 1]).any():
            counts = digests[:, 1].tolist()
            raise InvalidRequestError(f"ranks have tensors of {counts} blocks: replicas of one model have equally many")
        table = self._gathered(mine)
        differing = (table != table[0]).any(0).nonzero().flatten()
        table = table[:, differing]
        return _Comparison(pieces, differing.tolist(), table, _majority(table))

    def _gathered(self, row: torch.Tensor) -> torch.Tensor:
        """The row of every rank, `[world_size, elems]`."""
        rows = torch.empty((dist.get_world_size(self._group), row.numel()), dtype=row.dtype, device=row.device)
        dist.all_gather_into_tensor(rows.view(-1), row, group=self._group)
        return rows

    def _tensors(self, buffers: bool, optimizer: Optimizers) -> Iterator[tuple[str, torch.Tensor]]:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or []
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach()
            state: dict[str, Any] = next((each.state[parameter] for each in optimizers if parameter in each.state), {})
            for key, value in sorted(state.items()):
                if isinstance(value, torch.Tensor):
                    yield f"optimizer.{name}.{key}", value.detach()
        if buffers:
            for name, buffer in self._module.named_buffers():
                yield f"buffer.{name}", buffer.detach()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """`[bytes] uint8` in host memory: the tensor's own where it is dense there."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose elements have an order: int64 of whole numbers, whose differences no float64 holds, float64 of all others."""
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    is_whole = not parts.is_floating_point() and parts.dtype is not torch.uint64
    dtype = torch.int64 if is_whole else torch.float64
    return parts.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _distance(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """`[elems] float64`: of the largest and the smallest value of each element."""
    gap = high - low
    if gap.dtype is torch.int64:
        return torch.where(gap < 0, high.double() - low.double(), gap.double())  # below 0: more than an int64 holds
    return torch.where(high == low, 0.0, gap).nan_to_num(nan=float("inf"), posinf=float("inf"))


def _majority(table: torch.Tensor) -> list[int]:
    """For each column the lowest rank whose entry most ranks have."""
    return [row for part in table.split(COLUMNS_AT_ONCE, 1) for row in _majority_of_few(part)]


def _majority_of_few(table: torch.Tensor) -> list[int]:
    """By runs of equal entries: to compare each rank's with each other's takes the square of the ranks, in time and in memory."""
    ranks = table.shape[0]
    entries, order = table.sort(dim=0, stable=True)
    begins = torch.ones_like(entries, dtype=torch.bool)
    begins[1:] = entries[1:] != entries[:-1]
    places = torch.arange(ranks, device=table.device)[:, None]
    starts = torch.where(begins, places, 0).cummax(0).values
    lowest = order.gather(0, starts)  # of equal entries the sort leaves the lowest rank first
    most = ((places - starts) * ranks + (ranks - 1 - lowest)).argmax(0, keepdim=True)
    rows: list[int] = lowest.gather(0, most)[0].tolist()
    return rows
