"""What can be a rail's switch in a `Network`: the machine's own kernel, another kernel, or a small program.

    kind    rate    delay   loss   bursts   what it is
    netem   tbf     netem   netem  netem    a bridge of this kernel
    nft     tbf     none    nft    none     a bridge of this kernel, where it has no netem
    uml     tbf     netem   netem  netem    user-mode-linux, a kernel of its own
    soft    exact   exact   exact  exact    `soft_switch.c`

The buffer of each is of bytes, Ethernet headers included.

Port p is the link of host p; settings concern what leaves through it, towards the host. All of them can change at any time.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from gradwire.lab import iproute, netem
from gradwire.lab.cluster import Link
from gradwire.lab.errors import WrongRequest
from gradwire.lab.loss_filter import LossFilter
from gradwire.lab.soft_switch import SoftSwitch, check_room
from gradwire.lab.uml_switch import PROGRAM, UmlSwitch

KINDS = ("netem", "uml", "nft", "soft")
_FRAME_BYTES = 1514
_BYTES_MAX = (1 << 32) - 1  # of tc's numbers
_SOFT_MTU = 1500  # `FRAME_MAX` of soft_switch.c


@dataclass(frozen=True)
class Port:
    """What a switch's port does to the packets that leave through it.

    Attributes:
        rate_mbit: bits on the wire in millions a second.
        delay_ms: one-way delay of one crossing; a round trip crosses the ports of both hosts.
        loss: share of the packets that is lost, 0 to 1.
        burst: mean number of packets lost one after the other.
        buffer_bytes: what it holds before it drops.
        bucket_bytes: what leaves at once after the port was idle, and four full frames at least. Shapers of clouds let much more go.
        is_cut: nothing that comes passes in either direction, and nobody is told; what waits is lost, but a bridge's port lets it leave.
    """

    rate_mbit: float = 100.0
    delay_ms: float = 0.0
    loss: float = 0.0
    burst: float = 1.0
    buffer_bytes: int = 256 * 1024
    is_cut: bool = False
    bucket_bytes: int = iproute.BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.rate_mbit <= 0 or self.buffer_bytes < 4 * _FRAME_BYTES or self.delay_ms < 0 or self.burst < 1:
            raise WrongRequest(
                f"a port needs a rate, room for four packets, no negative delay, bursts of 1 at least: {self}"
            )
        if not 0 <= self.loss <= 1:
            raise WrongRequest(f"loss is a share between 0 and 1, not {self.loss}")
        # Behind each burst at least one packet passes. That of 1 is no burst: each packet is lost by itself.
        if self.burst > 1 and self.burst / (self.burst + 1) < self.loss < 1:
            raise WrongRequest(
                f"bursts of {self.burst:g} lose {self.burst / (self.burst + 1):.3g} at most, not {self.loss:g}"
            )
        if self.bucket_bytes < iproute.BUCKET_BYTES:
            raise WrongRequest(f"a bucket holds {iproute.BUCKET_BYTES} bytes, four full frames, at least: {self}")
        if max(self.buffer_bytes + self.under_way_bytes, self.bucket_bytes) > _BYTES_MAX:
            raise WrongRequest(
                f"a port holds 4 GB at most, in its bucket, and in its buffer and under way together: {self}"
            )

    @property
    def under_way_bytes(self) -> float:
        """What the delay keeps under way at full rate: on the wire, not in the buffer."""
        return self.rate_mbit * 1e3 * self.delay_ms / 8


@dataclass(frozen=True)
class PortCount:
    """Packets that left through a port since it was made, and those that were lost there by chance or for want of room."""

    passed: int
    lost: int


class Switch(ABC):
    """One rail's switch.

    Attributes:
        changed: ports whose queue others have changed since `set`: what they do nobody here knows.
    """

    changed: AbstractSet[int] = frozenset()

    @abstractmethod
    def set(self, settings: Mapping[int, Port]) -> None:
        """Has ports do this from now on; `check` has been asked before whether this kind of switch can.

        Raises:
            LabError: it could not; some of the ports may have changed.
        """

    @abstractmethod
    def count(self, port: int) -> PortCount:
        """What a port did so far."""

    @abstractmethod
    def close(self) -> None:
        """Ends it."""


class BridgeSwitch(Switch):
    """A bridge of this kernel; `losses` draws them where there is no netem, and is shared by all rails."""

    def __init__(self, name: str, macs: dict[str, str], losses: PortLosses | None, mtu_bytes: int) -> None:
        """Adds the bridge, its ports, and for each port the link address behind it: frames never go to other ports too."""
        self._name, self._ports, self._losses = name, list(macs), losses
        self._bucket_min = 4 * (mtu_bytes + 14)
        self._cut: set[str] = set()
        iproute.add_queueing_bridge(name, mtu_bytes, "mcast_snooping 0")
        iproute.ip(*(f"link set {port} master {name}" for port in macs))
        iproute.bridge(*(f"fdb add {mac} dev {port} master static" for port, mac in macs.items()))

    def set(self, settings: Mapping[int, Port]) -> None:
        """See `Switch`."""
        for number, port in settings.items():
            device = self._ports[number]
            iproute.tc(*self._queue(device, port))
            if port.is_cut != (device in self._cut):
                self._let_pass(device, passes=not port.is_cut)
        if self._losses is not None:
            self._losses.set({self._ports[number]: port.loss for number, port in settings.items()})

    def _queue(self, device: str, port: Port) -> list[str]:
        bucket = max(port.bucket_bytes, self._bucket_min)
        if self._losses is None:
            return netem.port_queue(
                device, port.rate_mbit, port.delay_ms, port.buffer_bytes, loss=port.loss, burst=port.burst, bucket_bytes=bucket
            )  # fmt: skip
        rate = f"rate {port.rate_mbit}mbit burst {bucket} limit {port.buffer_bytes}"
        return [f"qdisc replace dev {device} root handle 1: tbf {rate}"]

    def _let_pass(self, device: str, *, passes: bool) -> None:
        """Has a port forward frames, or none in either direction; the link stays up, so nobody is told."""
        iproute.bridge(f"link set dev {device} state {3 if passes else 0}")
        self._cut ^= {device}

    def count(self, port: int) -> PortCount:
        """See `Switch`."""
        device = self._ports[port]
        mine = {q["kind"]: q for q in iproute.tc_statistics() if q["dev"] == device}
        lost = mine["tbf"]["drops"] + (0 if self._losses is None else self._losses.lost(device))
        return PortCount(mine["tbf"]["packets"], lost)

    def close(self) -> None:
        """See `Switch`."""
        iproute.ip(f"link del {self._name}")


class PortLosses:
    """Losses of all bridges' ports by one packet filter. A change zeroes the filter's counters, which are kept here."""

    def __init__(self, ports: list[str]) -> None:
        """Raises LabError where the kernel has no packet filters for bridges."""
        self._filter = LossFilter()
        self._shares = dict.fromkeys(ports, 0.0)
        self._before = dict.fromkeys(ports, 0)
        self._filter.set_port_losses(self._shares)

    def set(self, shares: Mapping[str, float]) -> None:
        """Loses these shares of the frames that leave through ports; those of other ports stay. One change, however many they are."""
        if any(self._shares[port] != share for port, share in shares.items()):
            counted = self._filter.port_counters(list(self._shares))
            self._before = {port: before + counted[port].dropped for port, before in self._before.items()}
            self._shares.update(shares)
            self._filter.set_port_losses(self._shares)

    def lost(self, port: str) -> int:
        """Frames dropped so far."""
        return self._before[port] + self._filter.port_counters(list(self._shares))[port].dropped

    def close(self) -> None:
        """Leaves the filter; it goes with the network namespace."""
        self._filter.close()


@dataclass(frozen=True)
class _Queue:
    """What the switch's kernel says about a port: its queueing disciplines without counters, and the counters of the first."""

    disciplines: tuple[str, ...]
    passed: int
    lost: int


