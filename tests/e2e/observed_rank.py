"""A rank that reduces until rank 0 finds the file `end`; what is to be seen of it is up to the test that started it.

observed_rank.py FOLDER ELEMS SLOW_RANK SLOW_S
"""

import logging
import sys
import threading
import time
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]  the observer needs none

import gradwire  # noqa: E402
import numpy as np  # noqa: E402

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
folder, elems, slow_rank, slow_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
ended = threading.Event()
COMPUTES_S = 0.004

with gradwire.Communicator() as communicator:
    gradients = np.ones(elems, np.float16)  # halves are summed by a transpose: all ranks send to all
    goes_on = np.ones(1024, np.int32)  # of which every rank reduces a part: who stops leaves something untaken
    steps = 0
    while True:
        # Its computation: without any, the ranks would keep all cores of the tests busy.
        ended.wait(slow_s if communicator.rank == slow_rank else COMPUTES_S)
        goes_on[:] = communicator.rank != 0 or not (folder / "end").exists()
        communicator.all_reduce(goes_on, "min")
        if not goes_on[0]:
            break
        communicator.all_reduce(gradients, "mean", tolerate_loss=True)
        steps += 1
        if steps == 3:
            print("reduces", flush=True)
            (folder / f"reduces-{communicator.rank}").write_text(f"{time.time()}")
    stats = gradwire.stats()
    calls = {(call["collective"], call["preset"]): call["calls"] for call in stats["groups"][0]["calls"]}
    print("counted", sum(calls.values()), "of", 2 * steps + 1, flush=True)
