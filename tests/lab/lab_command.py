"""What the tests of `gradwire lab` share: the command, and a shell on a terminal that starts it."""

import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from gradwire._interpreter import running

TIMEOUT_S = 60
# As the script that pip installs, which does not look for modules in the current folder.
INSTALLED = running("from gradwire.cli import main; main()")
PREFIX = [sys.executable, "-c", "from gradwire.cli import main; main()", "lab"]
ON_TERMINAL = """
import fcntl, os, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execlp("bash", "bash", "--norc", "--noprofile", "--noediting", "-i")
"""
CTRL_Z = "\x1a"


class Lab:
    """The command, with a folder for its socket and one for temporary files."""

    def __init__(self):
        self.folder, self.temporary = tempfile.mkdtemp(prefix="gw-"), tempfile.mkdtemp(prefix="gw-")
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": self.folder, "TMPDIR": self.temporary}

    def __call__(self, *arguments, **options):
        return subprocess.run([*PREFIX, *arguments], env=self.environment, capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False, **options)  # fmt: skip

    def start(self, *arguments, **options):
        return subprocess.Popen([*PREFIX, *arguments], env=self.environment, text=True, **options)

    def sockets(self):
        return [path.name for path in Path(self.folder).glob("*/*")]

    def close(self):
        self("down")
        shutil.rmtree(self.folder)
        shutil.rmtree(self.temporary)


class Shell:
    """A bash that has a terminal, as a user's has. A context manager; what it has started is ended with it."""

    def __init__(self, environment):
        self._terminal, of_child = pty.openpty()
        fcntl.ioctl(of_child, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
        self._bash = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL], env={**environment, "PS1": "", "TERM": "xterm"}, stdin=of_child,
            stdout=of_child, stderr=of_child, start_new_session=True,
        )  # fmt: skip
        os.close(of_child)

    def type(self, text):
        """As on its keyboard."""
        os.write(self._terminal, text.encode())

    def until(self, text):
        """What is written on the terminal up to this; what was typed is, too. Whatever does not come in time fails the calling test."""
        said, end = b"", time.monotonic() + TIMEOUT_S
        while text.encode() not in said:
            left_s = max(0.0, end - time.monotonic())
            assert select.select([self._terminal], [], [], left_s)[0], (
                f"{text!r} has not come, but {said.decode(errors='replace')!r}"
            )
            said += os.read(self._terminal, 1)  # not what comes afterwards
        return said.decode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                number, session = status.parent.name, status.read_text().rpartition(")")[2].split()[3]
            except OSError:  # it has ended
                continue
            if int(session) == self._bash.pid != int(number):
                os.kill(int(number), signal.SIGKILL)
        self._bash.kill()
        self._bash.wait()
        os.close(self._terminal)
