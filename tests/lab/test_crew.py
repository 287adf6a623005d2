"""Crews of workers over loopback: each rank knows who it is, and none is left behind."""

import os
import sys

import pytest
from gradwire.lab import crew as crews
from gradwire.lab.crew import LoopbackCrew, WorkerFailed

ANSWERS = """
import os
from gradwire.lab import crew

class Worker:
    def __init__(self, say):
        self.say = say

    def obey(self, order):
        self.say({"pid": os.getpid(), **{name: os.environ[name] for name in order["names"]}})

    def close(self):
        pass

crew.serve(Worker)
"""
FAILS = """
import os, sys
sys.exit("rank 1 does not like it here") if os.environ["RANK"] == "1" else sys.stdin.read()
"""

STAYS = """
import os, sys
print("nobody hears me any more", file=sys.stderr, flush=True)
os.close(1)
sys.stdin.read()
"""


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_ranks_of_a_loopback_crew_can_meet_and_have_left_at_its_end(tmp_path):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MINE"]
    with LoopbackCrew([sys.executable, "-c", ANSWERS], 3, {"MINE": "yes"}, tmp_path) as crew:
        answers = [answer[-1] for answer in crew.order({"names": names}, "RANK")]
    assert [answer["RANK"] for answer in answers] == [answer["LOCAL_RANK"] for answer in answers] == ["0", "1", "2"]
    assert len({answer["MASTER_PORT"] for answer in answers}) == 1
    assert {(answer["WORLD_SIZE"], answer["MASTER_ADDR"], answer["MINE"]) for answer in answers} == {
        ("3", "127.0.0.1", "yes")
    }
    assert all(is_gone(answer["pid"]) for answer in answers)


LOWERED = """
import os, resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, most))
"""


def test_a_worker_may_have_as_many_connections_as_the_system_lets_it(tmp_path):
    """Groups for every variant and condition are more than the soft limit that systems set."""
    tells = ANSWERS.replace("os.getpid()", "[*resource.getrlimit(resource.RLIMIT_NOFILE)]")
    with LoopbackCrew([sys.executable, "-c", LOWERED + tells], 1, {}, tmp_path) as crew:
        soft, hard = crew.order({"names": []}, "pid")[0][-1]["pid"]
    assert soft == hard


@pytest.mark.parametrize(("setting", "expected"), [(None, "0"), ("1", "1")])
def test_workers_leave_no_status_sockets_unless_they_are_asked_for(tmp_path, monkeypatch, setting, expected):
    name = "GRADWIRE_STATUS_SOCKET"
    monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv(name, setting)
    with LoopbackCrew([sys.executable, "-c", ANSWERS], 1, {}, tmp_path) as crew:
        assert crew.order({"names": [name]}, name)[0][-1][name] == expected


def test_a_worker_that_cannot_start_is_named_and_the_others_end(tmp_path):
    crew = LoopbackCrew([sys.executable, "-c", FAILS], 2, {}, tmp_path)
    with pytest.raises(WorkerFailed, match=r"(?s)worker 1 ended with status 1.*does not like it here"):
        crew.__enter__()
    assert all(child.returncode is not None for child in crew._children)


def test_a_worker_that_answers_no_more_but_stays_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(crews, "END_SECONDS", 0.1)
    crew = LoopbackCrew([sys.executable, "-c", STAYS], 1, {}, tmp_path)
    with pytest.raises(WorkerFailed, match=r"(?s)worker 0 has closed its .* still running.*nobody hears me any more"):
        crew.__enter__()
    assert crew._children[0].returncode is not None
