"""A switch that is a real Linux kernel of its own: Debian's user-mode-linux, as a router between the hosts.

For kernels without netem. The switch's kernel has tbf, netem, prio and red; each of its ports is a veth of the host's
network namespace, and on each port it limits the rate, delays and loses packets as a switch's egress does:

    host i: eth0 --veth-- port i --raw socket-- vec i: tbf (rate) > netem (delay, loss) > bfifo (buffer)

It forwards about 50,000 packets a second on one core.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from gradwire.lab.compiler import build
from gradwire.lab.errors import LabError, ToolMissing
from gradwire.lab.iproute import BUCKET_BYTES
from gradwire.lab.netem import port_queue
from gradwire.switch.linux import red

PROGRAM = "linux.uml"
_HERE = Path(__file__).parent
BOOT_SECONDS = 120.0  # it takes one or two where its host has nothing else to do
COMMAND_SECONDS = 30.0  # of which tc takes some milliseconds
ANSWER_SECONDS = 30.0  # beyond a command's own limit, which the switch keeps itself
_REAL_TIME_PRIORITY = 10  # any: what matters is to run before the hosts' processes


class UmlSwitch:
    """A running switch. A context manager; made inside the network namespace that holds its ports."""

    def __init__(self, ports: list[str], mtu_bytes: int = 1500) -> None:
        """Boots it.

        Args:
            ports: network devices, up, that become its interfaces vec0, vec1, ...
            mtu_bytes: the largest packet that they carry.

        Raises:
            ToolMissing: user-mode-linux or a C compiler is not installed.
            LabError: it does not start, or not within BOOT_SECONDS, or what it needs cannot be compiled.
        """
        if shutil.which(PROGRAM) is None:
            raise ToolMissing(f"{PROGRAM} not found: install user-mode-linux (apt install user-mode-linux)")
        # What it is started with is removed as soon as it runs, so that whoever is killed leaves nothing.
        with tempfile.TemporaryDirectory(prefix="gradwire-uml-") as folder:
            self._unread = b""
            self._kernel = _boot(ports, mtu_bytes, Path(folder))
            try:
                with suppress(OSError):  # only root may; without it the switch is slower when the hosts are busy
                    os.sched_setscheduler(self._kernel.pid, os.SCHED_RR, os.sched_param(_REAL_TIME_PRIORITY))
                self._wait_for("READY", BOOT_SECONDS)
            except BaseException:  # an interrupt, which does not reach a session of its own
                self.close()
                raise

    def run(self, *commands: str, limit_s: float = COMMAND_SECONDS) -> str:
        """Runs shell commands (one line each) on the switch and returns their output.

        Args:
            commands: what to run; with nothing as their standard input.
            limit_s: how long each may take.

        Raises:
            LabError: a command fails, or does not end in time, or the switch is gone; one that does not answer is ended.
        """
        assert self._kernel.stdin is not None
        output = ""
        for command in commands:
            if self._is_gone():  # who it has started may hold its end of the pipe still
                raise LabError("the user-mode-linux switch is gone")
            try:
                mark = secrets.token_hex(8)
                self._kernel.stdin.write(f"{mark} {limit_s:g} {command}\n".encode())
                self._kernel.stdin.flush()
            except BrokenPipeError as error:
                raise LabError("the user-mode-linux switch is gone") from error
            # The first line is the command itself, which the console echoes.
            end, (_, *lines) = self._wait_for(f"DONE {mark} ", limit_s + ANSWER_SECONDS)
            if end.split()[-1] != "0":
                raise LabError(f"the switch refused `{command}`: {' '.join(lines[-3:])}")
            output += "\n".join(lines)
        return output

    def shape(
        self,
        port: int,
        rate_mbit: float,
        delay_ms: float,
        loss: float,
        buffer_bytes: int,
        *,
        burst: float = 1.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Sets what a port does to the packets that leave through it.

        Args:
            port: its number.
            rate_mbit: rate in millions of bits a second.
            delay_ms: added one-way delay.
            loss: probability, 0 to 1, with which a packet is lost.
            buffer_bytes: bytes that it holds before it drops, beyond what the delay keeps under way.
            burst: mean number of packets that are lost one after the other; 1: each by itself.
            bucket_bytes: what leaves at once after the port was idle.
        """
        lines = port_queue(
            f"vec{port}", rate_mbit, delay_ms, buffer_bytes, loss=loss, burst=burst, bucket_bytes=bucket_bytes
        )
        self.run(*(f"tc {line}" for line in lines))

    def mark_long_queues(self, port: int, rate_mbit: float, threshold_bytes: int, buffer_bytes: int) -> None:
        """Has a port treat packets as MLT (section 5.2) asks: where its queue is long, it drops those that it may not mark.

        RED with ECN, as `gradwire switch` writes it: its average follows the queue at once, and its two thresholds lie one frame apart.

        Args:
            port: its number.
            rate_mbit: rate in millions of bits a second.
            threshold_bytes: length of the queue from which on packets are marked or dropped.
            buffer_bytes: what the port holds for ECN-capable packets.
        """
        device = f"vec{port}"
        self.run(
            f"tc qdisc replace dev {device} root handle 1: tbf rate {rate_mbit}mbit burst {BUCKET_BYTES} limit {2 * buffer_bytes}",
            f"tc qdisc replace dev {device} parent 1: handle 3:"
            f" {red(threshold_bytes, buffer_bytes, f'{rate_mbit}mbit')}",
        )

    def close(self) -> None:
        """Ends it, with the processes that it has started: outside of a sandbox nobody else would."""
        if self._kernel.returncode is not None:
            return  # before; what has this number now is somebody else's
        with suppress(ProcessLookupError):
            os.killpg(self._kernel.pid, signal.SIGKILL)
        self._kernel.wait()

    def _is_gone(self) -> bool:
        """Whether its first process has ended, which keeps its number until `close`: those that it has started have their group by that."""
        if self._kernel.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._kernel.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else has waited for it
            return True

    def __enter__(self) -> UmlSwitch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for(self, word: str, limit_s: float) -> tuple[str, list[str]]:
        """The line that begins with the word, and those before it."""
        end, lines = time.monotonic() + limit_s, list[str]()
        while (line := self._next_line(end)) is not None:
            if line.startswith(word):
                return line, lines
            lines.append(line)
        is_silent = time.monotonic() >= end
        self.close()
        why = f"has not answered for {limit_s:g} s, and was ended" if is_silent else "ended"
        raise LabError(f"the user-mode-linux switch {why}: {' '.join(lines[-5:])}")

    def _next_line(self, end: float) -> str | None:
        """None: it is silent until then, or has ended."""
        assert self._kernel.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._kernel.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready or not (read := os.read(self._kernel.stdout.fileno(), 1 << 16)):
                return None
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode(errors="replace").rstrip()


