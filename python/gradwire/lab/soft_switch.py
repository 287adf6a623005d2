"""A switch that is a small program (`soft_switch.c`), for kernels without netem: rate, delay, loss and buffer of each port.

    host i: eth0 --veth-- port i --packet socket-- [loss > buffer > rate > delay]

It costs about 5 us of one core for each packet (the user-mode-linux switch: 50 us), so that two hosts and the switch have
room on two cores at some hundred Mbit/s. Its rate is exact: when a frame leaves is computed, not timed. It is compiled when
it is started, and its file is removed as soon as it runs, so that whoever is killed leaves none.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire.lab.cluster import Link
from gradwire.lab.compiler import build
from gradwire.lab.errors import LabError, WrongRequest

_SOURCE = Path(__file__).with_suffix(".c")
_SLOTS = 1 << 14  # `SLOTS` of soft_switch.c: frames that a port can have under way, waiting or on the wire
_FRAME_BYTES = 1514
ANSWER_SECONDS = 60.0  # it takes microseconds where its host has nothing else to do
_REAL_TIME_PRIORITY = 10  # any: what matters is to run before the hosts' processes


@dataclass(frozen=True)
class PortCounters:
    """Frames that came to all ports since they were last shaped, those lost by chance or a cut, and those that found a full buffer."""

    seen: int
    lost: int
    overflowed: int


class SoftSwitch:
    """A running switch. A context manager; made inside the network namespace that holds its ports."""

    def __init__(self, ports: list[str]) -> None:
        """Compiles and starts it.

        Args:
            ports: network devices, up; a frame goes to port n - 1 if its destination address ends in n.

        Raises:
            ToolMissing: there is no C compiler.
            LabError: it cannot be compiled, or does not start.
        """
        pipe = subprocess.PIPE
        with tempfile.TemporaryDirectory(prefix="gradwire-switch-") as folder:
            program = Path(folder, "soft_switch")
            build(_SOURCE, program)
            self._process = subprocess.Popen([program, *ports], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        with suppress(OSError):  # only root may; without it the switch is late when the hosts are busy
            os.sched_setscheduler(self._process.pid, os.SCHED_RR, os.sched_param(_REAL_TIME_PRIORITY))
        self._expect("ready")

    def shape(self, port: int, link: Link, loss: float, loss_after_loss: float | None = None) -> None:
        """Sets what happens to the packets that leave through a port; those that wait there stay, and leave at the new rate.

        Args:
            port: its number.
            link: rate, delay and buffer.
            loss: chance to lose a packet.
            loss_after_loss: the same for one whose predecessor was lost; None: as for any other.

        Raises:
            WrongRequest: see `check_room`.
        """
        check_room(link)
        rate, delay = round(link.rate_mbit * 1e6), round(link.delay_ms * 1e6)
        chances = [
            min(round(chance * 2**32), 2**32) for chance in (loss, loss if loss_after_loss is None else loss_after_loss)
        ]
        self._ask(f"shape {port} {rate} {delay} {chances[0]} {chances[1]} {link.buffer_bytes}", "ok")

    def cut(self, port: int, is_cut: bool) -> None:
        """Lets nothing through a port in either direction, of what waits there neither, or everything again."""
        self._ask(f"cut {port} {int(is_cut)}", "ok")

    def port_counters(self, port: int) -> PortCounters:
        """What happened to frames that were to leave through a port, since the start."""
        return PortCounters(*map(int, self._ask(f"port {port}", "port")))

    def counters(self) -> PortCounters:
        """What happened since the last `shape`."""
        return PortCounters(*map(int, self._ask("count", "count")))

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> SoftSwitch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, command: str, answer: str) -> list[str]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise LabError("the switch is gone") from error
        return self._expect(answer)

    def _expect(self, word: str) -> list[str]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_SECONDS)[0]:
            raise LabError(f"the switch has not answered for {ANSWER_SECONDS:g} s")
        first, *rest = self._process.stdout.readline().split() or [""]
        if first != word:
            assert self._process.stderr is not None
            problem = first or self._process.stderr.read().strip()
            raise LabError(f"the switch does not work: {problem}")
        return rest


def check_room(link: Link) -> None:
    """Whether a port can hold what a link asks for.

    Raises:
        WrongRequest: buffer and delay hold more full frames than there is room for; those beyond would be lost unasked.
    """
    frames = (link.buffer_bytes + link.rate_mbit * 1e3 * link.delay_ms / 8) / _FRAME_BYTES
    if frames > _SLOTS:
        raise WrongRequest(
            f"the small program holds {_SLOTS} packets for each port, and buffer and delay at this rate are {frames:.0f}:"
            " less of them, or a switch of kind uml or netem"
        )
