"""One host: what the engine gets from its kernel, which interfaces it chose and why, and what cards, processor and clock are worth.

The engine itself is started for a moment with the job's configuration, so that what is reported is what training will have.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire._launcher import local_rank
from gradwire.config import PORT_BASE, Config
from gradwire.doctor import card, counters, processor
from gradwire.doctor.card import Card
from gradwire.doctor.counters import Counters
from gradwire.doctor.findings import NOTE, PROBLEM, WARNING, Finding
from gradwire.doctor.processor import Processor
from gradwire.doctor.threads import Threads
from gradwire.errors import GradwireError

RECEIVE_WANTED, SEND_WANTED = (
    16 << 20,
    4 << 20,
)  # what the engine asks for; the kernel grants twice of it, for its own records
RECEIVE_LEAST = 1 << 20  # below, a burst of eight peers' eager windows (256 KB each) does not fit
BACKLOG_LEAST = 1000  # Linux's default of packets between the card's interrupt and the sockets
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")  # a microsecond and more for each reading
_CLOCK_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFMTU = 0x8913, 0x8915, 0x8921
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_BRIDGES = ("docker", "virbr", "podman")  # as the engine leaves them out


@dataclass(frozen=True)
class Interface:
    """A network interface, and why gradwire uses it or not."""

    name: str
    address: str
    mtu: int
    used: bool
    reason: str
    card: Card = field(default_factory=Card)

    @property
    def size_and_speed(self) -> str:
        """For people."""
        speed = self.card.speed_mbit
        return f"MTU {self.mtu}" + (f", {speed} Mbit/s" if speed else "")


@dataclass(frozen=True)
class HostFacts:
    """What was seen on one host.

    Attributes:
        threads: the network threads, and what decides how many a job uses.
        boot: identifies the running kernel: two hosts may have the same name and addresses.
        features: what the engine got; None: it did not start, and `error` says why.
        limits: sysctl values that bound it.
        clock: source, and whether it is synchronised (None: unknown).
        processor: the time that this process gets.
        counters: what the host has dropped so far.
    """

    host: str
    kernel: str
    port: int
    features: dict[str, Any] | None
    error: str = ""
    interfaces: list[Interface] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    clock: dict[str, Any] = field(default_factory=dict)
    processor: Processor = field(default_factory=lambda: Processor(cores=1, host_cores=1))
    counters: Counters = field(default_factory=Counters)
    threads: Threads = field(default_factory=Threads)
    boot: str = ""

    @property
    def used(self) -> list[str]:
        """Names of the interfaces that gradwire uses."""
        return [interface.name for interface in self.interfaces if interface.used]

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def examine(config: Config) -> HostFacts:
    """Looks at this host. The engine's port is free again afterwards."""
    features, threads, error = _engine(config)
    chosen = [] if features is None else features["addresses"]
    return HostFacts(
        host=socket.gethostname(),
        kernel=os.uname().release,
        port=threads.ports[0],
        features=features,
        error=error,
        interfaces=_interfaces(config, chosen),
        limits=_limits(),
        clock=_clock(),
        processor=processor.examine(),
        counters=counters.read(),
        threads=threads,
        boot=_boot(),
    )


def judge(facts: HostFacts, rank: int = 0) -> list[Finding]:
    """What follows from it."""
    if facts.features is None:
        fix = "end the process that has the port (ss -ulpn), or set GRADWIRE_PORT" if "port" in facts.error else ""
        return [Finding(PROBLEM, "engine", f"gradwire cannot start here: {facts.error}", fix, rank)]
    findings = [*_judge_buffers(facts, rank), *_judge_features(facts, rank), *_judge_clock(facts, rank)]
    for interface in facts.interfaces:
        if interface.used:
            findings += card.judge(interface.name, interface.card, rank)
    findings += counters.judge_now(facts.counters, facts.used, rank)
    findings += processor.judge(facts.processor, rank)
    findings += [
        Finding(
            NOTE,
            "interface",
            f"{i.name} {i.address} ({i.size_and_speed}): {'used' if i.used else 'not used'}, {i.reason}",
            "",
            rank,
        )
        for i in facts.interfaces
    ]
    if not facts.features["addresses"]:
        fix = "bring an interface up, or name one in GRADWIRE_INTERFACE"
        findings.append(Finding(WARNING, "interface", "only loopback: no other host can reach this one", fix, rank))
    return findings


def port_of(config: Config) -> int:
    """The port that the job's process with this local rank binds."""
    if config.port == 0:
        return 0
    return (PORT_BASE if config.port is None else config.port) + (local_rank() or 0)


def _engine(config: Config) -> tuple[dict[str, Any] | None, Threads, str]:
    """What the engine got, its network threads, and why it did not start."""
    from gradwire import _native

    settings = {
        "port": port_of(config), "interface": config.interface, "mtu": config.mtu, "offload": config.offload == "auto",
        "dscp": config.dscp, "dscp_classes": config.code_points(), "dscp_control": config.control_code_point(),
        "ecn": config.marks_importance(), "paths": config.paths, "on_peer_loss": config.on_peer_loss,
        "network_threads": config.network_threads,
    }  # fmt: skip
    try:
        engine = _native.Engine(settings)
    except GradwireError as error:
        return None, Threads([port_of(config)]), str(error)
    try:
        ports, is_asked = engine.thread_ports, config.network_threads is not None
        return engine.features(), Threads(ports, is_fixed=config.port != 0, is_asked=is_asked, cores=engine.cores), ""
    finally:
        engine.stop()


