"""Runs tests of PyTorch's own `distributed_test` for one backend and one world size.

A process of its own, because that module reads backend and world size from the environment when it is imported. It imports
torch once and forks the ranks of each test, where PyTorch's own launcher starts each rank anew: seconds of importing would
else be most of the time. Reads names of tests from the standard input, one on a line; answers each with a line of JSON.

How gradwire gets in: the gates of the tests are answered as for gloo, which is what a backend for CPU tensors is measured
by, and then the ranks are told to use gradwire. So every test that runs for gloo runs for gradwire too, including those
whose gate is `BACKEND != "gloo"`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Longest wait for one test; PyTorch's own is 300 s, for machines that run 8 ranks.
TEST_TIMEOUT_S = 150
KEPT_OUTPUT_BYTES = 6000
MEETING = "meeting"


def load(backend: str, world_size: int, folder: Path) -> type[unittest.TestCase]:
    """The test case of this world size, with `backend` entered beside gloo. `folder`: for a file through which ranks meet."""
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_TIMEOUT_S),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "INIT_METHOD": f"file://{folder / MEETING}",
        "GLOO_SOCKET_IFNAME": "lo",
        "GRADWIRE_PORT": "0",
    }
    import torch
    from torch.testing._internal.distributed import distributed_test

    if backend != "gloo":
        enter(distributed_test, backend)
    os.environ["BACKEND"] = backend

    class TestDistBackendWithFork(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        """What PyTorch calls TestDistBackendWithSpawn, forking."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestDistBackendWithFork


def enter(module: Any, backend: str) -> None:
    """Enters a backend wherever the module lists gloo."""
    import gradwire.torch  # noqa: F401  registers the backend
    from torch.testing._internal.common_distributed import DistTestCases

    module.BACKEND = _Beside(backend)
    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add(backend)
    module.PROFILING_SUPPORTED_BACKENDS.append(backend)
    module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)


class _Beside(str):
    """The name of a backend, which answers to gloo's name too: some tests compare in their bodies."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@contextlib.contextmanager
def captured(path: Path) -> Iterator[None]:
    """What this process and its children print goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for old, number in zip(saved, (1, 2), strict=True):
            os.dup2(old, number)
            os.close(old)


class Outcome(unittest.TestResult):
    """How one test ended."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome, self.reason = "passed", ""

    def _failed(self, _test: Any, error: Any) -> None:
        self.outcome, self.reason = "failed", "".join(traceback.format_exception(*error))

    addError = addFailure = _failed  # noqa: N815  unittest's names

    def addSkip(self, _test: Any, reason: str) -> None:  # noqa: N802
        self.outcome, self.reason = "skipped", reason


def run(case: type[unittest.TestCase], name: str, folder: Path) -> dict[str, Any]:
    """Runs one test."""
    output = folder / "output"
    (folder / MEETING).unlink(missing_ok=True)
    result, started = Outcome(), time.monotonic()
    with captured(output):
        case(name).run(result)
    seconds = round(time.monotonic() - started, 2)
    entry = {"test": name, "outcome": result.outcome, "seconds": seconds, "reason": result.reason[-KEPT_OUTPUT_BYTES:]}
    if result.outcome == "failed":
        entry["output"] = output.read_bytes()[-KEPT_OUTPUT_BYTES:].decode(errors="replace")
    return entry


def main() -> None:
    """Answers until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("world_size", type=int)
    options = parser.parse_args()
    # Answers go where nothing that the tests print can get between.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        case = load(options.backend, options.world_size, Path(folder))
        names = unittest.TestLoader().getTestCaseNames(case)
        print(json.dumps({"names": names}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(run(case, line.strip(), Path(folder))), file=answers, flush=True)


if __name__ == "__main__":
    main()
