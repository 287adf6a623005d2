"""What the doctor says of the processor time that a job gets: from files as the kernel writes them, and in a control group with a limit."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.doctor import processor
from gradwire.doctor.processor import Limit, Processor, limit_of


def on_eight(**changes):
    return Processor(**{"cores": 8, "host_cores": 8, **changes})


BUSY_IN_A_GROUP = """
import os, pathlib, sys, time
group = pathlib.Path(sys.argv[1])
(group / "cgroup.procs").write_text(str(os.getpid()))
end = time.monotonic() + 60
def was_stopped():
    words = (group / "cpu.stat").read_text().split()
    counts = dict(zip(words[::2], map(int, words[1::2])))
    return counts["nr_periods"] >= 150 and counts["nr_throttled"] > 0
while not was_stopped() and time.monotonic() < end:
    sum(range(10_000))
os.execv(sys.executable, [sys.executable, "-c", "from gradwire.cli import main; main()", "doctor", "--json"])
"""


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (on_eight(), 0),
        (on_eight(limit=Limit(7.5, 0.1, 900, 8)), 1),
        (on_eight(limit=Limit(7.5, 0.1, 0, 0)), 1),
        (on_eight(ranks=8), 0),
        (on_eight(ranks=9), 1),
        # Each bound to two cores of its own.
        (on_eight(cores=2, ranks=4), 0),
        (on_eight(stolen_share=0.049), 0),
        (on_eight(stolen_share=0.05), 1),
    ],
)
def test_what_takes_processor_time_away_is_judged(facts, expected):
    found = processor.judge(facts, 3)
    assert [finding.level for finding in found] == ["warning"] * expected
    assert all(finding.fix and finding.rank == 3 and finding.check == "processor" for finding in found)


def test_a_limit_is_told_with_its_numbers():
    (found,) = processor.judge(on_eight(limit=Limit(2.0, 0.1, 1000, 250)), 0)
    assert "2 of 8 cores" in found.text
    assert "up to 100 ms" in found.text
    assert "250 of 1000 periods (25%)" in found.text


def limit_in(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("FOLDER", str(folder)))
    return limit_of(folder / "own", folder / "mounts", 8)


TWO = "30 23 0:26 / FOLDER/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
ONE = "31 23 0:27 / FOLDER/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
STAT = "usage_usec 5\nnr_periods 40\nnr_throttled 3\nthrottled_usec 9\n"


def version_1(group, share_us):
    return {f"{group}/cpu.cfs_quota_us": f"{share_us}\n", f"{group}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, None),
        ({"own": "0::/\n"}, None),
        ({"own": "0::/\n", "mounts": "nonsense\n"}, None),
        ({"own": "nonsense\n", "mounts": TWO, "cgroup/cpu.max": "1 2\n"}, None),
        ({"own": "0::/job\n", "mounts": TWO, "cgroup/job/cpu.max": "max 100000\n"}, None),
        ({"own": "0::/job\n", "mounts": TWO, "cgroup/job/cpu.max": "nonsense"}, None),
        (
            {"own": "0::/\n", "mounts": TWO, "cgroup/cpu.max": "150000 100000\n", "cgroup/cpu.stat": STAT},
            Limit(1.5, 0.1, 40, 3),
        ),
        (
            {
                "own": "0::/pod/job\n",
                "mounts": TWO,
                "cgroup/pod/cpu.max": "50000 20000\n",
                "cgroup/pod/job/cpu.max": "max 100000\n",
                "cgroup/cpu.max": "400000 100000\n",
            },
            Limit(2.5, 0.02, 0, 0),
        ),
        # A limit that the process cannot reach by itself, and that nobody has reached.
        ({"own": "0::/\n", "mounts": TWO, "cgroup/cpu.max": "800000 100000\n"}, None),
        # A group that is mounted here is another one's.
        ({"own": "1:cpu,cpuacct:/a\n", "mounts": ONE.replace(" / ", " /b "), **version_1("cpu,cpuacct", 50_000)}, None),
        (
            {"own": "0::/\n", "mounts": TWO.replace("/cgroup ", "/c\\040g "), "c g/cpu.max": "50000 100000\n"},
            Limit(0.5, 0.1, 0, 0),
        ),
        # What stops the job is the wider limit, which others share.
        (
            {
                "own": "0::/pod/job\n",
                "mounts": TWO,
                "cgroup/pod/cpu.max": "800000 100000\n",
                "cgroup/pod/cpu.stat": STAT,
                "cgroup/pod/job/cpu.max": "400000 100000\n",
            },
            Limit(8.0, 0.1, 40, 3),
        ),
        (
            {
                "own": "4:memory:/m\n3:cpu,cpuacct:/pod\n0::/\n",
                "mounts": TWO + ONE,
                **version_1("cpu,cpuacct/pod", 300_000),
                "cpu,cpuacct/pod/cpu.stat": "nr_periods 7\nnr_throttled 0\nthrottled_time 12\n",
                **version_1("cpu,cpuacct", -1),
            },
            Limit(3.0, 0.1, 7, 0),
        ),
        # A container that sees its own group as the outermost: the path is the host's, and the mount says from where on.
        (
            {
                "own": "1:cpuacct,cpu:/docker/0123/job\n",
                "mounts": ONE.replace(" / ", " /docker/0123 "),
                **version_1("cpu,cpuacct", 800_000),
                **version_1("cpu,cpuacct/job", 50_000),
            },
            Limit(0.5, 0.1, 0, 0),
        ),
        # One in a control group namespace: the mount's root is outside of what it may see.
        (
            {"own": "1:cpu,cpuacct:/\n", "mounts": ONE.replace(" / ", " /.. "), **version_1("cpu,cpuacct", 50_000)},
            Limit(0.5, 0.1, 0, 0),
        ),
    ],
)
def test_the_limits_around_a_process_are_found_in_both_versions(tmp_path, texts, expected):
    assert limit_in(tmp_path, texts) == expected


@pytest.mark.parametrize(
    ("text", "share"),
    [("cpu  10 0 20 50 0 0 0 20 7 0\ncpu0 1 1\n", 0.2), ("cpu  1 2 3\n", 0.0), ("", 0.0)],
)
def test_stolen_time_is_the_eighth_of_the_kernels_times(tmp_path, text, share):
    (tmp_path / "stat").write_text(text)
    assert processor._stolen_share(tmp_path / "stat") == share


@pytest.fixture
def half_a_core():
    """A control group with half a core in periods of 10 ms, in whichever version this machine has.

    Its weight is the largest: on a busy machine a group of the usual one would get less than the half core, and never be stopped.
    """
    version_1 = {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "5000", "cpu.shares": "262144"}
    for controllers, settings in (
        (Path("/sys/fs/cgroup/cpu"), version_1),
        (Path("/sys/fs/cgroup"), {"cpu.max": "5000 10000", "cpu.weight": "10000"}),
    ):
        group = controllers / f"gradwire-doctor-{os.getpid()}"
        if made(group, settings):
            try:
                yield group
            finally:
                group.rmdir()
            return
    pytest.skip("no control group can be made here")


def made(group, settings):
    """Whether the kernel has made a group with these settings; a folder in which it makes no files is none."""
    with contextlib.suppress(OSError):
        group.mkdir()
        try:
            if all((group / name).exists() for name in settings):
                for name, value in settings.items():
                    (group / name).write_text(value)
                return True
        except OSError:
            pass
        group.rmdir()
    return False


def test_a_container_that_was_stopped_for_its_limit_is_told(half_a_core):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "LOCAL"))}
    done = subprocess.run(
        [sys.executable, "-c", BUSY_IN_A_GROUP, str(half_a_core)],
        env={**environment, "GRADWIRE_PORT": "0"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == int(report["training_would_suffer"])
    limit = report["hosts"][0]["processor"]["limit"]
    assert (limit["cores"], limit["period_s"]) == (0.5, 0.01)
    assert limit["periods"] >= 150
    assert 0 < limit["stopped"] <= limit["periods"]
    (found,) = [finding for finding in report["findings"] if "container" in finding["text"]]
    assert (found["check"], found["level"]) == ("processor", "warning")
    assert f"in {limit['stopped']} of {limit['periods']} periods" in found["text"]
