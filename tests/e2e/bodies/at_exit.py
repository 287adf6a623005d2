"""A script whose function at exit, registered before there is a group, makes the last calls.

Rank 0 has a child that is no daemon: Python waits for it at exit, and it waits for rank 1, which waits for rank 0's goodbye.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
from gradwire.errors import PeerLeftError
from rank import FOLDER, RANK, WORLD_SIZE, init, record

DESTROY = False
SAYS_GOODBYE = 0
PIPE = FOLDER / "goodbye"


def last_calls() -> None:
    try:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.barrier()
        assert torch.equal(tensor, torch.full((3,), float(WORLD_SIZE)))
        record("last_calls", "ok")
        if RANK != SAYS_GOODBYE:
            wait_for_the_goodbye()
    except BaseException as error:
        record("last_calls", repr(error))


def wait_for_the_goodbye() -> None:
    try:
        dist.barrier()
    except PeerLeftError:
        record("goodbye", "ok")
    finally:
        PIPE.write_text("heard\n")  # the child reads it


def read_the_pipe() -> None:
    assert PIPE.read_text() == "heard\n"
    os._exit(0)  # of torch and its threads there is nothing to end here


atexit.register(last_calls)
if RANK == SAYS_GOODBYE:
    os.mkfifo(PIPE)
init()


def check_forms_a_group_and_ends() -> None:
    if RANK == SAYS_GOODBYE:
        multiprocessing.get_context("fork").Process(target=read_the_pipe).start()
    dist.barrier()
    sys.stdout.flush()
