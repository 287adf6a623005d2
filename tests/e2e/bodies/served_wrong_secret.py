"""A server with another job secret than the workers, or with none."""

from __future__ import annotations

from datetime import timedelta

import pytest
from gradwire.errors import SecretMismatchError
from rank import WORLD_SIZE

from bodies.forming import form


def check_the_server_is_named() -> None:
    with pytest.raises(SecretMismatchError, match="secret") as caught:
        # The server has to import torch first, which takes its time on a busy machine.
        form("store", timeout=timedelta(seconds=60))
    assert caught.value.rank == WORLD_SIZE  # servers come after the workers
