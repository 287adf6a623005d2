"""Starts ranks by forking a process that has imported torch (`gradwire.lab.nursery`): that costs each rank seconds of a core.

A rank whose environment decides something while torch is imported needs an interpreter of its own (`suits`).
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gradwire.lab.namespaces import Start
from gradwire.lab.nursery import Nursery

# What most bodies import, beside torch itself.
PRELOADED = (
    "torch",
    "numpy",
    "pytest",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",
)
# Read while torch is imported; the forked process has what nearly every launch wants.
THREADS = {"OMP_NUM_THREADS": "1"}
FLAGS = ("-X", "faulthandler", "-u")
TESTS = os.getpid()  # a sandbox is a fork of it, with process ids of its own


@contextmanager
def starter(*, elsewhere: bool) -> Iterator[Start]:
    """What starts ranks by forking: `start(script and arguments, **options of Popen)`.

    Args:
        elsewhere: they live in a sandbox, whose processes others cannot fork: it gets a nursery of its own, until they have ended.
    """
    if not elsewhere and os.getpid() == TESTS:
        yield _from(_nursery())
    else:
        with Nursery(("torch", "torch.distributed"), THREADS, FLAGS) as nursery:
            yield _from(nursery)


def start_cold(script: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a rank with an interpreter of its own."""
    return subprocess.Popen([sys.executable, *FLAGS, *script], **options)


def suits(env: Mapping[str, str]) -> bool:
    """Whether a rank with this environment is the same forked as started anew."""
    decides = ("TORCH", "PYTHON", "LD_", "MKL_")
    others = any(env[name] != os.environ.get(name) for name in env if name.startswith(decides))
    return not others and all(env.get(name) == value for name, value in THREADS.items())


def _from(nursery: Nursery) -> Start:
    return lambda script, **options: nursery.start([sys.executable, *script], stdin=subprocess.DEVNULL, **options)


@functools.cache
def _nursery() -> Nursery:
    """Started when first asked for."""
    nursery = Nursery(PRELOADED, THREADS, FLAGS)
    atexit.register(_end, nursery)
    return nursery


def _end(nursery: Nursery) -> None:
    if os.getpid() == TESTS:
        nursery.close()
