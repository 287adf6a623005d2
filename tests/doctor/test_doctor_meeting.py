"""Ranks meet over a folder, and over a torch Store; who does not come is named."""

import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctors import DOCTOR, arguments_of, report_of, run_doctors, start_doctor, told, without_a_job
from gradwire.doctor import meeting as meeting_module
from gradwire.doctor.meeting import FolderMeeting, Place, StoreMeeting, open_meeting, said_by_all, say
from gradwire.errors import ConfigError, MissingRankError, RendezvousError
from gradwire.lab.network import Layout, Network
from sandboxed import in_sandbox


def folder(tmp_path):
    return FolderMeeting(tmp_path / "meeting", "run")


def store(_tmp_path):
    torch = pytest.importorskip("torch.distributed")
    return StoreMeeting(torch.HashStore())


def everybody(place, key, value, more_s=0.0):
    say(place, key, value)
    return said_by_all(place, key, more_s)


@pytest.mark.parametrize("make", [folder, store])
def test_every_rank_gets_everybodys_values_in_order(tmp_path, make):
    meeting, found = make(tmp_path), {}

    def come(rank):
        place = Place(meeting, rank, 3, 30.0)
        found[rank] = [everybody(place, "a", {"rank": rank}), everybody(place, "b", rank * 10)]

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [[{"rank": 0}, {"rank": 1}, {"rank": 2}], [0, 10, 20]]
    assert found == {0: expected, 1: expected, 2: expected}


@pytest.mark.parametrize("make", [folder, store])
def test_who_does_not_come_is_named(tmp_path, make):
    with pytest.raises(MissingRankError, match="rank 1 has not come") as caught:
        everybody(Place(make(tmp_path), 0, 2, 0.2), "a", 1, more_s=0.1)
    assert (caught.value.ranks, caught.value.waited_s) == ([1], pytest.approx(0.3))


def test_a_torch_store_is_found_by_torchs_own_rendezvous():
    pytest.importorskip("torch.distributed")
    meeting = open_meeting("tcp://127.0.0.1:0", 0, 1, 10.0)
    meeting.put("x", [1, 2])
    assert meeting.get("x", 1.0) == [1, 2]


def test_no_store_and_no_address_are_refused():
    with pytest.raises(ConfigError, match="file:///folder"):
        open_meeting("http://somewhere", 0, 2, 1.0)
    pytest.importorskip("torch.distributed")
    with pytest.raises(RendezvousError, match="no Store"):
        open_meeting("tcp://127.0.0.1:1", 1, 2, 1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_is_heard_while_a_store_waits_for_the_ranks_and_while_it_does_not_answer(rank):
    """Torch would wait for as long as it is told to, and hear nothing meanwhile."""
    pytest.importorskip("torch.distributed")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if rank else 0
        arguments = ["--rank", str(rank), "--world-size", "2", "--store", f"tcp://127.0.0.1:{port}", "--wait", "300"]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [*DOCTOR, *arguments], env=without_a_job(), stdout=pipe, stderr=pipe, text=True
        ) as doctor:
            if rank:
                silent.accept()
            else:
                _wait_for_a_listener(doctor)
            doctor.send_signal(signal.SIGINT)
            try:
                said = doctor.communicate(timeout=300)[1]
            finally:
                doctor.kill()
    assert (doctor.returncode, "Traceback" in said) == (130, False), said


def _wait_for_a_listener(process):
    """Until it has a TCP socket that listens: then torch's constructor waits for the others."""
    while process.poll() is None and not _listens(process.pid):
        os.sched_yield()


def _listens(pid):
    own = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(file))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return any(words[3] == "0A" and f"socket:[{words[9]}]" in own for words in lines)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://127.0.0.1:99999", "Port out of range"),
        ("tcp://127.0.0.1:many", "many"),
        ("tcp://127.0.0.1", "port"),
        ("env://", "MASTER_ADDR"),
    ],
)
def test_an_address_that_names_no_place_is_wrong_usage(monkeypatch, address, why):
    pytest.importorskip("torch.distributed")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=f"names no place: .*{why}"):
        open_meeting(address, 1, 2, 1.0)


