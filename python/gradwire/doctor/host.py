"""One host: what the engine gets from its kernel, which interfaces it chose and why, and what cards, processor and clock are worth.

The engine itself is started for a moment with the job's configuration, so that what is reported is what training will have.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import json
import os
import re
import socket
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire._launcher import candidate_ports, local_rank
from gradwire.config import PORT_BASE, Config
from gradwire.doctor import card, counters, netlink, processor, reserved
from gradwire.doctor.card import Card
from gradwire.doctor.counters import Counters
from gradwire.doctor.family import IPV4, family_of, family_of_engine
from gradwire.doctor.findings import NOTE, PROBLEM, WARNING, Finding
from gradwire.doctor.kept import Kept, keep
from gradwire.doctor.processor import Processor
from gradwire.doctor.reach import UNKNOWN_BOOT, is_loopback
from gradwire.doctor.reserved import Choice
from gradwire.doctor.threads import Threads
from gradwire.doctor.threads import told as told_ports
from gradwire.errors import GradwireError, PortInUseError

RECEIVE_WANTED, SEND_WANTED = (
    16 << 20,
    4 << 20,
)  # what the engine asks for; the kernel grants twice of it, for its own records
RECEIVE_LEAST = 1 << 20  # below, a burst of eight peers' eager windows (256 KB each) does not fit
BACKLOG_LEAST = 1000  # Linux's default of packets between the card's interrupt and the sockets
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")  # a microsecond and more for each reading
_CLOCK_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921
_GET_ADDRESSES, _ADDRESS = 22, struct.Struct("BBBBI")  # RTM_GETADDR, struct ifaddrmsg
_LOCAL = 2  # IFA_LOCAL: IFA_ADDRESS is the other end's where a link has but two
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_BRIDGES = re.compile("docker|virbr|podman|br-[0-9a-fA-F]{12}$")  # as the engine leaves them out
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_IPV6_ADDRESSES = Path("/proc/self/net/if_inet6")
_RECORDED = ("ipv6", "loopback", "boot_id", "network_namespace")  # by which an engine's record says where it is reached


@dataclass(frozen=True)
class Interface:
    """A network interface, and why gradwire uses it or not.

    Attributes:
        address: those that gradwire uses, or, where it uses none, those that it has; separated by spaces.
        lacking: it is loopback, and down.
    """

    name: str
    address: str
    mtu: int
    used: bool
    reason: str
    card: Card = field(default_factory=Card)
    lacking: bool = False

    @property
    def size_and_speed(self) -> str:
        """For people."""
        speed = self.card.speed_mbit
        return f"MTU {self.mtu}" + (f", {speed} Mbit/s" if speed else "")


@dataclass(frozen=True)
class HostFacts:
    """What was seen on one host.

    Attributes:
        own_port: the one that belongs to this local rank and that others may be told to let in; None: none does.
        interface_asked: `GRADWIRE_INTERFACE`; empty: nobody has said which to use.
        port_choice: what the kernel gives to programs that ask for any port.
        threads: the network threads, and what decides how many a job uses.
        boot: identifies the running kernel: two hosts may have the same name and addresses.
        features: what the engine got, and from where it can be reached; None: it did not start, and `error` says why.
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
    own_port: int | None = None
    interface_asked: str = ""
    port_choice: Choice = field(default_factory=Choice)

    @property
    def used(self) -> list[str]:
        """Names of the interfaces that gradwire uses."""
        return [interface.name for interface in self.interfaces if interface.used]

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def examine(config: Config) -> HostFacts:
    """Looks at this host. The engine's port is free again afterwards."""
    facts, kept = examine_and_keep(config)
    kept.close()
    return facts


def examine_and_keep(config: Config) -> tuple[HostFacts, Kept]:
    """Looks at this host, and keeps the engine's ports for who probes there."""
    features, threads, error, kept = _engine(config)
    facts = HostFacts(
        host=socket.gethostname(),
        kernel=os.uname().release,
        port=threads.ports[0],
        features=features,
        error=error,
        interfaces=_interfaces(config, [] if features is None else _in_use(features)),
        limits=_limits(),
        clock=_clock(),
        processor=processor.examine(),
        counters=counters.read(),
        threads=threads,
        boot=_boot(),
        own_port=_own_port(config),
        interface_asked=config.interface,
        port_choice=reserved.examine(),
    )
    return facts, kept


