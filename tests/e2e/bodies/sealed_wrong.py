"""A rank with another job secret, with none, or with a bad one: every rank learns why. The body forms the group itself."""

from __future__ import annotations

import os

import pytest
import rank
from gradwire.errors import ConfigError, GradwireError, SecretMismatchError

from bodies.forming import form

SECRET = "the secret of this job"


def form_with(secret: str | None, name: str) -> None:
    """Tries to form the default group with this secret configured, or with none."""
    os.environ.pop("GRADWIRE_SECRET", None)
    if secret is not None:
        os.environ["GRADWIRE_SECRET"] = secret
    form(name)


def odd() -> bool:
    """Whether this is the rank that is started differently."""
    return rank.RANK == 1


def check_another_secret_on_one_rank_is_named_on_all() -> None:
    with pytest.raises(SecretMismatchError, match="another job secret") as caught:
        form_with("something else altogether" if odd() else SECRET, "another")
    assert caught.value.rank == (0 if odd() else 1)


def check_no_secret_on_one_rank_is_named_on_all() -> None:
    with pytest.raises(SecretMismatchError, match="GRADWIRE_SECRET") as caught:
        form_with(None if odd() else SECRET, "none")
    assert caught.value.rank == (0 if odd() else 1)


def check_a_short_secret_on_one_rank_is_known_on_all() -> None:
    if odd():
        with pytest.raises(ConfigError, match="openssl rand"):
            form_with("short", "short")
    else:
        with pytest.raises(GradwireError, match="rank 1"):
            form_with(SECRET, "short")