def test_a_store_that_has_gone_is_told_by_put_and_by_get():
    import torch.distributed as dist

    def gone(*_arguments):
        raise dist.DistNetworkError("gone")

    store = SimpleNamespace(set=gone, wait=gone)
    for use in (lambda meeting: meeting.put("x", 1), lambda meeting: meeting.get("x", 1.0)):
        with pytest.raises(RendezvousError, match="gone"):
            use(StoreMeeting(store))


def enter(tmp_path, ranks):
    """Has processes of these ranks, as it were, come to one folder, and meet there."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        entering = [threads.submit(FolderMeeting.enter, tmp_path, rank, len(ranks), 120.0) for rank in ranks]
        return [each.result() for each in entering]


def until(condition, timeout_s=120.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def leave_killed(tmp_path, rank, *others):
    """What a process leaves that is killed while it waits for the others, having read what these, killed too, have left."""
    tokens = [f"{rank:016x}", *(f"{other:016x}" for other in others)]
    (tmp_path / f"rank-{rank}").write_text(tokens[0])
    (tmp_path / f"met-{tokens[0]}").write_text(str(sorted(tokens)).replace("'", '"'))


def test_ranks_of_a_folder_meet_in_any_order_and_read_each_other(tmp_path):
    meetings = enter(tmp_path, [2, 0, 1])
    meetings[0].put("a/2", 2)
    assert meetings[1].get("a/2", 1.0) == 2
    assert not list(tmp_path.glob("rank-*")), "who comes now is of another run"


def test_two_runs_in_one_folder_read_nothing_of_each_other(tmp_path):
    first, _ = enter(tmp_path, [0, 1])
    first.put("a/0", "first")
    second, other = enter(tmp_path, [0, 1])
    with pytest.raises(RendezvousError, match="not appeared"):
        other.get("a/0", 0.1)
    second.put("a/0", "second")
    assert other.get("a/0", 1.0) == "second"
    second.clear()
    assert first.get("a/0", 1.0) == "first", "the other run is left alone"
    first.clear()
    assert list(tmp_path.iterdir()) == []


def test_who_finds_a_process_of_its_rank_ends_at_once(tmp_path):
    leave_killed(tmp_path, 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"rank-1 is there already.* empty the folder or name another one"):
        FolderMeeting.enter(tmp_path, 1, 2, 30.0)
    assert sorted(tmp_path.iterdir()) == before, "it may be another's that lives"


def test_what_killed_processes_left_is_not_taken_for_a_rank(tmp_path):
    """Not even where it has read what a killed process of this rank had left, and that was removed by hand."""
    leave_killed(tmp_path, 1, 0)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        MissingRankError, match=r"rank 1 has not come .*may have left .*rank-1; empty the folder"
    ) as caught:
        FolderMeeting.enter(tmp_path, 0, 2, 0.2)
    assert (caught.value.ranks, caught.value.waited_s) == ([1], 0.2)
    assert sorted(tmp_path.iterdir()) == before, "and nothing is left of who waited"


def test_a_process_that_is_about_to_say_who_it_is_is_waited_for(tmp_path):
    (tmp_path / "rank-1").write_text("0123")
    with pytest.raises(MissingRankError, match=r"rank 1 has not come within 0.1 s \(.*\)$"):
        FolderMeeting.enter(tmp_path, 0, 2, 0.1)


@pytest.mark.parametrize("stranger", [False, True])
def test_who_waits_in_a_folder_that_is_emptied_says_so(tmp_path, stranger):
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(FolderMeeting.enter, tmp_path, 0, 2, 30.0)
        until(lambda: list(tmp_path.iterdir()))
        partial = tmp_path / "new"
        partial.write_text("f" * 16)
        partial.rename(tmp_path / "rank-0")  # another process of this rank has come, at once
        if not stranger:
            (tmp_path / "rank-0").unlink()
        with pytest.raises(RendezvousError, match="somebody has emptied"):
            waiting.result()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0"] * stranger


def test_a_rank_that_is_interrupted_while_it_waits_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(_seconds):
        assert list(tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(meeting_module.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        FolderMeeting.enter(tmp_path, 0, 2, 30.0)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_no_finding(tmp_path):
    """Its status is none by which a script would take the network for bad."""
    command = [*DOCTOR, *arguments_of(0, 2, tmp_path)]
    with subprocess.Popen(command, env=without_a_job(), stderr=subprocess.PIPE, text=True) as child:
        until(lambda: meeting_module._token(tmp_path / "meeting/rank-0"))
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=300)
    assert (child.returncode, "gradwire: interrupted" in errors) == (130, True), errors
    assert list((tmp_path / "meeting").iterdir()) == []


def test_a_rank_that_was_ended_and_started_again_while_others_wait_is_met(tmp_path):
    with ThreadPoolExecutor(3) as threads:
        entering = [threads.submit(FolderMeeting.enter, tmp_path, 0, 3, 30.0)]
        until(lambda: meeting_module._token(tmp_path / "rank-0"))
        with pytest.raises(MissingRankError, match="rank 2 has not come"):
            FolderMeeting.enter(tmp_path, 1, 3, 0.2)
        entering += [threads.submit(FolderMeeting.enter, tmp_path, rank, 3, 30.0) for rank in (1, 2)]
        for each in entering:
            each.result()


def test_ranks_that_count_differently_do_not_meet(tmp_path):
    with ThreadPoolExecutor(2) as threads:
        entering = [threads.submit(FolderMeeting.enter, tmp_path, 0, 2, 3.0)]
        until(lambda: meeting_module._token(tmp_path / "rank-0"))
        entering.append(threads.submit(FolderMeeting.enter, tmp_path, 1, 3, 0.3))
        for each, missing in zip(entering, (1, 2), strict=True):
            with pytest.raises(MissingRankError, match=f"rank {missing} has not come"):
                each.result()


def test_two_checks_over_one_folder_are_two(tmp_path):
    """The first finds a loss that the second does not have, whose rank 0 comes last."""

    def main():
        with Network(Layout(hosts=2, switch="nft")) as network:
            network.set([1], [], loss=0.3)
            first = run_doctors(network, tmp_path, {})
            left = [path.name for path in (tmp_path / "meeting").iterdir()]
            network.set([1], [], loss=0.0)
            children = [start_doctor(network, 1, arguments_of(1, 2, tmp_path), {})]
            until(lambda: list((tmp_path / "meeting").iterdir()))
            children.insert(0, start_doctor(network, 0, arguments_of(0, 2, tmp_path), {}))
            return first, left, report_of(children)

    first, left, second = in_sandbox(tmp_path, main)
    assert first["statuses"] == [1, 1]
    assert ("loss", 0, 1) in told(first, "problem")
    assert left == []
    assert second["statuses"] == [0, 0], second
    assert told(second, "problem", "warning") == set()
    assert list((tmp_path / "meeting").iterdir()) == []


def test_a_check_after_one_that_was_killed_says_what_to_do(tmp_path):
    meeting = tmp_path / "meeting"

    def main():
        with Network(Layout(hosts=2, switch="nft")) as network:
            killed = start_doctor(network, 1, arguments_of(1, 2, tmp_path), {})
            until((meeting / "rank-1").exists)
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            mixed = [
                start_doctor(network, rank, [*arguments_of(rank, 2, tmp_path), "--wait", "2"], {}) for rank in range(2)
            ]
            outputs = [child.communicate(timeout=300) for child in mixed]
            for path in meeting.iterdir():
                path.unlink()
            return [child.returncode for child in mixed], outputs, run_doctors(network, tmp_path, {})

    statuses, outputs, after = in_sandbox(tmp_path, main)
    assert statuses == [3, 2], outputs
    assert "rank 1 has not come" in outputs[0][1]
    assert "rank-1 is there already" in outputs[1][1]
    assert "empty the folder or name another one" in outputs[1][1]
    assert after["statuses"] == [0, 0], after


def test_of_a_rank_that_does_not_come_to_a_store_it_is_told_why_it_may_be_there_all_the_same():
    place = Place(open_meeting("tcp://127.0.0.1:0", 0, 1, 10.0), 0, 2, 0.1)
    with pytest.raises(MissingRankError, match=r"rank 1 has not come .*tcp_mtu_probing"):
        everybody(place, "host", True)
