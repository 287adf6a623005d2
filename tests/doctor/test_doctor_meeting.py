"""Ranks meet over a folder, and over a torch Store; who does not come is named."""

import threading
from types import SimpleNamespace

import pytest
from gradwire.doctor.meeting import FolderMeeting, Place, StoreMeeting, everybody, open_meeting
from gradwire.errors import ConfigError, MissingRankError, RendezvousError


def folder(tmp_path):
    return FolderMeeting(tmp_path / "meeting")


def store(_tmp_path):
    torch = pytest.importorskip("torch.distributed")
    return StoreMeeting(torch.HashStore())


@pytest.mark.parametrize("make", [folder, store])
def test_every_rank_gets_everybodys_values_in_order(tmp_path, make):
    meeting, found = make(tmp_path), {}

    def come(rank):
        place = Place(meeting, rank, 3, 30.0)
        found[rank] = [everybody(place, "a", {"rank": rank}), everybody(place, "b", rank * 10)]

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [0, 10, 20]]
    assert found == {0: expected, 1: expected, 2: expected}


@pytest.mark.parametrize("make", [folder, store])
def test_who_does_not_come_is_named(tmp_path, make):
    with pytest.raises(MissingRankError, match="rank 1 has not come") as caught:
        everybody(Place(make(tmp_path), 0, 2, 0.2), "a", 1)
    assert caught.value.rank == 1


def test_a_torch_store_is_found_by_torchs_own_rendezvous():
    pytest.importorskip("torch.distributed")
    meeting = open_meeting("tcp://127.0.0.1:0", 0, 1, 10.0)
    meeting.put("x", [1, 2])
    assert meeting.get("x", 1.0) == [1, 2]


def test_no_store_and_no_address_are_refused():
    with pytest.raises(ConfigError, match="file:///folder"):
        open_meeting("http://somewhere", 0, 2, 1.0)
    pytest.importorskip("torch.distributed")
    with pytest.raises(RendezvousError, match="no Store"):
        open_meeting("tcp://127.0.0.1:1", 1, 2, 1.0)


def test_a_store_that_has_gone_is_told_by_put_and_by_get():
    import torch.distributed as dist

    def gone(*_arguments):
        raise dist.DistNetworkError("gone")

    store = SimpleNamespace(set=gone, wait=gone)
    for use in (lambda meeting: meeting.put("x", 1), lambda meeting: meeting.get("x", 1.0)):
        with pytest.raises(RendezvousError, match="gone"):
            use(StoreMeeting(store))
