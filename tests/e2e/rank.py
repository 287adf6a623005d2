"""One rank of an end-to-end test: forms the group, runs the body's checks, writes down how each ended."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist

FOLDER = Path(os.environ["GRADWIRE_TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GROUP_TIMEOUT = timedelta(seconds=float(os.environ.get("GRADWIRE_TEST_TIMEOUT_S", "30")))


def init(
    backend: str = "gradwire", world_size: int = WORLD_SIZE, timeout: timedelta = GROUP_TIMEOUT, store: str = "store"
) -> None:
    """Joins the default group through a file Store of the launch."""
    import gradwire.torch  # noqa: F401  registers the backend with torch < 2.14

    method = f"file://{FOLDER / store}"
    dist.init_process_group(backend, init_method=method, rank=RANK, world_size=world_size, timeout=timeout)


def record(name: str, result: str) -> None:
    """Writes down how a check ended, at once: the process may not survive the next one."""
    with (FOLDER / f"results-{RANK}").open("a") as file:
        file.write(json.dumps([name, result]) + "\n")


def run(check: Any, meeting: Any) -> None:
    """Runs one check and goes on whatever happens; ranks meet after each, so that one failure leaves the next alone."""
    try:
        check()
    except BaseException as error:
        print(f"{check.__name__}: {error!r}", flush=True)
        record(check.__name__, traceback.format_exc())
        if isinstance(error, (KeyboardInterrupt, SystemExit)):  # what pytest.raises raises is a BaseException too
            raise
    else:
        record(check.__name__, "ok")
    if meeting is not None:
        dist.barrier(meeting)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sys.modules["rank"] = sys.modules["__main__"]
    backend = os.environ["GRADWIRE_TEST_BACKEND"]
    if backend:
        init(backend)
    body = importlib.import_module(f"bodies.{sys.argv[1]}")
    for name, check in list(vars(body).items()):
        if name.startswith("check_") and name in os.environ.get("GRADWIRE_TEST_ONLY", name).split(","):
            run(check, getattr(body, "GLOO", None))
    if getattr(body, "DESTROY", True) and dist.is_initialized():
        dist.destroy_process_group()
        let_go_of_groups(body)


def let_go_of_groups(body: Any) -> None:
    """Ends gloo's threads, which destroying a group does not while the body holds it.

    Such a thread may still hold the last reference to a tensor of Python's when the interpreter ends. Giving it back needs the GIL,
    for which Python ends the thread, within a function of C++ that may not throw: "terminate called without an active exception".
    """
    vars(body).clear()
    gc.collect()


if __name__ == "__main__":
    main()
