"""Ports that the kernel may give to other programs, and the line that keeps them for the job."""

import dataclasses
from pathlib import Path

import pytest
from doctors import GOOD
from gradwire._launcher import candidate_ports
from gradwire.config import Config
from gradwire.doctor import host, reserved
from gradwire.doctor.host import HostFacts
from gradwire.doctor.reserved import Choice
from gradwire.doctor.threads import Threads

USUAL = (32768, 60999)
LINE = "sysctl -w net.ipv4.ip_local_reserved_ports="


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("32768\t60999\n", "\n"), Choice(USUAL, "")),
        (("32768\t60999\n", "8080,47400-47655\n"), Choice(USUAL, "8080,47400-47655")),
        (("nonsense", ""), Choice()),
        (("32768 60999", None), Choice()),
        ((None, ""), Choice()),
    ],
)
def test_what_the_kernel_says_is_read(tmp_path, texts, expected):
    for name, text in zip(("ip_local_port_range", "ip_local_reserved_ports"), texts, strict=True):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert reserved.examine(tmp_path) == expected


@pytest.mark.parametrize(
    ("choice", "ports", "given", "line"),
    [
        (Choice(USUAL), [47400, 47464], "47400, 47464", "47400-47655"),
        (Choice(USUAL, "47400-47463"), [47400, 47464], "47464", "47400-47463,47400-47655"),
        (Choice(USUAL, "8080"), [47400], "47400", "8080,47400-47655"),
        (Choice(USUAL), [47400 + 64 * number for number in range(8)], "47400, 47464, ", "47400-47911"),
        (Choice((40000, 65535)), [65500], "65500", "65500-65535"),
    ],
)
def test_ports_that_any_program_may_get_are_noted_with_the_line_that_keeps_them(choice, ports, given, line):
    [found] = reserved.judge(choice, ports, 3)
    assert (found.level, found.rank) == ("note", 3)
    assert f"UDP port {given}" in found.text
    assert found.text.endswith(LINE + line)
    assert found.fix == LINE + line


@pytest.mark.parametrize(
    ("choice", "ports"),
    [
        (Choice(), [47400]),
        (Choice((50000, 60999)), [47400, 47464]),
        (Choice(USUAL, "8080,47400-47655"), [47400, 47464]),
        (Choice(USUAL, "47400,47464"), [47400, 47464]),
    ],
)
def test_ports_that_no_other_program_gets_unasked_are_not_told(choice, ports):
    assert reserved.judge(choice, ports, 0) == []


def test_the_ports_of_all_ranks_of_the_host_are_kept(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "5")
    [found] = reserved.judge(Choice(USUAL), [47405], 13)
    assert found.fix == LINE + "47400-47655"


def test_a_host_says_so_of_ports_that_are_the_same_at_each_start():
    facts = HostFacts("a", "6.1", 47400, GOOD, threads=Threads([47400, 47464, 50000]), port_choice=Choice(USUAL))
    told = [finding for finding in host.judge(facts) if finding.check == "reserved"]
    assert len(told) == 1
    assert "UDP port 47400, 47464 may" in told[0].text
    any_port = dataclasses.replace(facts, threads=Threads([40000], is_fixed=False))
    assert not [finding for finding in host.judge(any_port) if finding.check == "reserved"]


@pytest.mark.parametrize(
    ("reserved_now", "given", "line"),
    [
        ("", "47400, 47402, 47466", "47400-47655"),
        ("47402-47657", "47400", "47402-47657,47400-47655"),
    ],
)
def test_where_the_first_port_is_taken_the_ports_are_those_that_ranks_try_from_it_on(reserved_now, given, line):
    """Without a launcher: two processes have 47400 and 47401 now."""
    assert candidate_ports(None)[0] == 47400
    choice, threads = Choice(USUAL, reserved_now), Threads([47402, 47466])
    facts = HostFacts("a", "6.1", 47402, GOOD, threads=threads, port_choice=choice)
    [found] = [finding for finding in host.judge(facts) if finding.check == "reserved"]
    assert f"UDP port {given} may" in found.text
    assert found.fix == LINE + line


def test_what_the_kernel_has_is_among_the_facts():
    choice = host.examine(Config(port=0, interface="lo")).port_choice
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    assert choice.range == (tuple(map(int, range_file.read_text().split())) if range_file.exists() else None)