def judge(facts: HostFacts, rank: int = 0, *, meets_here: bool = False) -> list[Finding]:
    """What follows from it; `meets_here`: all ranks are on this host."""
    own_ways = _judge_own_ways(facts, rank, meets_here=meets_here)
    if facts.features is None:
        fix = "end the process that has the port (ss -ulpn), or set GRADWIRE_PORT" if "port" in facts.error else ""
        return [Finding(PROBLEM, "engine", f"gradwire cannot start here: {facts.error}", fix, rank), *own_ways]
    findings = [*_judge_buffers(facts, rank), *_judge_features(facts, rank), *_judge_clock(facts, rank)]
    findings += [*_judge_port(facts, rank), *own_ways]
    for interface in facts.interfaces:
        if interface.used:
            findings += card.judge(interface.name, interface.card, rank)
    if not facts.interface_asked and not meets_here:
        findings += card.judge_choice([(i.name, i.card) for i in facts.interfaces if i.used], rank)
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
        level = NOTE if meets_here else WARNING
        findings.append(Finding(level, "interface", "only loopback: no other host can reach this one", fix, rank))
    return findings


def port_of(config: Config) -> int:
    """The port that the job's process with this local rank would get: the first free one of those that it tries."""
    candidates = candidate_ports(config.port)
    for port in candidates if len(candidates) > 1 else ():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("", port))
            return port
    return candidates[0]


def _own_port(config: Config) -> int | None:
    """The first that the job's process would try, where it is a certain one: a launcher or the user says so."""
    first, *others = candidate_ports(config.port)
    return first if first and (not others or local_rank() is not None) else None


def _engine(config: Config) -> tuple[dict[str, Any] | None, Threads, str, Kept]:
    """What the engine got, its network threads, why it did not start, and its ports, at the first that is free as the job's process does.

    Another rank of the check may take a port, of whichever network thread, while an engine leaves it: then the next one is tried, too.
    """
    candidates, refused, kept = candidate_ports(config.port), "", Kept()
    for port in candidates:
        try:
            features, threads = _at_port(config, port)
        except PortInUseError as error:
            refused = refused or str(error)
            continue
        except GradwireError as error:
            return None, Threads([port_of(config)]), str(error), Kept()
        kept = keep(threads.ports, family_of_engine(features).anywhere)
        if kept.lost is None or port == candidates[-1]:
            return features, threads, "", kept
        kept.close()
    return None, Threads([candidates[0]]), refused, kept


def _at_port(config: Config, port: int) -> tuple[dict[str, Any], Threads]:
    """What an engine gets there. Raises PortInUseError where the port is taken, and another GradwireError where none would start."""
    from gradwire import _native

    settings = {
        "port": port, "interface": config.interface, "mtu": config.mtu, "offload": config.offload == "auto",
        "dscp": config.dscp, "dscp_classes": config.code_points(), "dscp_control": config.control_code_point(),
        "ecn": config.marks_importance(), "paths": config.paths, "on_peer_loss": config.on_peer_loss,
        "network_threads": config.network_threads,
    }  # fmt: skip
    engine = _native.Engine(settings)
    try:
        ports, is_asked = engine.thread_ports, config.network_threads is not None
        record = json.loads(engine.new_group(1, 2, "doctor").record())  # as the job's ranks would get it
        features = {**engine.features(), **{name: record[name] for name in _RECORDED}}
        return features, Threads(ports, is_fixed=config.port != 0, is_asked=is_asked, cores=engine.cores)
    finally:
        engine.stop()


def _judge_port(facts: HostFacts, rank: int) -> list[Finding]:
    """Where the rank's own port is taken the job starts all the same, at another one."""
    if facts.own_port in (None, facts.port):
        return _judge_choice_of_ports(facts, rank)
    text = f"UDP port {facts.own_port} is this rank's, and taken: a job has {facts.port} instead, which a firewall may not let in"
    fix = "end the process that has it (ss -ulpn), or set GRADWIRE_PORT"
    return [Finding(WARNING, "port", text, fix, rank)]


def _judge_choice_of_ports(facts: HostFacts, rank: int) -> list[Finding]:
    """Whether other programs may be given the rank's ports."""
    if facts.own_port is None and not facts.threads.is_fixed:
        return []
    first, *_ = facts.threads.ports
    ports = [first, *filter(None, told_ports(asdict(facts.threads)))]
    # Where no launcher numbers the ranks of a host each takes the first free one: that of this rank says nothing of where they begin.
    return reserved.judge(facts.port_choice, ports, rank, facts.own_port or PORT_BASE)


