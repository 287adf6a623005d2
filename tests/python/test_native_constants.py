"""Numbers and names that the package and its extension must agree about."""

from datetime import timedelta

import gradwire
import pytest
from gradwire import _board
from gradwire.errors import ConfigError


def test_a_group_that_the_engine_would_refuse_is_refused_before_anybody_waits_for_its_ranks() -> None:
    with pytest.raises(ConfigError, match=f"world_size = {_board.RANKS_MAX + 1} is not allowed: 1 to 16384"):
        gradwire.Communicator("127.0.0.1:0", rank=0, world_size=_board.RANKS_MAX + 1, timeout=timedelta(milliseconds=1))
