"""How a check of several ranks ends: rank 0 shows the report before another rank ends, and what it has where one did not come."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from doctors import DOCTOR, GOOD, arguments_of, start_doctor, without_a_job
from gradwire.cli import doctor as command_module
from gradwire.cli import main as gradwire_command
from gradwire.config import Config
from gradwire.doctor import parting
from gradwire.doctor.book import Book, Report
from gradwire.doctor.check import Options, check_all
from gradwire.doctor.findings import PROBLEM, Finding
from gradwire.doctor.meeting import Place
from gradwire.doctor.pairs import PairFacts
from gradwire.errors import MissingRankError, RendezvousError
from gradwire.lab import iproute
from sandboxed import in_sandbox
from test_doctor_ipv6 import Hosts, without_ipv6

RANKS = 3


class Gone(Exception):
    """Ends a rank as if it were killed."""


class Board:
    """What ranks of one process say, and which rank has read what.

    `tells_who_has_gone`: what comes no more is told at once, as by a Store that has ended; else only the wait for it ends.
    """

    doubt = ""

    def __init__(self, *, tells_who_has_gone=True):
        self._tells_who_has_gone = tells_who_has_gone
        self.said, self.gone, self.changed = {}, set(), threading.Condition()
        self.events, self.cleared = [], False

    def put(self, rank, key, value):
        with self.changed:
            self.said[key] = json.dumps(value)
            self.events.append(("put", rank, key))
            self.changed.notify_all()

    def get(self, rank, key, timeout_s):
        with self.changed:
            owner = key.rpartition("/")[2] if "/" in key else "0"
            is_known = self.changed.wait_for(lambda: key in self.said or int(owner) in self.gone, timeout_s)
            if not is_known or key not in self.said:
                raise RendezvousError(f"{key} does not come")
            self.events.append(("get", rank, key))
            return json.loads(self.said[key])

    def leave(self, rank, event):
        with self.changed:
            if self._tells_who_has_gone:
                self.gone.add(rank)
            self.events.append((event, rank, ""))
            self.changed.notify_all()

    def read_by(self, rank):
        return {key for event, reader, key in self.events if (event, reader) == ("get", rank)}


class Seat:
    """The board as one rank has it; `dies_at`: what the rank is about to say when it is killed, or when that fails, once."""

    doubt = ""

    def __init__(self, board, rank, dies_at=None, error=Gone):
        self._board, self._rank, self._dies_at, self._error = board, rank, dies_at, error

    def put(self, key, value):
        if key == self._dies_at:
            self._dies_at = None
            raise self._error
        self._board.put(self._rank, key, value)

    def get(self, key, timeout_s):
        return self._board.get(self._rank, key, timeout_s)

    def clear(self):
        self._board.cleared = True


def at(board, rank, dies_at=None, timeout_s=120.0, error=Gone):
    return Place(Seat(board, rank, dies_at, error), rank, RANKS, timeout_s)


def checked(dies_at=None, by=Gone, *, tells_who_has_gone=True):
    """Runs a whole check of ranks of this process, of which the last one may die: the board, the report, and how each ended."""
    board, reports = Board(tells_who_has_gone=tells_who_has_gone), []

    def show(report):
        reports.append(report.described())
        board.events.append(("shown", 0, ""))

    def run(rank):
        place = at(board, rank, dies_at if rank == RANKS - 1 else None, error=by)
        try:
            ended = check_all(Config(interface="lo"), place, Options(packets=100), lambda _text: None, show)
        except (Gone, RendezvousError, OSError) as error:
            ended = f"{type(error).__name__}: {error}"
        board.leave(rank, "ended")
        return ended

    iproute.ip("link set lo up")
    with ThreadPoolExecutor(RANKS) as threads:
        return board, reports, list(threads.map(run, range(RANKS)))


def names(keys):
    return {key.split("/")[0].split("-")[0] for key in keys}


def test_rank_0_alone_reads_what_was_measured_and_shows_it_before_another_rank_ends(tmp_path):
    def main():
        board, reports, ended = checked()
        events = [event for event, _, _ in board.events if event in ("shown", "ended")]
        return [sorted(names(board.read_by(rank))) for rank in range(RANKS)], reports, ended, events, board.cleared

    read, [report], ended, events, is_cleared = in_sandbox(tmp_path, main)
    assert set(read[0]) == {"host", "facts", "about", "ready", "round", "measured", "tested", "seen", "done"}
    assert read[1] == read[2] == sorted({"host", "ready", "round", "verdict", "told"})
    assert (ended, events, is_cleared) == ([False] * RANKS, ["shown", *["ended"] * RANKS], True)
    assert [(pair["rank"], pair["peer"]) for pair in report["pairs"]] == [
        (r, (r + s) % 3) for r in range(3) for s in (1, 2)
    ]
    assert (report["training_would_suffer"], report["incomplete"]) == (False, None)
    assert len({host["port"] for host in report["hosts"]}) == RANKS
    assert all("clock" in host and "counters_after" in host for host in report["hosts"])


@pytest.mark.parametrize(
    ("dies_at", "rounds", "missing"),
    [("measured-1/2", 0, "(measured-1)"), ("round-1/2", 1, "(round-1)"), ("tested/2", 2, "(tested)")],
)
def test_what_was_measured_before_a_rank_died_is_shown(tmp_path, dies_at, rounds, missing):
    def main():
        board, reports, ended = checked(dies_at)
        events = [(event, rank) for event, rank, _ in board.events if event in ("shown", "ended")]
        return reports, ended, events

    [report], ended, events = in_sandbox(tmp_path, main)
    assert len(report["pairs"]) == RANKS * rounds
    assert len(report["hosts"]) == RANKS
    assert "rank 2 has not come" in report["incomplete"]
    assert missing in report["incomplete"]
    assert report["training_would_suffer"] is None
    assert {finding["rank"] for finding in report["findings"]} == {0, 1, 2}, "notes on interfaces at least"
    assert ended[0].startswith("MissingRankError: rank 2 has not come")
    assert "rank 2 has not come" in ended[1], "rank 0 says so where it alone waits for it"
    assert ended[2].startswith("Gone")
    assert events.index(["shown", 0]) < events.index(["ended", 1])


@pytest.mark.parametrize(
    ("fails_at", "where", "rounds"),
    [("measured-2/2", "measured-2", 1), ("round-1/2", "round-1", 1), ("tested/2", "tested", 2)],
)
def test_a_rank_that_fails_by_itself_ends_once_rank_0_has_shown_what_there_is(tmp_path, fails_at, where, rounds):
    """Where rank 0 learns of it by nothing but what that rank says, and by its own long wait."""

    def main():
        board, reports, ended = checked(fails_at, OSError(24, "Too many open files"), tells_who_has_gone=False)
        events = [(event, rank) for event, rank, _ in board.events if event in ("shown", "ended")]
        return reports, ended, events

    [report], ended, events = in_sandbox(tmp_path, main)
    assert report["incomplete"] == f"rank 2 gave up ({where}): [Errno 24] Too many open files"
    assert len(report["pairs"]) == RANKS * rounds
    assert (ended[0], ended[2]) == (
        f"MissingRankError: {report['incomplete']}",
        "OSError: [Errno 24] Too many open files",
    )
    assert events[0] == ["shown", 0]


def test_a_rank_that_gives_up_waits_as_long_for_the_report_as_rank_0_may_wait_itself():
    class Waited(Seat):
        def get(self, key, timeout_s):
            waits.append((key, timeout_s))
            return super().get(key, 0.0)

    waits, board = [], Board(tells_who_has_gone=False)
    place = Place(Waited(board, 2), 2, RANKS, 120.0)
    parting.give_up(place, OSError("x"), lambda: None, due=["round-1"], more_s=30.0)
    assert waits == [("told", 150.0 + parting._SHOWING_S)]
    assert json.loads(board.said["round-1/2"]) == {"given up": "x"}


def test_rank_0_reads_what_was_measured_before_anybody_goes_on(tmp_path):
    """What it reads while another rank asks it makes its ways look slow: who asks it in this round has ended, and no round has begun."""

    def main():
        board, _, _ = checked()
        return [[event, rank, key] for event, rank, key in board.events]

    events = in_sandbox(tmp_path, main)
    for step in range(1, RANKS):
        asks = RANKS - step
        read = [
            at
            for at, (event, rank, key) in enumerate(events)
            if (event, rank) == ("get", 0) and f"measured-{step}/" in key
        ]
        assert events[read[0]] == ["get", 0, f"measured-{step}/{asks}"]
        assert max(read) < events.index(["put", 0, f"round-{step}/0"])


def test_nothing_is_shown_of_a_check_that_has_not_begun(tmp_path):
    def main():
        _, reports, ended = checked("host/2")
        return reports, ended

    reports, ended = in_sandbox(tmp_path, main)
    assert reports == []
    assert all(each.startswith("MissingRankError: rank 2 has not come") for each in ended[:2])


def test_of_who_does_not_answer_in_a_check_that_did_not_end_no_direction_is_told():
    """Whom a rank has heard it says at the end."""
    host = {"features": GOOD, "port": 47400, "interfaces": [], "boot": "", "threads": {"ports": [47400, 47464]}}
    other = {**host, "features": {**GOOD, "boot_id": "b", "addresses": ["10.0.0.2"]}}
    book = Book([host, other], [PairFacts(0, 1).described(), PairFacts(1, 0, "10.0.0.1", threads=(False,)).described()])
    report = book.part("rank 1 has gone")
    [found] = report.findings
    assert (found.level, found.check, found.rank, found.peer) == ("problem", "reachability", 0, 1)
    assert "no answer from UDP port 47400 of 10.0.0.2; whether anything arrives there is not known" in found.text
    assert report.suffers


def test_a_rank_that_has_the_verdict_ends_with_it_where_rank_0_has_gone():
    board = Board()
    board.put(0, "verdict", True)
    board.leave(0, "killed")
    assert parting.verdict(at(board, 1)) is True


def test_a_rank_does_not_wait_for_ever_until_rank_0_has_shown_the_report(monkeypatch):
    monkeypatch.setattr(parting, "_SHOWING_S", 0.05)
    board = Board()
    board.put(0, "verdict", True)
    assert parting.verdict(at(board, 1)) is True


def test_a_rank_0_that_says_nothing_is_named(monkeypatch):
    monkeypatch.setattr(parting, "_JUDGING_S", 0.05)
    with pytest.raises(MissingRankError, match="rank 0 has not said") as caught:
        parting.verdict(at(Board(), 1, timeout_s=0.0))
    assert caught.value.ranks == [0]


def test_a_verdict_that_there_is_none_is_an_error_with_rank_0s_words():
    board = Board()
    board.put(0, "verdict", "rank 2 has not come")
    with pytest.raises(RendezvousError, match="rank 2 has not come"):
        parting.verdict(at(board, 1))


@pytest.mark.parametrize("failed", [KeyboardInterrupt, OSError])
def test_a_rank_0_that_cannot_show_the_report_lets_the_others_go(failed):
    def show():
        raise failed

    board = Board()
    with pytest.raises(failed):
        parting.conclude(at(board, 0), show, is_suffering=True)
    with pytest.raises(failed):
        parting.give_up(at(board, 0), RendezvousError("x"), show, due=[], more_s=0.0)
    assert (json.loads(board.said["told"]), board.cleared) == (True, False)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_check_that_did_not_end_is_printed_and_has_status_3(monkeypatch, as_json):
    def check(_config, _place, _options, _tell, show):
        show(Report([], [], [Finding(PROBLEM, "loss", "lost", "cables", 0, 1)], "rank 2 has not come"))
        raise MissingRankError("rank 2 has not come", ranks=[2], waited_s=1.0)

    monkeypatch.setattr(command_module, "check_all", check)
    monkeypatch.setattr(command_module, "open_meeting", lambda *_arguments: None)
    arguments = ["doctor", "--rank", "0", "--world-size", "3", *(["--json"] if as_json else [])]
    result = CliRunner().invoke(gradwire_command, arguments)
    assert result.exit_code == 3
    if as_json:
        report = json.loads(result.stdout)
        assert (report["incomplete"], report["training_would_suffer"]) == ("rank 2 has not come", True)
    else:
        assert "problem: rank 0 to 1: loss: lost" in result.stdout
        assert "the check did not end, so this is not all: rank 2 has not come" in result.stdout
    assert "rank 2 has not come" in result.stderr


def test_output_that_cannot_be_written_is_status_2_and_holds_nobody_up(tmp_path):
    def main():
        hosts = Hosts(hosts=1, links=0)
        without_ipv6(hosts)
        with open("/dev/full", "w") as full:
            command = [*DOCTOR, *arguments_of(0, 2, tmp_path, 100)]
            first = hosts.spawn(0, command, env=without_a_job(), stdout=full, stderr=subprocess.PIPE, text=True)
            second = start_doctor(hosts, 0, arguments_of(1, 2, tmp_path, 100), {})
            return [child.communicate(timeout=300)[1] for child in (first, second)], first.returncode, second.returncode

    errors, *statuses = in_sandbox(tmp_path, main)
    assert statuses == [2, 0], errors
    assert "cannot be written" in errors[0]


# How long rank 0 takes to print what hundreds of ranks have found, and no wait for anything.
SLOW = """
import time
from gradwire.cli import doctor, main
lines = doctor._lines
def slow(report):
    time.sleep(3)
    return lines(report)