def _judge_own_ways(facts: HostFacts, rank: int, *, meets_here: bool) -> list[Finding]:
    """Whether ranks of this host reach each other."""
    is_alone, findings = facts.features is None or not facts.features["addresses"], []
    for name in [interface.name for interface in facts.interfaces if interface.lacking]:
        level = PROBLEM if is_alone or meets_here else WARNING
        text = f"{name} is down: ranks of this host do not reach each other, at whatever address: to itself the kernel sends over it"
        findings.append(Finding(level, "interface", text, f"ip link set {name} up", rank))
    if facts.features is not None and facts.features.get("boot_id", "").startswith(UNKNOWN_BOOT):
        text = f"{_BOOT_ID} cannot be read: ranks of one host do not know that they are, and do not use loopback"
        level, more = (PROBLEM, ", or bring an interface up that has an address") if is_alone else (NOTE, "")
        findings.append(Finding(level, "interface", text, f"mount /proc{more}", rank))
    return findings


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


def _in_use(features: Mapping[str, Any]) -> list[str]:
    """Addresses at which the engine is reached: loopback where there is no other."""
    return features["addresses"] or [family_of_engine(features).loopback]


def _interfaces(config: Config, chosen: list[str]) -> list[Interface]:
    found, of_ipv4, of_ipv6 = [], _ipv4_addresses(), _ipv6_addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has gone since: hosts of containers make and delete them all the time
                found.append(_interface(control, name, [*of_ipv4[name], *of_ipv6[name]], config, chosen))
    return found


def _interface(
    control: socket.socket, name: str, addresses: list[str], config: Config, chosen: Sequence[str]
) -> Interface:
    flags = struct.unpack_from("H", _ask(control, _SIOCGIFFLAGS, name), 16)[0]
    mtu = struct.unpack_from("i", _ask(control, _SIOCGIFMTU, name), 16)[0]
    used = [address for address in addresses if address in chosen]
    told = used or [address for address in addresses if not _is_of_link(address)] or addresses
    reason = _used_reason(config, used[0]) if used else _unused_reason(config, name, addresses, flags, chosen)
    lacking = bool(flags & _IFF_LOOPBACK and not flags & _IFF_UP)
    return Interface(name, " ".join(told), mtu, bool(used), reason, card.examine(control, name), lacking)


def _used_reason(config: Config, address: str) -> str:
    asked = config.interface
    if asked:
        return f"GRADWIRE_INTERFACE={asked} {'does not leave it out' if asked.startswith('^') else 'names it'}"
    return "there is no other to use" if is_loopback(address) else "it is up and has an address"


def _unused_reason(config: Config, name: str, addresses: list[str], flags: int, chosen: Sequence[str]) -> str:
    asked = config.interface
    if not flags & _IFF_UP:
        return "it is down"
    if flags & _IFF_LOOPBACK:
        return "it reaches this host only"
    if reason := _useless(addresses, chosen):
        return reason
    if _BRIDGES.match(name) and (not asked or asked.startswith("^")):
        return "a bridge of containers has the same address on every host"
    return f"GRADWIRE_INTERFACE={asked} leaves it out" if asked else "another address was chosen"


def _useless(addresses: list[str], chosen: Sequence[str]) -> str:
    """Why none of an interface's addresses could be used, beside those that were chosen; empty: one could."""
    if not addresses:
        return "it has no address"
    families = {family_of(address) for address in addresses if not _is_of_link(address)}
    if not families:
        return "it has no address but one of its link alone"
    is_behind = IPV4 not in families and any(family_of(address) is IPV4 for address in chosen)
    return "it has no IPv4 address, and others have one" if is_behind else ""


def _is_of_link(address: str) -> bool:
    """Whether it is of no use to a peer that does not know the link."""
    return ipaddress.ip_address(address).is_link_local


def _ipv4_addresses() -> defaultdict[str, list[str]]:
    """By interface, all that it has, as the engine finds them: the ioctl that asks for one knows the first alone."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for content in netlink.dump(_GET_ADDRESSES, _ADDRESS.pack(socket.AF_INET, 0, 0, 0, 0)):
        with suppress(OSError, struct.error):  # its interface has gone since
            family, _, _, _, index = _ADDRESS.unpack_from(content)
            own = [value for kind, value in netlink.attributes(content[_ADDRESS.size :]) if kind == _LOCAL]
            if family == socket.AF_INET:
                found[socket.if_indextoname(index)] += [socket.inet_ntoa(value) for value in own]
    return found


def _ipv6_addresses(path: Path = _IPV6_ADDRESSES) -> defaultdict[str, list[str]]:
    """By interface: each line has 32 digits first and the name last."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            digits, *_, name = line.split()
            found[name].append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def _ask(control: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(control, request, struct.pack("40s", name.encode()))


def _boot() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
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