class UmlRail(Switch):
    """A user-mode-linux kernel as a router."""

    def __init__(self, ports: list[str], mtu_bytes: int) -> None:
        """Boots it."""
        self._switch = UmlSwitch(ports, mtu_bytes)
        self._before = dict.fromkeys(range(len(ports)), PortCount(0, 0))  # in queues that are no more
        self.changed: set[int] = set()
        self._bucket_min = 4 * (mtu_bytes + 14)
        self._switch.run("echo 1 > /proc/sys/net/ipv4/ip_forward")

    def join(self, port: int, mac: str, host_mac: str, addresses: list[str], mtu_bytes: int) -> None:
        """Gives a port its link address and the way to a host, whatever address of it a packet names."""
        device = f"vec{port}"
        self._switch.run(f"ip link set {device} address {mac} mtu {mtu_bytes} up")
        for address in addresses:
            self._switch.run(
                f"ip route add {address}/32 dev {device}",
                f"ip neigh add {address} lladdr {host_mac} dev {device} nud permanent",
            )

    def set(self, settings: Mapping[int, Port]) -> None:
        """See `Switch`."""
        for number, port in settings.items():
            self._set(number, port)

    def _set(self, port: int, settings: Port) -> None:
        loss = 1.0 if settings.is_cut else settings.loss
        if port in self.changed:  # tc replaces no discipline by one of another kind that has the same handle
            self.run([f"tc qdisc del dev vec{port} root 2>/dev/null || true"])
        self._switch.shape(
            port,
            settings.rate_mbit,
            settings.delay_ms,
            loss,
            settings.buffer_bytes,
            burst=settings.burst,
            bucket_bytes=max(settings.bucket_bytes, self._bucket_min),
        )
        device = f"vec{port}"
        self._switch.run(f"tc qdisc del dev {device} ingress 2>/dev/null || true")
        if settings.is_cut:
            self._switch.run(
                f"tc qdisc add dev {device} ingress",
                f"tc filter add dev {device} parent ffff: matchall action drop",
            )
        self.changed.discard(port)

    def count(self, port: int) -> PortCount:
        """See `Switch`."""
        now, before = self._queues()[port], self._before[port]
        return PortCount(before.passed + now.passed, before.lost + now.lost)

    def run(self, commands: Sequence[str]) -> str:
        """Runs shell commands, one line each, where the ports are vec0, vec1 and so on; returns what they print.

        Raises:
            LabError: a command fails; those before it have run.
        """
        said, queues = [], self._queues()
        for command in commands:
            try:
                said.append(self._switch.run(command))
            finally:
                queues = self._settled(queues)
        return "\n".join(filter(None, said))

    def _settled(self, before: Mapping[int, _Queue]) -> dict[int, _Queue]:
        """What the queues are now; keeps the counts of those that are no more, as a new one begins at zero."""
        queues = self._queues()
        for port, now in queues.items():
            was, kept = before[port], self._before[port]
            if now.passed < was.passed or now.lost < was.lost:
                self._before[port] = PortCount(kept.passed + was.passed, kept.lost + was.lost)
            if now.disciplines != was.disciplines:
                self.changed.add(port)
        return queues

    def _queues(self) -> dict[int, _Queue]:
        """Of each port."""
        said = self._switch.run("tc -s -j qdisc show")
        found: dict[int, list[dict[str, Any]]] = {port: [] for port in self._before}
        for discipline in json.loads(said):
            if discipline["dev"].startswith("vec"):
                found[int(discipline["dev"].removeprefix("vec"))].append(discipline)
        return {port: _queue_of(mine) for port, mine in found.items()}

    def close(self) -> None:
        """See `Switch`."""
        self._switch.close()


