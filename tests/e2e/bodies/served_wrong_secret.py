"""A server with another job secret than the workers, or with none."""

from __future__ import annotations

import pytest
from gradwire.errors import SecretMismatchError
from rank import WORLD_SIZE

from bodies.forming import form


def check_the_server_is_named() -> None:
    with pytest.raises(SecretMismatchError, match="secret") as caught:
        form("store")
    assert caught.value.rank == WORLD_SIZE  # servers come after the workers
