"""What asks for a process group says so where there is none."""

from __future__ import annotations

from collections.abc import Callable

import gradwire.torch
import pytest
from gradwire.errors import InvalidRequestError, UnsupportedError


@pytest.mark.parametrize("call", [gradwire.torch.stats, gradwire.torch.members])
def test_without_a_group_the_error_says_what_makes_one(call: Callable[[], object]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        call()
    assert str(caught.value) == "there is no process group: call init_process_group first"


@pytest.mark.parametrize("call", [gradwire.torch.stats, gradwire.torch.members])
def test_what_is_no_process_group_is_refused_by_what_it_is(call: Callable[[object], object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"'workers' is no process group: .* mesh.get_group"):
        call("workers")