def _boot(ports: list[str], mtu_bytes: int, folder: Path) -> subprocess.Popen[bytes]:
    """Starts the kernel; the folder's files, which this makes, are needed until it says that it is ready."""
    # vec=0: one packet for each system call. The driver's vectors of packets deliver zeros in place of payload, and
    # nobody notices but the application: a veth takes what it carries for verified.
    devices = [f"vec{i}:transport=raw,ifname={port},vec=0,gro=0,mtu={mtu_bytes}" for i, port in enumerate(ports)]
    init = folder / "init"
    init.write_text(f"#!/bin/sh\nexec {_python()} -S -E {_HERE / 'uml_init.py'}\n")
    init.chmod(0o755)
    options = ["mem=256M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}", "quiet"]
    # It keeps its memory in a file there, and looks nowhere else where the caller's is no folder.
    place = {"TMPDIR": tempfile.gettempdir(), "HOME": str(folder)}
    return subprocess.Popen(
        [PROGRAM, *options, "con=null", "con0=fd:0,fd:1", *devices],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LD_PRELOAD": str(_build_fpu_shim(folder)), **place},
        start_new_session=True,  # it starts others, all of which `close` ends
    )


def _build_fpu_shim(folder: Path) -> Path:
    library = folder / "uml_fpu.so"
    build(_HERE / "uml_fpu.c", library, "-shared", "-fPIC")
    return library


def _python() -> str:
    """An interpreter that the other kernel can start: outside of virtual environments."""
    for name in ("/usr/bin/python3", shutil.which("python3")):
        if name and Path(name).exists():
            return str(Path(name).resolve())
    raise ToolMissing("no python3 found on PATH")
