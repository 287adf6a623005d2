"""Numbers and names that the package and its extension must agree about.

What is read where the extension does not load stands in Python, too.
"""

from datetime import timedelta
from typing import Any

import gradwire
import pytest
from gradwire import _arrays, _board, _launcher, _native, _policy, config, secret
from gradwire.doctor import host, reach, threads
from gradwire.errors import ConfigError
from gradwire.torch import _memory, _reduction


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (config.PORT_BASE, "PORT_BASE"),
        (_launcher.RANKS_MAX, "PORTS_APART"),
        (threads.PORTS_APART, "PORTS_APART"),
        (_launcher.THREADS_MAX, "THREADS_UNASKED_MAX"),
        (_board.RANKS_MAX, "RANKS_MAX"),
        (threads.RANKS_MAX, "LANE_RANKS_MAX"),
        (threads.RATE_MOST_MBIT * 125_000, "MEASURED_RATE_MAX"),
        (host.RECEIVE_WANTED, "RECEIVE_BUFFER_BYTES"),
        (host.SEND_WANTED, "SEND_BUFFER_BYTES"),
        (secret.SECRET_BYTES_MIN, "SECRET_BYTES_MIN"),
        (reach.UNKNOWN_BOOT, "UNKNOWN_BOOT"),
        (config.ALGORITHMS, "ALGORITHMS"),
        (tuple(_policy.ALGORITHM_CODES), "ALGORITHMS"),
        ((*(name.replace("mean", "avg") for name in _arrays.REDUCTIONS), "premul_sum"), "REDUCTIONS"),
        (tuple(name.lower() for name in _reduction.NAMES), "REDUCTIONS"),
        (("bytes", *_arrays.DTYPE_CODES), "DTYPES"),
        (("bytes", *(str(dtype).removeprefix("torch.") for dtype in _memory.DTYPE_CODES)), "DTYPES"),
        (config.CONTROLLERS[1:], "CONTROLLERS"),
        (config.FILLS, "FILLS"),
        (config.DIVISORS, "DIVISORS"),
        (config.ROTATIONS, "ROTATIONS"),
    ],
)
def test_the_package_has_what_its_extension_has(ours: Any, name: str) -> None:
    assert ours == getattr(_native, name)


@pytest.mark.parametrize(
    "codes", [_policy.ALGORITHM_CODES, {"bytes": 0, **_arrays.DTYPE_CODES}, {None: 0, **_memory.DTYPE_CODES}]
)
def test_codes_count_from_zero_in_the_order_of_the_names(codes: dict[Any, int]) -> None:
    assert list(codes.values()) == list(range(len(codes)))


def test_bridges_that_the_engine_leaves_out_are_left_out_by_the_doctor() -> None:
    assert all(host._BRIDGES.match(f"{name}0") for name in _native.BRIDGES)


def test_a_group_that_the_engine_would_refuse_is_refused_before_anybody_waits_for_its_ranks() -> None:
    with pytest.raises(ConfigError, match=f"world_size = {_native.RANKS_MAX + 1} is not allowed: 1 to 16384"):
        gradwire.Communicator(
            "127.0.0.1:0", rank=0, world_size=_native.RANKS_MAX + 1, timeout=timedelta(milliseconds=1)
        )
