"""Groups that cannot form: every rank learns why. The body forms the group itself."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import rank
from gradwire import _board
from gradwire._calling import Caller
from gradwire._part_of_store import PartOfStore
from gradwire._rendezvous import Place, form_group
from gradwire.errors import (
    ConfigError,
    GradwireError,
    PortInUseError,
    RendezvousError,
    SettingsMismatchError,
    WorldSizeError,
)
from torch.distributed import FileStore, PrefixStore, TCPStore

from bodies.forming import TIMEOUT, form, tried

GROUPS = 10
LONG = timedelta(seconds=120)


def check_a_world_size_that_differs_is_named_on_both_ranks() -> None:
    ours = 2 if rank.RANK == 0 else 3
    with pytest.raises(WorldSizeError, match=r"world size .*[:;] start all ranks with one") as caught:
        form("world size", ours)
    assert caught.value.rank == 1 - rank.RANK
    assert {caught.value.theirs, caught.value.ours} == {2, 3}


def check_a_setting_that_differs_is_named_on_both_ranks() -> None:
    for field, values in {"eager_bytes": ("65536", "131072"), "ack_delay_us": ("250", "2000")}.items():
        variable = f"GRADWIRE_{field.upper()}"
        os.environ[variable] = values[rank.RANK]
        with pytest.raises(SettingsMismatchError, match=rf"all ranks \({variable}, or Config\)") as caught:
            form(f"a setting, {field}")
        del os.environ[variable]
        assert caught.value.field == field
        assert caught.value.rank == 1 - rank.RANK


def check_another_version_is_named_on_both_ranks_before_any_setting() -> None:
    ours = _board.VERSIONS["gradwire"]
    os.environ["GRADWIRE_EAGER_BYTES"] = ("65536", "131072")[rank.RANK]
    if rank.RANK == 1:
        _board.VERSIONS["gradwire"] = "9.0.0"
    told = "install the same version of gradwire on all hosts"
    try:
        with pytest.raises(SettingsMismatchError, match=rf"gradwire version .*{told}") as caught:
            form("version")
    finally:
        del os.environ["GRADWIRE_EAGER_BYTES"]
        _board.VERSIONS["gradwire"] = ours
    assert (caught.value.rank, caught.value.field) == (1 - rank.RANK, "gradwire version")
    assert {caught.value.theirs, caught.value.ours} == {ours, "9.0.0"}


def check_a_port_in_use_on_one_rank_is_known_on_both() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        if rank.RANK == 1:
            taken.bind(("", 0))
            port = taken.getsockname()[1]
            os.environ["GRADWIRE_PORT"] = str(port - 1)  # LOCAL_RANK is added
            with pytest.raises(PortInUseError, match=str(port)) as caught:
                form("port")
            assert caught.value.port == port
            os.environ["GRADWIRE_PORT"] = "0"
        else:
            with pytest.raises(RendezvousError, match="PortInUseError") as told:
                form("port")
            assert told.value.rank == 1


def check_a_setting_that_does_not_exist_on_one_rank_is_known_on_both() -> None:
    if rank.RANK == 1:
        os.environ["GRADWIRE_LOSSBOUND"] = "0.1"
        with pytest.raises(ConfigError, match="GRADWIRE_LOSS_BOUND"):
            form("name")
        del os.environ["GRADWIRE_LOSSBOUND"]
    else:
        with pytest.raises(GradwireError, match="rank 1"):
            form("name")


def check_what_all_have_read_does_not_stay_in_the_store_unless_lost_ranks_may_come_back() -> None:
    key, here = f"gradwire/1/{rank.RANK}", f"gradwire/here/{rank.RANK}"
    others = [f"gradwire/1/read/{rank.RANK}", f"gradwire/1/reading/{rank.RANK}", *([here] if rank.RANK else [])]
    tells_every_s, _board.TELLS_EVERY_S = _board.TELLS_EVERY_S, 0.0  # as it is where reading takes long
    for mode, stays in {"raise": rank.RANK == 0, "continue": True}.items():
        os.environ["GRADWIRE_ON_PEER_LOSS"] = mode
        store = FileStore(str(rank.FOLDER / f"stays, {mode}"), -1)
        with tried():
            form_group(store, Place(rank.RANK, rank.WORLD_SIZE, f"stays, {mode}", TIMEOUT))
            assert store.check([key]) is stays, mode
            for other in others:
                assert store.check([other]) is (mode == "continue"), other
    del os.environ["GRADWIRE_ON_PEER_LOSS"]
    _board.TELLS_EVERY_S = tells_every_s


def check_groups_that_are_formed_again_and_again_leave_little_in_a_store_that_outlives_them() -> None:
    """Each below a prefix of its own, as torch gives it, and each once more under the same name at once."""
    meeting = FileStore(str(rank.FOLDER / "outlives"), -1)
    if rank.RANK == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)
    tells_every_s, _board.TELLS_EVERY_S = _board.TELLS_EVERY_S, 0.0
    with tried(LONG):
        for number in range(GROUPS):
            below = PrefixStore(f"group {number}", store)
            for _ in range(2):
                formed = form_group(below, Place(rank.RANK, rank.WORLD_SIZE, f"group {number}", TIMEOUT))
                formed.native.leave(2.0)
    _board.TELLS_EVERY_S = tells_every_s
    meeting.add("formed", 1)
    if rank.RANK != 0:  # whose process holds the Store, and may end with it
        return
    while meeting.add("formed", 0) < rank.WORLD_SIZE:
        pass
    # Of each round five keys of rank 0's, the number of rounds, and a call of who had not taken back yet that it was there; and
    # under `here` and `reading` nothing.
    assert store.num_keys() <= GROUPS * (2 * 5 + 2) + 1
    keys = store.list_keys() if hasattr(store, "list_keys") else []
    assert not [key for key in keys if "/here/" in key or "/reading/" in key]


def check_a_group_is_formed_on_a_store_that_can_remove_nothing() -> None:
    class Own(PartOfStore):
        """A Store of the user's that keeps what is written, and says so."""

        def delete_key(self, key: str) -> None:
            raise RuntimeError(f"{key} stays: this Store removes nothing")

    store = Own(FileStore(str(rank.FOLDER / "own"), -1), "")
    with tried():
        form_group(store, Place(rank.RANK, rank.WORLD_SIZE, "own", TIMEOUT))
        assert store.check([f"gradwire/1/{rank.RANK}"])


def check_who_waits_in_the_round_of_a_rank_0_that_was_killed_hears_the_call_of_the_next_one() -> None:
    """On a Store that outlives rank 0, where each rank is started again alone."""
    store = FileStore(str(rank.FOLDER / "killed"), -1)
    if rank.RANK == 0:
        killed = Caller(store, rank.WORLD_SIZE)
        while not store.check([f"gradwire/{killed.round_number}/1"]):
            killed.call([1])
    with tried():
        formed = form_group(store, Place(rank.RANK, rank.WORLD_SIZE, "killed", TIMEOUT))
        assert formed.round_number == 2
