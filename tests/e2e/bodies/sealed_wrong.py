"""A rank with another job secret, with none, or with a bad one: every rank learns why. The body forms the group itself."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import rank
import torch.distributed as dist
from gradwire import _runtime
from gradwire.errors import ConfigError, GradwireError, SecretMismatchError

TIMEOUT = timedelta(seconds=15)
SECRET = "the secret of this job"


def form(name: str, secret: str | None) -> None:
    """Tries to form the default group; the next try starts afresh."""
    os.environ.pop("GRADWIRE_SECRET", None)
    if secret is not None:
        os.environ["GRADWIRE_SECRET"] = secret
    started = time.monotonic()
    try:
        rank.init(timeout=TIMEOUT, store=name)
    finally:
        runtime = _runtime.current()
        if runtime is not None:
            runtime.stop()
        _runtime._process.runtime = None
        assert not dist.is_initialized()
        assert time.monotonic() - started < TIMEOUT.total_seconds() + 5


def odd() -> bool:
    """Whether this is the rank that is started differently."""
    return rank.RANK == 1


def check_another_secret_on_one_rank_is_named_on_all() -> None:
    with pytest.raises(SecretMismatchError, match="another job secret") as caught:
        form("another", "something else altogether" if odd() else SECRET)
    assert caught.value.rank == (0 if odd() else 1)


def check_no_secret_on_one_rank_is_named_on_all() -> None:
    with pytest.raises(SecretMismatchError, match="GRADWIRE_SECRET") as caught:
        form("none", None if odd() else SECRET)
    assert caught.value.rank == (0 if odd() else 1)


def check_a_short_secret_on_one_rank_is_known_on_all() -> None:
    if odd():
        with pytest.raises(ConfigError, match="openssl rand"):
            form("short", "short")
    else:
        with pytest.raises(GradwireError, match="rank 1"):
            form("short", SECRET)