doctor._lines = slow
main()
"""


def under_torchrun(folder, script, *options, **environment):
    """Output, errors and status of torchrun with two ranks on a host without links, each of which runs `script` as `gradwire doctor`."""
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    pipe = subprocess.PIPE

    def main():
        hosts = Hosts(hosts=1, links=0)
        without_ipv6(hosts)
        command = [*torchrun, sys.executable, "-c", script, "doctor", *options]
        child = hosts.spawn(0, command, env={**without_a_job(), **environment}, stdout=pipe, stderr=pipe, text=True)
        return [*child.communicate(timeout=300), child.returncode]

    return in_sandbox(folder, main)


def test_torchrun_ends_no_rank_0_that_has_not_printed_what_is_wrong(tmp_path):
    """The other rank ends with 1, upon which torchrun ends all."""
    output, errors, status = under_torchrun(tmp_path, SLOW, GRADWIRE_INTERFACE="none-such")
    assert status != 0
    assert "problem: rank 1: engine: gradwire cannot start here" in output, errors
    assert "training would suffer" in output


# Rank 1 kills itself once it has ended the first round.
KILLED = """
import os, signal, sys
from gradwire.cli import main
from gradwire.doctor import check
said = check.say
def say(place, key, value):
    if place.rank == 1 and key == "tested":
        os.kill(os.getpid(), signal.SIGKILL)
    said(place, key, value)
