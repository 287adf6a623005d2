"""A member whose torch Store has a host that is cut off, neither answering nor refusing, goes on: nobody can join meanwhile.

So does one whose Store has ended when it was connected to all others. A rank that is still to form its group says so and goes.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import warm
from gradwire import _runtime
from gradwire._board import Board
from gradwire._bounded import BoundedStore
from gradwire._entrance import REST_S, Watch
from gradwire._part_of_store import PartOfStore
from gradwire._rendezvous import Place, Served, first_worker, form_group, join_served_group
from gradwire.errors import RendezvousError
from gradwire.lab.nursery import Forked
from torch import distributed

SERVER = """
import signal
from torch import distributed
store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""
ANSWER_S = 5.0
# After which the Store answers, so that who waits for it comes back too late instead of never.
CUT_OFF_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Forked, int]]:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    with warm.starter(elsewhere=False) as start:
        process = start([str(script)], env={**os.environ, **warm.THREADS}, stdout=subprocess.PIPE)
        try:
            with process.stdout as said:
                yield process, int(said.readline())
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def stop(process: Forked) -> None:
    """Returns when no thread of it runs any more: on a busy host one may answer for a while."""
    process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")
    while {(each / "stat").read_text().rpartition(")")[2].split()[0] for each in threads.iterdir()} != {"T"}:
        os.sched_yield()


@pytest.mark.filterwarnings("ignore")
def test_a_step_waits_for_a_store_that_is_cut_off_no_longer_than_is_allowed(
    server: tuple[Forked, int], caplog: pytest.LogCaptureFixture
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

    stop(process)
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
    server: tuple[Forked, int], is_late: bool
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


# Of who forms a group: long enough to come to the Store on a busy host before that is stopped.
FORM_S = 10.0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That of this process, which ends with the test."""
    monkeypatch.setenv("GRADWIRE_PORT", "0")
    _runtime._process.runtime = None
    yield
    if _runtime._process.runtime is not None:
        _runtime._process.runtime.stop()
        _runtime._process.runtime = None


def forms(rank: int) -> Callable[[distributed.Store], object]:
    return lambda store: form_group(
        distributed.PrefixStore("group", store), Place(rank, 2, "group", timedelta(seconds=FORM_S))
    )


def joins(store: distributed.Store) -> object:
    return join_served_group(distributed.PrefixStore("of-workers", store), Served(1, 1, 1), FORM_S, 1)


@pytest.mark.usefixtures("engine")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("form", "written"),
    [
        pytest.param(forms(0), "group/gradwire/1/0", id="rank-0"),
        pytest.param(forms(1), "group/gradwire/here/1", id="rank-1"),
        pytest.param(joins, "gradwire-served/gradwire/1/1", id="server"),
        pytest.param(
            lambda store: first_worker(store, 0, FORM_S), "gradwire-served/gradwire/here/server-0", id="server-before"
        ),
    ],
)
def test_who_forms_a_group_waits_for_a_store_that_is_cut_off_no_longer_than_its_timeout(
    server: tuple[Forked, int], form: Callable[[distributed.Store], object], written: str
) -> None:
    process, port = server
    forever = timedelta(seconds=10 * CUT_OFF_S)
    store, looks = (distributed.TCPStore("127.0.0.1", port, timeout=forever, wait_for_workers=False) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(form, store)
        looks.wait([written], forever)
        process.send_signal(signal.SIGSTOP)
        try:
            error = forming.exception(FORM_S + CUT_OFF_S)  # a TimeoutError: it waits as long as the Store is cut off
        finally:
            process.send_signal(signal.SIGCONT)
    assert type(error) is RendezvousError
    assert f"the Store at 127.0.0.1:{port} did not answer within" in str(error)
    assert error.store == f"127.0.0.1:{port}"


class CutOff(PartOfStore):
    """A Store that is cut off when somebody looks what is there, and says so."""

    def __init__(self, store: distributed.Store, process: Forked) -> None:
        super().__init__(store, "")
        self._process = process
        self.is_asked = threading.Event()

    def check(self, keys: Sequence[str]) -> bool:
        if not self.is_asked.is_set():
            stop(self._process)
            self.is_asked.set()
        return super().check(keys)


@pytest.mark.usefixtures("engine")
@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_ends_the_wait_for_a_store_that_is_cut_off(server: tuple[Forked, int]) -> None:
    process, port = server
    forever = timedelta(seconds=10 * CUT_OFF_S)
    client = distributed.TCPStore("127.0.0.1", port, timeout=forever, wait_for_workers=False)
    store, ended, answers_again = CutOff(client, process), threading.Event(), threading.Event()

    def interrupt_and_heal() -> None:
        assert store.is_asked.wait(10 * CUT_OFF_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not ended.wait(CUT_OFF_S):
            answers_again.set()
        process.send_signal(signal.SIGCONT)

    with ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt_and_heal)
        with pytest.raises(KeyboardInterrupt):
            form_group(store, Place(1, 2, "group", 2 * forever))
        assert not answers_again.is_set(), "it waited as long as the Store was cut off"
        ended.set()
        interrupted.result(CUT_OFF_S)
