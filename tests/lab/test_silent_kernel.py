"""Who builds a network waits for nothing without a limit: a program that does not end, or a kernel that does not answer, is told."""

import os
import subprocess

import pytest
from gradwire.lab import LabError, iproute, loss_filter
from gradwire.lab.loss_filter import LossFilter
from sandboxed import in_sandbox

LIMIT_S = 0.2


def test_a_program_that_does_not_end_is_killed_and_told(tmp_path, monkeypatch):
    (tmp_path / "ip").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setattr(iproute, "_PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(iproute, "_ENDING_S", LIMIT_S)
    with pytest.raises(LabError, match=r"^ip has not ended for 0\.4 s, and was killed"):
        iproute.ip("link set lo up")


def test_a_program_that_was_stopped_with_who_waits_for_it_has_its_time_again(tmp_path, monkeypatch):
    """As Ctrl-Z does it: the clock goes on meanwhile."""
    lines, goes_on = tmp_path / "lines", tmp_path / "goes-on"
    os.mkfifo(goes_on)
    (tmp_path / "ip").write_text(f"#!/bin/sh\nread nothing < {goes_on}\ncat > {lines}\n")
    (tmp_path / "ip").chmod(0o755)
    communicate = subprocess.Popen.communicate

    def communicate_and_let_go_on(*arguments, **options):
        try:
            return communicate(*arguments, **options)
        except subprocess.TimeoutExpired:
            monkeypatch.undo()
            goes_on.write_text("\n")
            raise

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_and_let_go_on)
    monkeypatch.setattr(iproute, "_PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(iproute, "_ENDING_S", LIMIT_S)
    iproute.ip("link set lo up")
    assert lines.read_text() == "link set lo up"


def test_a_verdict_that_the_kernel_does_not_give_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_filter, "_ANSWER_S", LIMIT_S)

    def main():
        kernel = LossFilter()
        monkeypatch.setattr(loss_filter, "_ACKNOWLEDGE", 0)  # nothing is said of what goes well
        try:
            kernel.set_loss(0.5)
        except LabError as error:
            return str(error)

    assert in_sandbox(tmp_path, main).startswith("the kernel's packet filter has not answered for 0.2 s")
