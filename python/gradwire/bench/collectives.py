"""The collectives that are measured: what their bytes are, what bus bandwidth makes of them, and how a result is verified.

Bytes and bandwidths are those of the NCCL tests (doc/PERFORMANCE.md): algorithm bandwidth is bytes over time; bus bandwidth is
that times a factor which makes it comparable with the links' own, whatever the number of ranks.

In call k rank s of n holds for rank d at place e of a part: `((e + k) % 61 + 1) * (2**n - 2**s) + d`. These are whole numbers, and their
sums below 2**24 for up to 14 ranks, so every sum is exact in float32 whatever its order, and each value tells which ranks are in it,
whom it was for and of which call it is. The prime 61 shows a value that came to a wrong place at any power-of-two distance, and one of
any of the 60 calls before.

No other choice of ranks, some of them more than once, has the sum of each of c ranks once. That of N choices is `N * 2**n` less as many
powers of two. With N = c those would have to add up to a number with c ones as binary digits, which takes c different powers; with k more
choices to `k * 2**n` besides, which takes at least 2k powers more; with fewer to less than nothing. Powers of two alone do not tell three
times rank 0 from rank 0 and rank 1. A mean of fewer than all is only told to be one of c different ranks: reports announce how many, not
which.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PATTERN = 61
RANKS_MAX = 14  # whose sums float32 holds exactly; any weights that tell so much are as long as the number of ranks
_SLICE_ELEMS = 1 << 20  # of a verification at a time
_WHOLE = ("all_reduce", "broadcast", "reduce")  # of one buffer without parts, in place


@dataclass(frozen=True)
class Collective:
    """How it is counted.

    Attributes:
        bus_factor: bus bandwidth over algorithm bandwidth, for this many ranks.
    """

    bus_factor: Callable[[int], float]


COLLECTIVES = {
    "all_reduce": Collective(lambda ranks: 2 * (ranks - 1) / ranks),
    "all_gather": Collective(lambda ranks: (ranks - 1) / ranks),
    "reduce_scatter": Collective(lambda ranks: (ranks - 1) / ranks),
    "all_to_all": Collective(lambda ranks: (ranks - 1) / ranks),
    "broadcast": Collective(lambda _: 1.0),
    "reduce": Collective(lambda _: 1.0),
    "gather": Collective(lambda ranks: (ranks - 1) / ranks),
    "scatter": Collective(lambda ranks: (ranks - 1) / ranks),
}


def elems_of(name: str, elems: int, ranks: int) -> int:
    """So many elements as a collective can have: a multiple of the ranks where there are parts, of which none is empty."""
    return elems if name in _WHOLE else max(1, elems // ranks) * ranks


def weight(rank: int, ranks: int) -> float:
    """What a rank's values are multiplied by, so that sums tell whose they are."""
    return float(2**ranks - 2**rank)


