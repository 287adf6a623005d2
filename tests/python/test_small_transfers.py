"""Whether it is said, once, that a loss bound allows no packet to be missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gradwire import Config
from gradwire._policy import ALGORITHM_CODES, policy_numbers
from gradwire._small_transfers import SmallTransfers
from pair import pair

MB = 1 << 20


@pytest.fixture(scope="module")
def stats() -> Iterator[dict[str, Any]]:
    """Of a group as it would be between hosts, with an MTU of 1500."""
    engines, groups = pair()
    found = groups[0].stats()
    yield {**found, "datagram_bytes": 1452, "security": {**found["security"], "all_local": False}}
    for engine in engines:
        engine.stop()


def call(tensor_bytes: int, preset: str = "auto", algorithm: str = "auto", **more: Any) -> dict[str, Any]:
    numbers = policy_numbers(Config(), preset, **more)
    return {"input": (0, tensor_bytes), "policy": numbers, "algorithm": ALGORITHM_CODES[algorithm]}


def test_a_bound_that_allows_no_packet_among_so_many_ranks_is_told_once(
    stats: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    # 5 % of 8 MiB / 512 are 819 bytes of packets of 1344.
    transfers = SmallTransfers(lambda: stats, 512)
    for _ in range(3):
        transfers.see(call(8 * MB))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "loss_bound = 0.05 allows none of the packets of 1344 bytes to be missing in transfers of 16384 bytes"
    )
    assert "512 ranks" in said


def test_where_some_may_be_missing_or_nothing_is_said_of_it_there_is_no_warning(
    stats: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    transfers = SmallTransfers(lambda: stats, 512)
    for fine in (
        call(16 * MB),
        call(8 * MB, loss_bound=0.1),
        call(MB),
        call(8 * MB, "reliable"),
        call(8 * MB, "ltp"),
        call(8 * MB, algorithm="parameter_server"),
        {"input": (0, 8 * MB)},
    ):
        transfers.see(fine)
    local = {**stats, "security": {**stats["security"], "all_local": True}}
    SmallTransfers(lambda: local, 512).see(call(8 * MB))
    assert not caplog.records


def test_a_group_whose_transfers_are_large_is_not_asked_for_its_counters() -> None:
    def never() -> dict[str, Any]:
        raise AssertionError("asked")

    for ranks, preset in ((1, "mlt"), (4, "auto"), (8, "mlt")):
        SmallTransfers(never, ranks).see(call(25 * MB, preset))
