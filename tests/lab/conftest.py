"""For the tests of the lab."""

from collections.abc import Iterator

import pytest
from gradwire.lab import NamespacesUnavailable, sandbox
from lab_command import Lab


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips what needs network namespaces where there are none."""
    try:
        sandbox.run(lambda: 0)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def lab() -> Iterator[Lab]:
    """That is down when the test ends."""
    made = Lab()
    yield made
    made.close()