def values(elems: int, number: int, factor: float) -> array[float]:
    """`((e + number) % 61 + 1) * factor` at each place e, in float32: what a rank holds with its weight, and the sum with that of all.

    For processes without torch.
    """
    row = array("f", [((place + number) % PATTERN + 1) * factor for place in range(PATTERN)])
    return (row * (elems // PATTERN + 1))[:elems]


def weight_of_all(ranks: int) -> float:
    """What the sum of all ranks is multiplied by."""
    return sum(weight(rank, ranks) for rank in range(ranks))


class Task:
    """One rank's part in one collective of one size: the inputs of its calls, and what they must give. Needs torch.

    A call has a number, the same on all ranks, which decides its data.

    Args:
        name: the collective.
        elems: `bytes / 4`; `elems_of` of them are used.
        rank, ranks: in the group; `RANKS_MAX` at most.
    """

    def __init__(self, name: str, elems: int, rank: int, ranks: int) -> None:
        import torch

        assert ranks <= RANKS_MAX, "plans have fewer"
        self._torch, self.name, self._rank, self.ranks = torch, name, rank, ranks
        self.elems = elems_of(name, elems, ranks)
        self.part = self.elems // ranks
        self._row = self.elems if name in _WHOLE else self.part
        # Every call's values are a piece of these: what differs from call to call is not computed again.
        self._pattern = (torch.arange(self._row + PATTERN - 1) % PATTERN + 1).float()

    def fresh(self, number: int) -> tuple[Any, Any]:
        """Input and output of a call, in memory of its own; the same memory where the collective works in place."""
        source = self._input(number)
        if self.name in _WHOLE:
            return source, source
        sizes = {"all_gather": self.elems, "all_to_all": self.elems, "reduce_scatter": self.part, "scatter": self.part}
        size = sizes.get(self.name, self.elems if self._rank == 0 else 0)
        return source, self._torch.zeros(size)

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

    def expected(self, number: int) -> Any:
        """The exact result of a call on this rank."""
        ranks = self.ranks
        every = weight_of_all(ranks)
        if self.name in ("all_reduce", "reduce"):
            return self._values(number) * every
        if self.name == "reduce_scatter":
            return self._values(number) * every + ranks * self._rank
        if self.name == "broadcast":
            return self._values(number) * weight(0, ranks)
        if self.name == "scatter":
            return self._values(number) * weight(0, ranks) + self._rank
        if self.name == "gather" and self._rank != 0:
            return self._torch.zeros(0)
        to = self._rank if self.name == "all_to_all" else 0
        return self._parts(number, [(weight(source, ranks), to) for source in range(ranks)])

    def wrong_bits(self, output: Any, number: int) -> int:
        """Elements that differ from the exact result of this call in any bit."""
        if self.name == "reduce" and self._rank != 0:
            return 0  # what others hold then is not defined
        bits = self._torch.int32
        return int((output.view(bits) != self.expected(number).view(bits)).sum())

    def wrong_means(self, output: Any, counts: Any, number: int) -> int:
        """Elements of a mean, all-reduced or this rank's part of it, that are not the mean of as many ranks' values as were announced.

        Args:
            output: `[elems]` float32, of a reduce-scatter `[part]`.
            counts: as long; how many ranks are announced in each; 0: none, so that it must hold zero.
            number: of the call whose output it is.
        """
        whole = self._values(number)
        slices = (slice(at, at + _SLICE_ELEMS) for at in range(0, len(output), _SLICE_ELEMS))
        return sum(self._wrong_in(output[each], counts[each].int(), whole[each]) for each in slices)

    def _wrong_in(self, output: Any, counts: Any, whole: Any) -> int:
        """`wrong_means` of a slice, as what it makes is several times as large."""
        torch = self._torch
        to = self._rank if self.name == "reduce_scatter" else 0
        # A sum of as many weights, but for some roundings of 6e-8.
        held = (output - to) / whole * counts
        sums = held.round()
        missing = counts * (1 << self.ranks) - sums  # a sum of as many powers of two
        members = torch.tensor([bin(subset).count("1") for subset in range(1 << self.ranks)])
        inside = (missing >= 0) & (missing < 1 << self.ranks)
        announced = members[torch.where(inside, missing, 0).long()] == counts
        near = (held - sums).abs() <= 1e-6 * sums
        right = torch.where(counts == 0, output == 0, inside & announced & near)
        return int((~right).sum())

    def wrong_rotated(self, output: Any, number: int) -> int:
        """Elements of an all-reduced mean of all ranks that are off by more than the transform's roundings.

        docs/architecture.md: `log2(block) * 2**-24` of a block's norm, there and back; here the norm's bound is that of equal values.
        """
        torch = self._torch
        mean = self.expected(number) / self.ranks
        right = (output - mean).abs() <= 1e-4 * torch.max(mean)  # what is not a number never is
        return int((~right).sum())

    def _input(self, number: int) -> Any:
        """In memory of its own, as a collective may work in place."""
        mine = weight(self._rank, self.ranks)
        if self.name == "scatter" and self._rank != 0:
            return self._torch.zeros(0)
        if self.name in ("reduce_scatter", "all_to_all", "scatter"):
            return self._parts(number, [(mine, to) for to in range(self.ranks)])
        return self._values(number) * mine

    def _parts(self, number: int, factors: list[tuple[float, int]]) -> Any:
        """A part for each of these, one after the other: the values of this call times the first, and the second more."""
        parts = self._torch.empty(len(factors), self.part)
        for part, (factor, more) in zip(parts, factors, strict=True):
            self._torch.mul(self._values(number), factor, out=part).add_(more)
        return parts.view(-1)

    def _values(self, number: int) -> Any:
        """`(e + number) % 61 + 1` at each place e; a view."""
        return self._pattern[number % PATTERN :][: self._row]
