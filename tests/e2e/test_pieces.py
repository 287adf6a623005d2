"""Large calls on a device's tensors, cut into pieces; see bodies/pieces.py."""

from __future__ import annotations

import pytest
import torch
from gradwire.errors import PeerLostError
from gradwire.report import DeliveryReport, PeerDelivery, Straggler
from gradwire.torch import _streams
from gradwire.torch._pieces import ALIGNMENT, Piece, cut, explained, half_done, share_of
from launch import Outcome, checks_of, launch
from lazy_streams import LazyStreams

MB = 1 << 20


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    env = {"GRADWIRE_GPU_CHUNK_MB": "1", "GRADWIRE_CHAOS": "tail=5%,seed=7"}
    return launch("pieces", 2, tmp_path_factory.mktemp("pieces"), env=env)


@pytest.mark.parametrize("check", checks_of("pieces"))
def test_pieces(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()


@pytest.fixture
def _on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_streams._of_type, "cpu", LazyStreams())


@pytest.mark.usefixtures("_on_a_device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("nbytes", [8, 2 * MB, 2 * MB + 8, 5 * MB - 8, 25 * MB])
def test_pieces_are_the_whole_and_not_larger_than_allowed(nbytes: int, dtype: torch.dtype) -> None:
    tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    residual = torch.zeros_like(tensor)
    pieces, last = cut(Piece([tensor, None], [residual]), 2)
    assert last is None
    assert len(pieces) == max(1, -(-nbytes // (2 * MB)))
    position = 0
    for piece in pieces:
        (read,) = piece.read
        assert (piece.first, piece.whole, piece.count) == (position, tensor.numel(), len(pieces)) or len(pieces) == 1
        assert piece.tensor.data_ptr() == tensor.data_ptr() + position * dtype.itemsize
        assert read.data_ptr() == residual.data_ptr() + position * dtype.itemsize
        assert piece.tensor.numel() * dtype.itemsize <= 2 * MB
        assert piece.tensor.numel() % ALIGNMENT == 0 or piece is pieces[-1]
        assert piece.written[1] is None
        position += piece.tensor.numel()
    assert position == tensor.numel()


@pytest.mark.usefixtures("_on_a_device")
@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
def test_a_piece_has_the_same_columns_of_every_row(world_size: int) -> None:
    elems = 5 * MB // 4 // world_size + 1
    row, table = torch.arange(elems), torch.arange(world_size * elems).view(world_size, elems)
    for call in (Piece([table], [row], world_size), Piece([row], [table], world_size), Piece([row], table, world_size)):
        pieces, last = cut(call, 1)
        assert last is None
        assert len(pieces) > 1
        position = 0
        for piece in pieces:
            end = position + piece.elems
            assert (piece.first, piece.whole, piece.rows) == (position, elems, world_size)
            assert piece.elems * world_size * row.itemsize <= max(MB, ALIGNMENT * world_size * row.itemsize)
            parts = [part for part in piece.tensors if part.data_ptr() == row[position:].data_ptr()]
            assert len(parts) == 1
            rows = torch.cat([part.view(-1, piece.elems) for part in piece.tensors if part is not parts[0]])
            assert torch.equal(rows, table[:, position:end])
            position = end
        assert position == elems


def test_tensors_in_host_memory_are_not_cut() -> None:
    call = Piece([torch.zeros(MB)])
    assert cut(call, 1) == ([call], None)


@pytest.mark.usefixtures("_on_a_device")
def test_nothing_is_cut_without_a_size_or_where_tensors_do_not_fit_together() -> None:
    call = Piece([torch.zeros(MB)])
    assert cut(call, 0) == ([call], None)
    wrong = Piece([torch.zeros(MB), torch.zeros(MB - 1)])
    assert cut(wrong, 1) == ([wrong], None)


@pytest.mark.usefixtures("_on_a_device")
@pytest.mark.parametrize("parts", [1, 3, 7, 1000])
@pytest.mark.parametrize("rows", [1, 2])
def test_masks_of_the_pieces_are_the_mask_of_the_whole(parts: int, rows: int) -> None:
    elems = 3 * MB // 4 + 12_345
    mask = torch.rand(parts, generator=torch.Generator().manual_seed(1)) < 0.5
    whole = Piece([torch.zeros(elems)]) if rows == 1 else Piece([torch.zeros(elems)], [torch.zeros(rows * elems)], rows)
    pieces, _ = cut(whole, 1)
    assert len(pieces) > 1
    found = []
    for piece in pieces:
        with torch.device("meta"):  # torch's default device may be any
            own, count = piece.mask(mask.tolist()), rows * piece.elems
        found.append(own[torch.arange(count) * own.numel() // count].view(rows, -1))
    place = torch.arange(rows * elems, dtype=torch.float64) * parts / (rows * elems)
    inside = (place.frac() - 0.5).abs() < 0.25  # borders may be a quarter of a part from where they are in the whole
    assert torch.equal(torch.cat(found, 1).flatten()[inside], mask[place.long()][inside])


@pytest.mark.usefixtures("_on_a_device")
def test_what_cannot_be_a_mask_is_left_to_be_refused() -> None:
    pieces, _ = cut(Piece([torch.zeros(MB)]), 1)
    assert len(pieces) > 1
    assert pieces[1].mask([]) == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_loss_says_of_a_call_in_pieces_alone_that_some_of_it_may_be_done(count: int) -> None:
    lost = PeerLostError("rank 1 (host) is lost", rank=1)
    told = explained(lost, Piece([torch.zeros(4)]), 8, count)
    assert isinstance(told, PeerLostError)
    assert told.rank == 1
    assert (told is lost) == (count == 1)
    assert ("3 pieces of at most 8 MiB (gpu_chunk_mb), of which some may have ended" in str(told)) == (count == 3)
    assert half_done(None, "two calls") is None


def test_pieces_share_what_a_call_may_be_delayed() -> None:
    assert share_of({"deadline_max_s": 0.4, "loss_bound": 0.1}, 4) == {"deadline_max_s": 0.1, "loss_bound": 0.1}
    assert share_of({"deadline_max_s": None}, 4) == {"deadline_max_s": None}


def test_the_report_of_pieces() -> None:
    def part(elems: int, closed_by: str, **more: object) -> DeliveryReport:
        peer = PeerDelivery(1, elems - 10, elems, closed_by, 0.1, 0.2)
        return DeliveryReport(
            collective="all_reduce/transpose",
            elems=elems,
            bytes_sent=4 * elems,
            peers=(peer,),
            reduce_ended_by=closed_by,
            uncounted=((5, 15),),
            contributors=2,
            contributors_least=1,
            **more,  # type: ignore[arg-type]
        )

    first = part(100, "deadline", elapsed_s=0.3, compute_wait_s=0.1, stragglers=(Straggler(1, "network", 0.2),))
    late = (Straggler(1, "network", 0.3), Straggler(0, "compute", 0.1))
    second = part(50, "bound_met", elapsed_s=0.4, compute_wait_s=0.05, stragglers=late)
    report = DeliveryReport.of_parts([first, second, DeliveryReport(elems=7)])
    assert (report.elems, report.bytes_sent, report.elapsed_s) == (157, 600, 0.4)
    assert report.uncounted == ((5, 15), (105, 115))
    assert report.peers == (PeerDelivery(1, 130, 150, "deadline", 0.1, 0.2),)
    assert report.reduce_ended_by == "deadline"
    assert (report.contributors, report.contributors_least) == (2, 1)
    assert set(report.stragglers) == set(late)
    assert report.lost_share == pytest.approx(20 / 150)
    assert report.compute_wait_s + report.network_wait_s == report.elapsed_s
    rotated = DeliveryReport(elems=100, rotated_elems=128, uncounted=((0, 1),))
    report = DeliveryReport.of_parts([rotated, rotated])
    assert (report.rotated_elems, report.uncounted) == (256, ((0, 1), (128, 129)))
    assert DeliveryReport.of_parts([first]) is first


def test_what_pieces_of_a_reduce_scatter_lost_is_told_by_its_place_in_the_rows() -> None:
    def piece(elems: int, *uncounted: tuple[int, int]) -> DeliveryReport:
        return DeliveryReport(collective="reduce_scatter", elems=elems, uncounted=uncounted)

    # Rows of 15 elements for each rank, of which the first piece has 10: the second range lies in two rows.
    report = DeliveryReport.of_parts([piece(10, (2, 4), (18, 21)), piece(5, (7, 8))])
    assert report.uncounted == ((2, 4), (23, 25), (27, 28), (30, 31))
    assert report.elems == 15
