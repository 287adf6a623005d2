"""A member whose torch Store has a host that is cut off, neither answering nor refusing, goes on: nobody can join meanwhile.

So does one whose Store has ended when it was connected to all others.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from gradwire._board import Board
from gradwire._bounded import BoundedStore
from gradwire._entrance import REST_S, Watch
from gradwire.errors import RendezvousError
from torch import distributed

SERVER = """
import sys
from torch import distributed
store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
ANSWER_S = 5.0
# After which the Store answers, so that who waits for it comes back too late instead of never.
CUT_OFF_S = 30.0


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.send_signal(signal.SIGCONT)
        process.kill()


@pytest.mark.filterwarnings("ignore")
def test_a_step_waits_for_a_store_that_is_cut_off_no_longer_than_is_allowed(
    server: tuple[subprocess.Popen[str], int], caplog: pytest.LogCaptureFixture
) -> None:
    process, port = server
    client = distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=2 * CUT_OFF_S), wait_for_workers=False)
    store = BoundedStore(client, ANSWER_S)
    store.set("gradwire/1/left/3", "1")
    assert (store.get("gradwire/1/left/3"), store.check(["nothing"])) == (b"1", False)
    watch = Watch(lambda: store, 1, 0, 4)
    assert watch.newcomer() == 0
    answers_again = threading.Event()

    def heal() -> None:
        answers_again.set()
        process.send_signal(signal.SIGCONT)

    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # on a busy host it may answer for a while
    healer = threading.Timer(CUT_OFF_S, heal)
    healer.start()
    with caplog.at_level(logging.WARNING, logger="gradwire"):
        assert watch.newcomer() == 0
        with pytest.raises(RendezvousError, match="has not answered an earlier request"):
            store.check(["nothing"])
        assert not answers_again.is_set(), "it waited as long as the Store was cut off"
    healer.cancel()
    assert "no rank can join this group now" in caplog.text
    assert "cut off" in caplog.text
    heal()
    pending = store._pending
    assert pending is not None
    assert pending.ended.wait(CUT_OFF_S)
    watch._asks_at -= REST_S
    assert watch.newcomer() == 0
    assert store.check(["gradwire/1/left/3"]), "it is asked again as soon as it answers"


@pytest.mark.parametrize("is_late", [False, True], ids=["while-it-waits", "before-it-comes"])
def test_who_is_connected_goes_on_when_rank_0_has_gone_with_the_store(
    server: tuple[subprocess.Popen[str], int], is_late: bool
) -> None:
    process, port = server
    timeout = timedelta(seconds=60)
    store, looks = (distributed.TCPStore("127.0.0.1", port, timeout=timeout, wait_for_workers=False) for _ in range(2))
    board = Board(store, "gradwire/1", 1, 2)
    with ThreadPoolExecutor(1) as pool:
        if not is_late:
            confirmed = pool.submit(board.confirm, 60.0)
            looks.wait(["gradwire/1/joined"], timeout)
        process.kill()
        process.wait()
        if is_late:
            confirmed = pool.submit(board.confirm, 60.0)
        confirmed.result(60.0)
