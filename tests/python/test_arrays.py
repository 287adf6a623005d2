"""Which arrays can hold a result, and which share memory."""

from __future__ import annotations

import numpy as np
import pytest
from gradwire import _arrays
from gradwire.errors import InvalidRequestError
from numpy.lib.stride_tricks import as_strided

BASE = np.zeros(64, dtype="float64")
PARTS = np.zeros(16, dtype=[("one", "u1"), ("two", "<f4")])

APART = {
    "interleaved": BASE[::2],
    "transposed": BASE.reshape(8, 8).T,
    "backwards": BASE.reshape(4, 16)[::-1, ::-3],
    "field": PARTS["two"],
    "strides of which none holds the other": as_strided(BASE, (3, 2), (16, 24)),
    "one element, again and again at stride 0": as_strided(BASE, (1, 1), (0, 0)),
    "none": as_strided(BASE, (0, 3), (8, 8)),
    "of no size": np.zeros(3, "V0"),
}
TOGETHER = {
    "expanded": as_strided(BASE, (4, 3), (0, 8)),
    "windows": as_strided(BASE, (4, 3), (8, 8)),
    "windows backwards": as_strided(BASE[32:], (4, 3), (-8, -8)),
    "half an element apart": as_strided(BASE, (4,), (4,)),
    "strides that meet": as_strided(BASE, (4, 3), (16, 24)),
}


@pytest.mark.parametrize("name", APART)
def test_an_array_whose_elements_are_apart_can_hold_a_result(name: str) -> None:
    _arrays.writable(APART[name], [], load=False)


@pytest.mark.parametrize("name", TOGETHER)
def test_an_array_whose_elements_share_memory_cannot_hold_a_result(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="share memory"):
        _arrays.writable(TOGETHER[name], [], load=False)


def test_views_of_one_memory_share_it_where_an_element_is_in_both() -> None:
    assert not _arrays.share_memory(BASE[::2], BASE[1::2])
    assert not _arrays.share_memory(BASE.reshape(8, 8)[:, :4], BASE.reshape(8, 8)[:, 4:])
    assert _arrays.share_memory(BASE[::2], BASE[::3])
