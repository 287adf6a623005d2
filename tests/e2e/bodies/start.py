"""Groups that cannot form: every rank learns why. The body forms the group itself."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import pytest
import rank
import torch.distributed as dist
from gradwire.errors import (
    ConfigError,
    GradwireError,
    PortInUseError,
    RendezvousError,
    SettingsMismatchError,
    WorldSizeError,
)

CASE = os.environ["GRADWIRE_TEST_CASE"]
TIMEOUT = timedelta(seconds=15)


def check_the_group_does_not_form_and_the_error_says_why() -> None:
    started = time.monotonic()
    CASES[CASE]()
    assert time.monotonic() - started < TIMEOUT.total_seconds() + 5
    assert not dist.is_initialized()


def world_size_differs() -> None:
    ours = 2 if rank.RANK == 0 else 3
    with pytest.raises(WorldSizeError, match="world size") as caught:
        rank.init(world_size=ours, timeout=TIMEOUT)
    assert caught.value.rank == 1 - rank.RANK
    assert {caught.value.theirs, caught.value.ours} == {2, 3}


def a_setting_differs() -> None:
    os.environ["GRADWIRE_EAGER_BYTES"] = "65536" if rank.RANK == 0 else "131072"
    with pytest.raises(SettingsMismatchError) as caught:
        rank.init(timeout=TIMEOUT)
    assert caught.value.field == "eager_bytes"
    assert caught.value.rank == 1 - rank.RANK


def the_port_is_in_use_on_rank_1() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        if rank.RANK == 1:
            taken.bind(("", 0))
            port = taken.getsockname()[1]
            os.environ["GRADWIRE_PORT"] = str(port - 1)  # LOCAL_RANK is added
            with pytest.raises(PortInUseError, match=str(port)) as caught:
                rank.init(timeout=TIMEOUT)
            assert caught.value.port == port
        else:
            with pytest.raises(RendezvousError, match="PortInUseError") as told:
                rank.init(timeout=TIMEOUT)
            assert told.value.rank == 1


def a_setting_does_not_exist_on_rank_1() -> None:
    if rank.RANK == 1:
        os.environ["GRADWIRE_LOSSBOUND"] = "0.1"
        with pytest.raises(ConfigError, match="GRADWIRE_LOSS_BOUND"):
            rank.init(timeout=TIMEOUT)
    else:
        with pytest.raises(GradwireError, match="rank 1"):
            rank.init(timeout=TIMEOUT)


CASES = {
    case.__name__: case
    for case in (
        world_size_differs,
        a_setting_differs,
        the_port_is_in_use_on_rank_1,
        a_setting_does_not_exist_on_rank_1,
    )
}
