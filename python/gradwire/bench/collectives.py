"""The collectives that are measured: what their bytes are, what bus bandwidth makes of them, and how a result is verified.

Bytes and bandwidths are those of the NCCL tests (doc/PERFORMANCE.md): algorithm bandwidth is bytes over time; bus bandwidth is
that times a factor which makes it comparable with the links' own, whatever the number of ranks.

Rank s holds for rank d at place e of a part: `(e % 61 + 1) * 2**s + d`. These are whole numbers below 2**24, so every sum is exact
in float32 whatever its order, and each value tells which ranks are in it and whom it was for. The prime 61 shows a value
that came to a wrong place at any power-of-two distance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PATTERN = 61
_SLICE_ELEMS = 1 << 20  # of a verification at a time


@dataclass(frozen=True)
class Collective:
    """How it is counted.

    Attributes:
        bytes_are: which buffer `bytes` means.
        bus_factor: bus bandwidth over algorithm bandwidth, for this many ranks.
    """

    bytes_are: str
    bus_factor: Callable[[int], float]


COLLECTIVES = {
    "all_reduce": Collective("the buffer", lambda ranks: 2 * (ranks - 1) / ranks),
    "all_gather": Collective("all parts together", lambda ranks: (ranks - 1) / ranks),
    "reduce_scatter": Collective("all parts together", lambda ranks: (ranks - 1) / ranks),
    "all_to_all": Collective("a rank's buffer", lambda ranks: (ranks - 1) / ranks),
    "broadcast": Collective("the buffer", lambda _: 1.0),
    "reduce": Collective("the buffer", lambda _: 1.0),
    "gather": Collective("all parts together", lambda ranks: (ranks - 1) / ranks),
    "scatter": Collective("all parts together", lambda ranks: (ranks - 1) / ranks),
}


class Task:
    """One rank's part in one collective of one size: its input, its calls and what they must give. Needs torch.

    Args:
        name: the collective.
        elems: `bytes / 4`, rounded down to a multiple of the ranks where there are parts.
        rank, ranks: in the group.
    """

    def __init__(self, name: str, elems: int, rank: int, ranks: int) -> None:
        import torch

        self._torch, self.name, self._rank, self.ranks = torch, name, rank, ranks
        self.part = max(1, elems // ranks)
        self.elems = elems if name in ("all_reduce", "broadcast", "reduce") else self.part * ranks
        self._whole = (torch.arange(self.elems) % PATTERN + 1).float()
        self._input = self._make_input()
        self.expected = self._make_expected()

    def fresh(self) -> tuple[Any, Any]:
        """Input and output of one call, in memory of its own; the same memory where the collective works in place."""
        if self.name in ("all_reduce", "broadcast", "reduce"):
            buffer = self._input.clone()
            return buffer, buffer
        sizes = {"all_gather": self.elems, "all_to_all": self.elems, "reduce_scatter": self.part, "scatter": self.part}
        size = sizes.get(self.name, self.elems if self._rank == 0 else 0)
        return self._input, self._torch.zeros(size)

    def call(self, buffers: tuple[Any, Any], group: Any) -> None:
        """The exact collective; rank 0 of the group is the root."""
        import torch.distributed as dist

        source, into = buffers
        parts = {"group": group}
        if self.name == "all_reduce":
            dist.all_reduce(into, **parts)
        elif self.name == "all_gather":
            dist.all_gather_into_tensor(into, source, **parts)
        elif self.name == "reduce_scatter":
            dist.reduce_scatter_tensor(into, source, **parts)
        elif self.name == "all_to_all":
            dist.all_to_all_single(into, source, **parts)
        elif self.name == "broadcast":
            dist.broadcast(into, 0, **parts)
        elif self.name == "reduce":
            dist.reduce(into, 0, **parts)
        elif self.name == "gather":
            dist.gather(source, list(into.chunk(self.ranks)) if self._rank == 0 else None, 0, **parts)
        else:
            dist.scatter(into, list(source.chunk(self.ranks)) if self._rank == 0 else None, 0, **parts)

    def wrong_bits(self, output: Any) -> int:
        """Elements that differ from the exact result in any bit."""
        if self.name == "reduce" and self._rank != 0:
            return 0  # what others hold then is not defined
        bits = self._torch.int32
        return int((output.view(bits) != self.expected.view(bits)).sum())

    def wrong_means(self, output: Any, counts: Any) -> int:
        """Elements of a mean, all-reduced or this rank's part of it, that are not the mean of as many ranks' values as were announced.

        Args:
            output: `[elems]` float32, of a reduce-scatter `[part]`.
            counts: as long; how many ranks are announced in each; 0: none, so that it must hold zero.
        """
        whole = self._whole[: len(output)]
        slices = (slice(at, at + _SLICE_ELEMS) for at in range(0, len(output), _SLICE_ELEMS))
        return sum(self._wrong_in(output[each], counts[each].int(), whole[each]) for each in slices)

    def _wrong_in(self, output: Any, counts: Any, whole: Any) -> int:
        """`wrong_means` of a slice, as what it makes is several times as large."""
        torch = self._torch
        to = self._rank if self.name == "reduce_scatter" else 0
        # A sum of as many powers of two, but for roundings of 6e-8, some of a value up to eight times as large.
        held = (output - to) / whole * counts
        sums = held.round()
        members = torch.tensor([bin(subset).count("1") for subset in range(1 << self.ranks)])
        inside = (sums >= 0) & (sums < 1 << self.ranks)
        announced = members[torch.where(inside, sums, 0).long()] == counts
        near = (held - sums).abs() <= 1e-6 * sums
        right = torch.where(counts == 0, output == 0, inside & announced & near)
        return int((~right).sum())

    def wrong_rotated(self, output: Any) -> int:
        """Elements of an all-reduced mean of all ranks that are off by more than the transform's roundings.

        docs/architecture.md: `log2(block) * 2**-24` of a block's norm, there and back; here the norm's bound is that of equal values.
        """
        torch = self._torch
        mean = self.expected / self.ranks
        return int(((output - mean).abs() > 1e-4 * torch.max(mean)).sum())

    def _make_input(self) -> Any:
        mine = float(2**self._rank)
        if self.name == "scatter" and self._rank != 0:
            return self._torch.zeros(0)
        if self.name in ("reduce_scatter", "all_to_all", "scatter"):
            return self._torch.cat([self._pattern() * mine + to for to in range(self.ranks)])
        if self.name in ("all_gather", "gather"):
            return self._pattern() * mine
        return self._whole * mine

    def _make_expected(self) -> Any:
        torch, ranks = self._torch, self.ranks
        if self.name in ("all_reduce", "reduce"):
            return self._whole * float(2**ranks - 1)
        if self.name == "reduce_scatter":
            return self._pattern() * float(2**ranks - 1) + ranks * self._rank
        if self.name == "broadcast":
            return self._whole
        if self.name == "scatter":
            return self._pattern() + self._rank
        if self.name == "gather" and self._rank != 0:
            return torch.zeros(0)
        to = self._rank if self.name == "all_to_all" else 0
        return torch.cat([self._pattern() * float(2**source) + to for source in range(ranks)])

    def _pattern(self) -> Any:
        return self._whole[: self.part]
