"""What a collective delivered: the result of a lossy end, which is data and not an exception."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class PeerDelivery:
    """One peer's part of one stage, as this rank saw it.

    Attributes:
        rank: the sender, in the group.
        elems_received: elements that arrived from it.
        elems_expected: elements that were expected from it. What did not arrive is left out of a sum, or filled in where a
            result was expected.
        closed_by: why its transfers ended: `all_arrived`, `bound_met`, `soft_threshold`, `early_timeout` or `deadline`, of several
            reasons the one that accepts least.
        waited_for_peer_s: how long its first packet was waited for: until the peer called, sent what goes first, and the way here.
        network_time_s: from its first packet to the end of its transfer.
    """

    rank: int
    elems_received: int
    elems_expected: int
    closed_by: str
    waited_for_peer_s: float
    network_time_s: float


@dataclass(frozen=True)
class Straggler:
    """A rank that one collective waited for alone.

    Attributes:
        rank: in the group.
        cause: `compute` (it called later than half of the ranks), `network` (its bytes came later) or `receiver` (it took what was
            sent to it later).
        waited_s: how long it alone was waited for.
    """

    rank: int
    cause: str
    waited_s: float


@dataclass(frozen=True)
class Contributions:
    """How many ranks' values are in each block of a result, as this rank holds it. A block is what one packet carries.

    Zero is a block that nobody's values are in: no worker delivered it to its dedicated server, or its result did not arrive
    here and was filled in (filled with the rank's own value it counts one). Blocks beyond the last element, in a short or
    empty shard, are zero too.

    Attributes:
        counts: `[shards, blocks]` of uint16 over `data`, any library's arrays can be made of it: `numpy.asarray(counts)`,
            `torch.asarray(counts, dtype=torch.uint16).view(counts.shape)`. Element e is in shard `e // shard_elems`, and there in block
            `e % shard_elems // block_elems`. Of a rotated bucket they are about the elements that were sent
            (`DeliveryReport.rotated_elems`): each element of the tensor has a share of many.
        data: bytes of `counts`, in the machine's order. A report can be pickled, copied and compared with them.
        blocks: blocks of a shard.
        shard_elems: elements of a shard; the last ones may be shorter.
        block_elems: elements of a block; the last one of a shard may be shorter.
    """

    data: bytearray = field(repr=False, hash=False)
    blocks: int
    shard_elems: int
    block_elems: int

    @property
    def counts(self) -> memoryview:
        """`[shards, blocks]` of uint16; empty for a result of no elements."""
        # Made anew: a memoryview can be neither pickled nor copied, and reports are gathered from ranks.
        view = memoryview(self.data)
        return view.cast("H", (len(self.data) // 2 // self.blocks, self.blocks)) if self.data else view.cast("H")

    def of(self, elem: int) -> int:
        """Ranks in element `elem` of the result, or of the rotated bucket that was sent.

        Raises:
            IndexError: there is no such element.
        """
        if elem < 0:
            raise IndexError(f"element {elem}")
        shard, within = divmod(elem, self.shard_elems)
        return int(self.counts[shard, within // self.block_elems])

    @classmethod
    def from_native(cls, fields: dict[str, Any]) -> Contributions:
        """From the dictionary that the Rust binding returns."""
        return cls(fields["counts"], fields["blocks"], fields["shard_elems"], fields["block_elems"])


@dataclass(frozen=True)
class DeliveryReport:
    """What one collective delivered on this rank.

    Attributes:
        collective: its name, with the schedule of an all-reduce (`all_reduce/transpose`).
        sequence: its number in the group. Numbers begin anew with each epoch; of a call whose result was taken over from another rank it is
            that among all calls of this rank, and of a send or a receive that among this rank's sends and receives.
        elems: elements of the result.
        elapsed_s: from submission to the end, seconds.
        bytes_received: payload bytes that arrived, duplicates left out.
        bytes_expected: payload bytes that would have arrived without loss.
        bytes_sent: payload bytes sent, retransmissions included.
        bytes_retransmitted: payload bytes sent again until the result was there. Sends that are copied (small ones, rows of a gather) may
            be repaired after it: that is in the counters of peers alone.
        uncounted: ranges `(start, end)` of this rank's elements that did not count somewhere: of what it gave, also where its result is
            a part of that (reduce-scatter).
        peers: the peers that sent contributions: the reduce stage of an all-reduce, or a reduction of one stage.
        sources: the peers that sent what is kept as it is: the gather stage of an all-reduce, or a collective that copies.
        stragglers: who was waited for alone: at most one rank that called late, and one whose bytes came late or that took its bytes
            late. What a ring cannot show is in docs/observability.md.
        contributors: ranks whose values are in what this rank reduced, itself included, in the block that has the most. Zero
            where it reduced nothing.
        contributors_least: the same in the block that has the fewest.
        contributions: the same for each block of the result, wherever it was reduced; None unless the call asked for it.
        compute_wait_s: from this rank's call to the latest call of those that its result waited for, as the ranks tell each other.
        network_wait_s: the rest of `elapsed_s`.
        reduce_ended_by: what ended the wait for contributions, of several reasons the one that accepts least; words as in
            `PeerDelivery.closed_by`, empty where the stage received nothing.
        gather_ended_by: the same for the results that are sent back.
        filled: ranges `(start, end)` of this rank's result that did not arrive, or that no rank's values reached a dedicated server
            for, and which hold what `gather_fill` says.
        replicas_identical: every rank has the same bits. False where results may be lost on their way back: there ranks
            may differ, and `filled` of each says where. Of a result that was taken over from another rank (`collective` is `taken over`)
            nothing else is known of losses.
        warm_up: the reduction was exact because its policy measures first.
        rotated_elems: elements of the rotated bucket that was sent in place of the tensor, padding included; 0: it was sent as
            it is. Of a rotated one `uncounted`, `filled` and the elements of `peers` are places in what was sent: a value that did
            not count there is a share of many elements of the tensor.
        epoch: with `on_peer_loss="continue"`, the epoch of the group under which it ended; 0 is the first.
        members: and the ranks that took part, by which its means are divided. Empty where a lost rank ends the group.
        parts: the reports of the calls that this one consists of, where it was sent in pieces (`gpu_chunk_mb`) or coalesced. Bytes and
            elements are their sums then, times their longest, `epoch` and `members` those of the last; `contributions` are in
            the parts alone.
    """

    collective: str = ""
    sequence: int = 0
    elems: int = 0
    elapsed_s: float = 0.0
    bytes_received: int = 0
    bytes_expected: int = 0
    bytes_sent: int = 0
    bytes_retransmitted: int = 0
    uncounted: tuple[tuple[int, int], ...] = ()
    peers: tuple[PeerDelivery, ...] = ()
    sources: tuple[PeerDelivery, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    contributors: int = 0
    contributors_least: int = 0
    contributions: Contributions | None = None
    compute_wait_s: float = 0.0
    network_wait_s: float = 0.0
    reduce_ended_by: str = ""
    gather_ended_by: str = ""
    filled: tuple[tuple[int, int], ...] = ()
    replicas_identical: bool = True
    warm_up: bool = False
    rotated_elems: int = 0
    epoch: int = 0
    members: tuple[int, ...] = ()
    parts: tuple[DeliveryReport, ...] = ()

    @property
    def lost_share(self) -> float:
        """Share of the contributions expected here that did not arrive, 0 to 1; lost results are in `filled`.

        Of a rank that reduces nothing, because others are the servers: the share of its own contribution that did not count.
        """
        expected, received = self.contributions_delivered
        return 1.0 - received / expected if expected else 0.0

    @property
    def contributions_delivered(self) -> tuple[int, int]:
        """Elements of contributions that were expected, and those that arrived: here, or of this rank's own at its servers."""
        if self.peers or not self.bytes_expected:
            expected = sum(peer.elems_expected for peer in self.peers)
            return expected, sum(peer.elems_received for peer in self.peers)
        pushed = max(self.elems, self.rotated_elems)
        return pushed, pushed - self.elems_uncounted

    @property
    def elems_uncounted(self) -> int:
        """Elements of this rank's contribution that did not count."""
        return sum(end - start for start, end in self.uncounted)

    @classmethod
    def from_native(cls, fields: dict[str, Any]) -> DeliveryReport:
        """From the dictionary that the Rust binding returns."""
        peers = tuple(PeerDelivery(**peer) for peer in fields.pop("peers"))
        sources = tuple(PeerDelivery(**peer) for peer in fields.pop("sources"))
        stragglers = tuple(Straggler(**late) for late in fields.pop("stragglers"))
        counts = fields.pop("contributions")
        contributions = None if counts is None else Contributions.from_native(counts)
        return cls(**fields, peers=peers, sources=sources, stragglers=stragglers, contributions=contributions)

    @classmethod
    def of_parts(cls, parts: Sequence[DeliveryReport]) -> DeliveryReport:
        """One report of calls that are one to their caller, each about the elements after those of the one before."""
        if len(parts) == 1:
            return parts[0]
        elapsed_s = max(part.elapsed_s for part in parts)
        compute_wait_s = max(part.compute_wait_s for part in parts)
        totals = {name: sum(getattr(part, name) for part in parts) for name in SUMMED}
        return cls(
            collective=parts[0].collective,
            sequence=parts[0].sequence,
            **totals,
            elapsed_s=elapsed_s,
            compute_wait_s=compute_wait_s,
            network_wait_s=elapsed_s - compute_wait_s,
            uncounted=_shifted(parts, "uncounted"),
            filled=_shifted(parts, "filled"),
            peers=_of_each_rank([peer for part in parts for peer in part.peers]),
            sources=_of_each_rank([peer for part in parts for peer in part.sources]),
            stragglers=_longest([late for part in parts for late in part.stragglers]),
            contributors=max(part.contributors for part in parts),
            contributors_least=min((part.contributors_least for part in parts if part.contributors), default=0),
            reduce_ended_by=_least_accepting(part.reduce_ended_by for part in parts),
            gather_ended_by=_least_accepting(part.gather_ended_by for part in parts),
            replicas_identical=all(part.replicas_identical for part in parts),
            warm_up=all(part.warm_up for part in parts),
            rotated_elems=sum(map(_sent, parts)) if any(part.rotated_elems for part in parts) else 0,
            epoch=parts[-1].epoch,
            members=parts[-1].members,
            parts=tuple(parts),
        )


@dataclass(frozen=True)
class DeliveryTotals:
    """The sums of one or more reports: what is kept for each training step, whatever the number of ranks.

    Attributes:
        elems_expected: elements of contributions that were expected, as `DeliveryReport.contributions_delivered` counts them.
        elems_received: those of them that arrived.
        elems_uncounted: elements of this rank's contribution that did not count.
        bytes_sent, bytes_retransmitted: as in `DeliveryReport`.
        ended_by_time: ranks whose contribution a deadline or another time limit closed, and not what had arrived; of a GPU's tensor that
            goes in pieces, of each piece.
        elapsed_s: from submission to the end, of several the longest.
        elems_filled: elements of the result that did not arrive, as in `DeliveryReport.filled`.
        elems: elements of the result; of a rotated bucket those that were sent, as for `elems_filled`.
    """

    elems_expected: int = 0
    elems_received: int = 0
    elems_uncounted: int = 0
    bytes_sent: int = 0
    bytes_retransmitted: int = 0
    ended_by_time: int = 0
    elapsed_s: float = 0.0
    elems_filled: int = 0
    elems: int = 0

    @classmethod
    def of_parts(cls, parts: Sequence[DeliveryTotals]) -> DeliveryTotals:
        """Of calls that are one to their caller."""
        names = [field.name for field in fields(cls) if field.name != "elapsed_s"]
        sums = {name: sum(getattr(part, name) for part in parts) for name in names}
        return cls(**sums, elapsed_s=max((part.elapsed_s for part in parts), default=0.0))


SUMMED = ("elems", "bytes_received", "bytes_expected", "bytes_sent", "bytes_retransmitted")
# What may end a transfer, the one that accepts most first.
ENDS = ("", "all_arrived", "bound_met", "soft_threshold", "early_timeout", "deadline")


def _sent(report: DeliveryReport) -> int:
    """Elements of what was sent in place of the tensor, or of the tensor."""
    return report.rotated_elems or report.elems


def _shifted(parts: Sequence[DeliveryReport], name: str) -> tuple[tuple[int, int], ...]:
    if name == "uncounted" and parts[0].collective == "reduce_scatter":
        return _in_rows(parts)
    found: list[tuple[int, int]] = []
    before = 0
    for part in parts:
        found += [(start + before, end + before) for start, end in getattr(part, name)]
        before += _sent(part)
    return tuple(found)


def _in_rows(parts: Sequence[DeliveryReport]) -> tuple[tuple[int, int], ...]:
    """What did not count of a reduce-scatter: each part is about the same columns of the row for every rank."""
    found: list[tuple[int, int]] = []
    before, row_elems = 0, sum(part.elems for part in parts)
    for part in parts:
        for first, end in part.uncounted:
            start = first
            while start < end:
                row, column = divmod(start, part.elems)
                stop = min(end, (row + 1) * part.elems)
                at = row * row_elems + before + column
                found.append((at, at + stop - start))
                start = stop
        before += part.elems
    return tuple(sorted(found))


def _of_each_rank(peers: Sequence[PeerDelivery]) -> tuple[PeerDelivery, ...]:
    whole: dict[int, PeerDelivery] = {}
    for peer in peers:
        known = whole.get(peer.rank)
        whole[peer.rank] = (
            peer
            if known is None
            else PeerDelivery(
                peer.rank,
                known.elems_received + peer.elems_received,
                known.elems_expected + peer.elems_expected,
                _least_accepting((known.closed_by, peer.closed_by)),
                max(known.waited_for_peer_s, peer.waited_for_peer_s),
                max(known.network_time_s, peer.network_time_s),
            )
        )
    return tuple(whole.values())


def _longest(stragglers: Sequence[Straggler]) -> tuple[Straggler, ...]:
    by_length = sorted(stragglers, key=lambda late: late.waited_s)
    return tuple({(late.rank, late.cause): late for late in by_length}.values())


def _least_accepting(ends: Iterable[str]) -> str:
    return max(ends, key=ENDS.index)
