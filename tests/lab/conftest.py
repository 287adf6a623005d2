"""For the tests of the lab."""

from collections.abc import Iterator

import pytest
from lab_command import Lab


@pytest.fixture
def lab() -> Iterator[Lab]:
    """That is down when the test ends."""
    made = Lab()
    yield made
    made.close()
