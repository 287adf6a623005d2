"""A rank that cannot meet the others for `Communicator.split` says why, on all ranks and at once, and the whole goes on."""

from __future__ import annotations

import pytest
from free_ports import free_port
from test_communicator import printed, start

RANKS = 3
# Splits, first where `fail` of the victim makes it impossible; prints what came of both, and of a call afterwards.
SPLIT = """
import sys; sys.modules["torch"] = None
import gradwire, datetime, numpy, os, resource, signal
victim, kind = int(sys.argv[1]), sys.argv[2]

def fail_by_descriptors(left):
    # What is loaded when it is first needed needs one, too.
    gradwire.Communicator(f"127.0.0.1:{sys.argv[3]}", world_size=1, rank=0).split(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for one in range(left):
        os.close(held.pop())
    return lambda: [os.close(one) for one in held]

def fail_by_interrupt_at(where):
    armed = [True]
    def hook(event, arguments):
        if event == where and armed:
            armed.clear()
            signal.raise_signal(signal.SIGINT)
    sys.addaudithook(hook)
    return lambda: None

def split():
    try:
        with communicator.split(0, key=-communicator.rank) as part:
            print("> split", part.rank)
    except BaseException as error:
        print(">", type(error).__name__, error)

communicator = gradwire.Communicator(timeout=datetime.timedelta(seconds=int(sys.argv[4])))
mend = lambda: None
if communicator.rank == victim:
    mend = fail_by_descriptors(int(kind)) if kind.isdigit() else fail_by_interrupt_at(kind)
communicator.barrier()
split()
communicator.barrier()
mend()
split()
array = numpy.ones(1000)
communicator.all_reduce(array)
print("> sum", array[0])
communicator.close()
"""


def lines_of(victim: int, kind: str, timeout_s: int = 600) -> list[list[str]]:
    port, arguments = free_port(), [str(victim), kind, str(free_port()), str(timeout_s)]
    ranks = [start(["-c", SPLIT, *arguments], rank, RANKS, port) for rank in range(RANKS)]
    outputs = [printed(process).splitlines() for process in ranks]
    return [[line.removeprefix("> ") for line in output if line.startswith("> ")] for output in outputs]


@pytest.mark.parametrize(
    ("victim", "kind", "error"),
    [
        (0, "0", "EngineError no socket for the rendezvous"),
        (0, "1", "EngineError rank 0 cannot serve the rendezvous"),
        (0, "3", "EngineError rank 0 cannot serve the rendezvous"),
        (1, "0", "EngineError no socket for the rendezvous"),
        (2, "socket.connect", "KeyboardInterrupt"),
    ],
)
def test_a_rank_that_cannot_meet_for_split_is_told_to_all_and_the_whole_goes_on(
    victim: int, kind: str, error: str
) -> None:
    name, _, text = error.partition(" ")
    for rank, (first, second, last) in enumerate(lines_of(victim, kind)):
        if rank == victim:
            assert first.startswith(error)
            assert first.endswith("Too many open files") or not kind.isdigit()
        else:
            assert first.startswith(f"RendezvousError rank {victim} cannot meet the others for split: {name}: {text}")
        assert (second, last) == (f"split {RANKS - 1 - rank}", f"sum {float(RANKS)}")


def test_who_is_interrupted_while_the_ranks_of_a_part_meet_waits_for_nobody_and_the_whole_goes_on() -> None:
    for rank, (first, second, last) in enumerate(lines_of(1, "socket.gethostname", 20)):
        assert first.startswith(
            "KeyboardInterrupt" if rank == 1 else f"MissingRankError rank(s) 1 of {RANKS} did not appear"
        )
        assert (second, last) == (f"split {RANKS - 1 - rank}", f"sum {float(RANKS)}")