check.say = say
main()
"""


def test_torchrun_that_ends_rank_0_as_another_rank_has_died_gets_what_was_measured(tmp_path):
    output, errors, status = under_torchrun(tmp_path, KILLED, "--json", "--packets", "100", "--wait", "600")
    assert status != 0
    assert output, errors
    report = json.loads(output)
    assert "SIGTERM" in report["incomplete"]
    assert "gradwire doctor: rank 0 was ended by SIGTERM" in errors, "it has ended by itself"
    assert [(pair["rank"], pair["peer"]) for pair in report["pairs"]] == [(0, 1), (1, 0)]


@pytest.mark.parametrize("at", ["measured", "verdict", "shown", "told"])
def test_a_rank_0_that_is_terminated_shows_one_report_and_ends_with_143(at):
    """While it measures, before it shows the whole report, while it shows it and after."""
    script = f"""
import os, signal, threading
from gradwire.cli import doctor, main
from gradwire.doctor import parting
from gradwire.doctor.book import Report
from gradwire.doctor.check import _Check
from gradwire.doctor.findings import PROBLEM, Finding
at = {at!r}
def come(event):
    if event == at:
        os.kill(os.getpid(), signal.SIGTERM)
class Meeting:
    doubt = ""
    def put(self, key, value):
        come(key)
    def get(self, key, timeout_s):
        return True
    def clear(self):
        pass
