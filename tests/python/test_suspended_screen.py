"""A screen that Ctrl-Z stops leaves the terminal to the shell, and comes back with `fg`."""

import os
import pty
import select
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
IN_RICH = """
import os, signal, threading
from gradwire.cli.suspending import around_stops
os.setpgrp()
said, stopped = [], threading.Event()
rich = {"__name__": "rich.console", "signal": signal, "said": said}
exec("def draw():\\n    signal.raise_signal(signal.SIGTSTP)\\n    said.append('drawn')", rich)
def ends():
    said.append("goes on")
    stopped.set()
with around_stops(lambda: said.append("taken away"), ends):
    rich["draw"]()
    while not stopped.is_set():
        signal.sigtimedwait([], 0.01)
print(*said, sep=", ")
"""
TO_ANOTHER_THREAD = """
import os, pathlib, signal, threading
from gradwire.cli.suspending import around_stops
os.setpgrp()
main = pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/stat")
def stop():
    looks = 0
    while looks < 100:  # in a row: it waits, and not for a moment
        looks = looks + 1 if main.read_text().rpartition(")")[2].split()[0] == "S" else 0
    signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
with around_stops(lambda: print("taken away", flush=True), lambda: print("goes on", flush=True)):
    threading.Thread(target=stop).start()
    os.read(0, 1)
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


def test_what_is_being_drawn_is_drawn_whole_before_ctrl_z_takes_it_away():
    with subprocess.Popen([sys.executable, "-c", IN_RICH], stdout=subprocess.PIPE, text=True) as child:
        try:
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            child.send_signal(signal.SIGCONT)
            said, _ = child.communicate(timeout=60)
        finally:
            child.kill()
    assert said == "drawn, taken away, goes on\n"


def test_ctrl_z_is_heard_by_who_waits_and_was_not_woken_by_it():
    """As where it comes after the last step of Python before a wait."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TO_ANOTHER_THREAD], stdin=pipe, stdout=pipe) as child:
        try:
            assert select.select([child.stdout], [], [], 60)[0], "it waits on"
            assert child.stdout.readline() == b"taken away\n"
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            child.send_signal(signal.SIGCONT)
            said, _ = child.communicate(b"x", timeout=60)
        finally:
            child.kill()
    assert said == b"goes on\nended\n"
