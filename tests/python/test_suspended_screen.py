"""A screen that Ctrl-Z stops leaves the terminal to the shell, and comes back with `fg`."""

import os
import pty
import signal
import subprocess
import sys

SCREEN = """
import os
os.setpgrp()  # as a shell starts it, beside its parent's group, or nothing would stop it
from rich.console import Console
from rich.live import Live
from gradwire.cli.suspending import suspends
live = Live("what is drawn", console=Console(force_terminal=True), screen=True, auto_refresh=False)
with suspends(live), live:
    input()
print("ended")
"""
BEGINS, ENDS, SHOWS_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


def read_until(terminal, text):
    said = b""
    while text not in said:
        said += os.read(terminal, 1 << 12)
    return said


def test_ctrl_z_gives_the_terminal_back_and_the_screen_returns_when_it_goes_on():
    terminal, of_child = pty.openpty()
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", SCREEN],
            stdin=of_child,
            stdout=of_child,
        )
        try:
            for _ in range(2):
                assert BEGINS in read_until(terminal, b"what is drawn")
                child.send_signal(signal.SIGTSTP)
                _, status = os.waitpid(child.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status)
                assert ENDS in read_until(terminal, SHOWS_CURSOR)
                child.send_signal(signal.SIGCONT)
            assert BEGINS in read_until(terminal, b"what is drawn")
            os.write(terminal, b"\n")
            assert ENDS in read_until(terminal, b"ended")
            assert child.wait(60) == 0
        finally:
            child.kill()
            child.wait()
    finally:
        os.close(of_child)
        os.close(terminal)