def _judge_buffers(facts: HostFacts, rank: int) -> list[Finding]:
    assert facts.features is not None
    findings = []
    for name, key, wanted in (
        ("receive", "rmem_max", RECEIVE_WANTED),
        ("send", "wmem_max", SEND_WANTED),
    ):
        granted = int(facts.features[f"{name}_buffer_bytes"])
        if granted < 2 * wanted:
            level = PROBLEM if name == "receive" and granted < 2 * RECEIVE_LEAST else WARNING
            text = f"the kernel grants a {name} buffer of {granted // 2 >> 10} KB, gradwire asks for {wanted >> 10} KB"
            findings.append(Finding(level, "buffers", text, f"sysctl -w net.core.{key}={wanted}", rank))
    backlog = facts.limits.get("netdev_max_backlog", BACKLOG_LEAST)
    if backlog < BACKLOG_LEAST:
        text = f"the kernel holds only {backlog} packets between interrupt and socket"
        findings.append(
            Finding(WARNING, "buffers", text, f"sysctl -w net.core.netdev_max_backlog={BACKLOG_LEAST}", rank)
        )
    return findings


def _judge_features(facts: HostFacts, rank: int) -> list[Finding]:
    assert facts.features is not None
    names = {
        "gso": ("segmentation offload (GSO)", "Linux 4.18 or newer, and GRADWIRE_OFFLOAD=auto"),
        "gro": ("receive offload (GRO)", "Linux 5.0 or newer, and GRADWIRE_OFFLOAD=auto"),
        "traffic_class": (
            "a traffic class for each datagram (DSCP, ECN)",
            "a kernel that takes IP_TOS as ancillary data",
        ),
    }
    return [
        Finding(
            WARNING,
            "kernel",
            f"no {what}: more time for each packet" if name != "traffic_class" else f"no {what}",
            fix,
            rank,
        )
        for name, (what, fix) in names.items()
        if not facts.features[name]
    ]


def _judge_clock(facts: HostFacts, rank: int) -> list[Finding]:
    findings = []
    source = facts.clock.get("source")
    if source in _SLOW_CLOCKS:
        fix = (
            "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource, if it is available and stable"
        )
        findings.append(
            Finding(
                WARNING,
                "clock",
                f"the clock source {source} is slow to read, and read for each batch of packets",
                fix,
                rank,
            )
        )
    if facts.clock.get("synchronised") is False:
        findings.append(
            Finding(
                NOTE,
                "clock",
                "the wall clock is not synchronised: logs of ranks are hard to compare",
                "run chrony or systemd-timesyncd",
                rank,
            )
        )
    return findings


def _interfaces(config: Config, chosen: list[str]) -> list[Interface]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has gone since: hosts of containers make and delete them all the time
                found.append(_interface(control, name, config, chosen))
    return found


def _interface(control: socket.socket, name: str, config: Config, chosen: list[str]) -> Interface:
    flags = struct.unpack_from("H", _ask(control, _SIOCGIFFLAGS, name), 16)[0]
    mtu = struct.unpack_from("i", _ask(control, _SIOCGIFMTU, name), 16)[0]
    try:
        address = socket.inet_ntoa(_ask(control, _SIOCGIFADDR, name)[20:24])
    except OSError:
        address = ""
    used = address in chosen
    reason = _reason(config, name, address, flags, used=used)
    return Interface(name, address, mtu, used, reason, card.examine(control, name))


def _reason(config: Config, name: str, address: str, flags: int, *, used: bool) -> str:
    asked = config.interface
    if used:
        how = "does not leave it out" if asked.startswith("^") else "names it"
        return f"GRADWIRE_INTERFACE={asked} {how}" if asked else "it is up and has an address"
    if not flags & _IFF_UP:
        return "it is down"
    if not address:
        return "it has no IPv4 address"
    if flags & _IFF_LOOPBACK:
        return "it reaches this host only"
    if asked:
        return f"GRADWIRE_INTERFACE={asked} leaves it out"
    return (
        "a bridge of containers has the same address on every host"
        if name.startswith(_BRIDGES)
        else "another address was chosen"
    )


def _ask(control: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(control, request, struct.pack("40s", name.encode()))


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _limits() -> dict[str, int]:
    values = {}
    for name in ("rmem_max", "wmem_max", "netdev_max_backlog"):
        with suppress(OSError, ValueError):  # not there within some network namespaces
            values[name] = int(Path(f"/proc/sys/net/core/{name}").read_text())
    return values


def _clock() -> dict[str, Any]:
    source = ""
    with suppress(OSError):
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    return {"source": source, "synchronised": _synchronised()}


def _synchronised() -> bool | None:
    """What the kernel says about NTP; None: it does not."""
    state = ctypes.create_string_buffer(512)  # struct timex, with modes 0: a question only
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(state) < 0:
            return None
    except (OSError, AttributeError):
        return None
    # modes (int), offset, freq, maxerror, esterror (long each), status (int)
    status = struct.unpack_from("i4xllll i", state.raw)[5]
    return not status & _CLOCK_UNSYNCHRONISED