def _queue_of(disciplines: list[dict[str, Any]]) -> _Queue:
    """Every device has one that is its root, which counts what its children pass and lose."""
    (root,) = (each for each in disciplines if each.get("root"))
    names = ("kind", "handle", "parent", "options")
    texts = (json.dumps([each.get(name) for name in names]) for each in disciplines)
    return _Queue(tuple(texts), root["packets"], root["drops"])


class SoftRail(Switch):
    """The small program."""

    def __init__(self, ports: list[str]) -> None:
        """Starts it."""
        self._switch = SoftSwitch(ports)

    def set(self, settings: Mapping[int, Port]) -> None:
        """See `Switch`."""
        for number, port in settings.items():
            self._set(number, port)

    def _set(self, port: int, settings: Port) -> None:
        loss, again = settings.loss, settings.loss
        if settings.burst > 1 and 0 < loss < 1:
            again = 1 - 1 / settings.burst
            loss = (1 - again) * loss / (1 - loss)
        self._switch.shape(port, _link(settings), loss, again)
        self._switch.cut(port, settings.is_cut)

    def count(self, port: int) -> PortCount:
        """See `Switch`."""
        counters = self._switch.port_counters(port)
        lost = counters.lost + counters.overflowed
        return PortCount(counters.seen - lost, lost)

    def close(self) -> None:
        """See `Switch`."""
        self._switch.close()


def check(kind: str, mtu_bytes: int, port: Port) -> None:
    """Whether ports of a switch of this kind can do this with packets of this size.

    Args:
        kind: one of `KINDS`; `auto`: whatever will be chosen.
        mtu_bytes: the largest IP packet.
        port: what is asked for.

    Raises:
        WrongRequest: they cannot.
    """
    if mtu_bytes + 14 > port.buffer_bytes:
        raise WrongRequest(f"a buffer of {port.buffer_bytes} bytes holds no packet of {mtu_bytes}: a larger one")
    if kind == "soft":
        if mtu_bytes > _SOFT_MTU:
            raise WrongRequest(f"the switch `soft` carries {_SOFT_MTU} bytes at most: another one, or a smaller MTU")
        if port.bucket_bytes > iproute.BUCKET_BYTES:
            raise WrongRequest("the small program has no token bucket: its kind must be uml, nft or netem")
        check_room(_link(port))
    if kind == "nft" and (port.delay_ms or port.burst > 1):
        what = "a delay needs" if port.delay_ms else "losses in bursts need"
        raise WrongRequest(f"{what} netem, which a switch of kind nft does without: use --switch uml or soft")


def _link(port: Port) -> Link:
    return Link(port.rate_mbit, port.buffer_bytes, port.delay_ms)


def choose(kind: str, mtu_bytes: int = _SOFT_MTU) -> str:
    """The kind that `auto` stands for here: what needs least of the machine and can do everything, first."""
    if kind in KINDS:
        return kind
    if kind != "auto":
        raise WrongRequest(f"a switch is auto, {', '.join(KINDS)}, not {kind}")
    if netem.available():
        return "netem"
    if shutil.which(PROGRAM) is not None and _has_compiler():
        return "uml"
    return "soft" if _has_compiler() and mtu_bytes <= _SOFT_MTU else "nft"


def _has_compiler() -> bool:
    return any(map(shutil.which, ("cc", "gcc", "clang")))