found = Report([], [], [Finding(PROBLEM, "loss", "lost", "cables", 0, 1)])
def run(check, *_):
    check.book.hosts = [{{}}]
    check.book.part = lambda missing: Report([], [], found.findings, missing)
    come("measured")
    return found
lines = doctor._lines
def told(report):
    come("shown")
    return lines(report)
doctor._lines = told
_Check._run = run
doctor.open_meeting = lambda *_: Meeting()
main()
"""
    command = [sys.executable, "-c", script, "doctor", "--rank", "0", "--world-size", "2"]
    done = subprocess.run(command, env=without_a_job(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 143, done.stderr
    assert done.stdout.count("problem: rank 0 to 1: loss: lost") == 1, done.stderr
    assert ("SIGTERM" in done.stdout) == (at == "measured")
    assert "SIGTERM" in done.stderr


def test_ctrl_c_is_heard_while_rank_0_is_waited_for(tmp_path):
    """Rank 0 says what all end with, and then nothing more."""
    script = f"""
from gradwire.cli import doctor, main
from gradwire.doctor import parting
from gradwire.doctor.meeting import FolderMeeting, Place
from pathlib import Path
meeting = FolderMeeting(Path({str(tmp_path)!r}), "run")
meeting.put("verdict", True)
def check(*_arguments):
    return parting.verdict(Place(meeting, 1, 2, 300.0))
doctor.check_all = check
doctor.open_meeting = lambda *_arguments: meeting
main()
"""
    command = [sys.executable, "-c", script, "doctor", "--rank", "1", "--world-size", "2"]
    with subprocess.Popen(command, env=without_a_job(), stderr=subprocess.PIPE, text=True) as child:
        seen = tmp_path / "run-seen-1"
        while child.poll() is None and not seen.exists():
            os.sched_yield()
        child.send_signal(signal.SIGINT)
        errors = child.communicate(timeout=300)[1]
    assert (child.returncode, "gradwire: interrupted" in errors) == (130, True), errors
