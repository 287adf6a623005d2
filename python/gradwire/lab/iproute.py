"""Runs `ip`, `tc` and `bridge` (iproute2, which every distribution has), several commands at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradwire.lab.errors import LabError, ToolMissing

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # users often lack the last two
BUCKET_BYTES = 6_056  # of tbf: four full frames leave back to back; with less each packet would cost a timer interrupt
_FORWARDING_S = 10.0
_POLL_S = 0.01
_ENDING_S = 60.0  # of a program that takes some milliseconds, on a busy machine some hundred


def require() -> None:
    """Raises ToolMissing, saying what to install."""
    missing = [program for program in ("ip", "tc") if shutil.which(program, path=_PATH) is None]
    if missing:
        raise ToolMissing(f"{' and '.join(missing)} not found: install iproute2 (apt install iproute2)")


def ip(*lines: str) -> None:
    """Runs the lines as arguments of `ip`, in the current network namespace; raises LabError at the first that fails."""
    _run(["ip", "-batch", "-"], "\n".join(lines))


def tc(*lines: str) -> None:
    """Runs the lines as arguments of `tc`, as `ip` does."""
    _run(["tc", "-batch", "-"], "\n".join(lines))


def bridge(*lines: str) -> None:
    """Runs the lines as arguments of `bridge`, as `ip` does."""
    _run(["bridge", "-batch", "-"], "\n".join(lines))


def add_bridge(name: str, mtu_bytes: int, settings: str = "") -> None:
    """Adds a bridge that is up, as a switch: the packet filters of IP, ARP and their connection tracking do not see what crosses it.

    Where the kernel hands frames to those filters, as it does unless told otherwise, each takes a tenth more of a core, which would count
    as the hosts'. Filters of bridges, by which the lab loses frames, are others.
    """
    ip(f"link add {name} type bridge {settings}", f"link set {name} up mtu {mtu_bytes}")
    for filters in ("iptables", "ip6tables", "arptables"):
        with suppress(FileNotFoundError):  # a kernel without them has nothing to switch off
            Path(f"/proc/sys/net/bridge/bridge-nf-call-{filters}").write_text("0")


def add_queueing_bridge(name: str, mtu_bytes: int, settings: str = "") -> None:
    """As `add_bridge`, for ports where packets wait: what waits there burdens its sender no longer, as behind any real switch.

    The kernel charges a packet to the socket that sent it until it comes to its receiver, whatever namespace it is in meanwhile, and a
    bridge hands on the packet itself. A port's queue would fill the sender's buffer and hold it back (TCP counts it as not sent yet), and
    would not overflow. A promiscuous bridge takes the packet for itself, where it ends at once, and hands on a clone, which is charged to
    nobody and shares the packet's bytes. Routing would do it too, for more work with each packet and with routes to keep.
    """
    add_bridge(name, mtu_bytes, settings)
    ip(f"link set {name} promisc on")


def wait_until_forwarding(ports: Sequence[str]) -> None:
    """Waits until the bridges forward what comes from these ports.

    That is some milliseconds after both ends of a link are up, on a busy machine some hundred. What is sent before is lost.

    Raises:
        LabError: one does not; its link may be down.
    """
    end = time.monotonic() + _FORWARDING_S
    while waiting := set(ports) - _forwarding():
        if time.monotonic() > end:
            raise LabError(
                f"{', '.join(sorted(waiting))}: the bridge forwards nothing from there after {_FORWARDING_S} s"
            )
        time.sleep(_POLL_S)


def _forwarding() -> set[str]:
    links = json.loads(_run(["bridge", "-j", "link", "show"], "") or "[]")
    return {link["ifname"] for link in links if link.get("state") == "forwarding"}


def tc_statistics() -> list[dict[str, Any]]:
    """All queueing disciplines of the current network namespace with their counters, as `tc -s -j` gives them."""
    described: list[dict[str, Any]] = json.loads(_run(["tc", "-s", "-j", "qdisc", "show"], ""))
    return described


def _run(command: list[str], lines: str) -> str:
    pipe, environment = subprocess.PIPE, {**os.environ, "PATH": _PATH}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as program:
        try:
            said, complained = _printed(program, lines)
        except subprocess.TimeoutExpired:
            program.kill()
            raise LabError(f"{command[0]} has not ended for {2 * _ENDING_S:g} s, and was killed: see dmesg") from None
        except BaseException:
            program.kill()
            raise
    if program.returncode != 0:
        raise LabError(f"{command[0]} failed: {' '.join(complained.split())}")
    return said


def _printed(program: subprocess.Popen[str], lines: str) -> tuple[str, str]:
    """Output and errors, when it has read the lines and ended; raises subprocess.TimeoutExpired."""
    with suppress(subprocess.TimeoutExpired):
        return program.communicate(lines, _ENDING_S)
    return program.communicate(timeout=_ENDING_S)  # Ctrl-Z stops both, and may have taken all of the time above
