r"""A small cluster on one machine: hosts in network namespaces, joined by a switch with a rate, a buffer and losses.

    host 0: eth0 --veth-- port0 \
    host 1: eth0 --veth-- port1  bridge, in the namespace that made the `Cluster`
    ...                         /

Each direction of each link is shaped at its sending end: a token bucket with a byte-limited buffer on the switch's
port (what a switch does) and on the host's device (what its network card does). Delay comes from netem; losses come from
`loss_filter`, or from netem in a kernel without packet filters for bridges. Both act on single packets, as all offloads are
off. Addresses, neighbours and interface names are fixed, so nothing is resolved over the lossy links.

Namespaces are held open by file descriptors only: call it inside `sandbox.run` and nothing is left when that ends.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gradwire.lab import iproute, netem, offload
from gradwire.lab.errors import LabError
from gradwire.lab.loss_filter import LossCounters, LossFilter
from gradwire.lab.namespaces import Namespaces
from gradwire.lab.netem import Emulation, NetemLoss

DEVICE = "eth0"  # the interface's name within each host
MTU_BYTES = 1500
_HOST_QUEUE_PACKETS = 1_000  # Linux's default transmit queue length


@dataclass(frozen=True)
class Link:
    """One host's link; the same for all hosts and both directions.

    Attributes:
        rate_mbit: bits on the wire in millions a second, Ethernet headers included.
        buffer_bytes: what the switch holds for one port before it drops; a few hundred KB is common for a port of a
            plain top-of-rack switch. Too small drops every burst, too big hides a sender that is too fast.
        delay_ms: one-way delay of one crossing of the switch; needs netem. A round trip has two crossings.
        host_rate_mbit: what the host's own device sends at; the link's rate unless given. A faster one moves the queue
            of a single flow from the host, which pushes back, into the switch, which drops.
    """

    rate_mbit: float = 100.0
    buffer_bytes: int = 256 * 1024
    delay_ms: float = 0.0
    host_rate_mbit: float | None = None

    def __post_init__(self) -> None:
        if self.rate_mbit <= 0 or self.buffer_bytes < 4 * MTU_BYTES or self.delay_ms < 0:
            raise LabError(f"a link needs a rate, a buffer of four packets at least, and no negative delay: {self}")
        if self.host_rate_mbit is not None and self.host_rate_mbit <= 0:
            raise LabError(f"a host's device needs a rate: {self}")


class Cluster:
    """Hosts 0 to n-1 at 10.77.0.1 and on. A context manager; needs rights over the current network namespace."""

    def __init__(self, hosts: int, link: Link | None = None, loss: float = 0.0) -> None:
        """Builds the network.

        Raises:
            LabError: the kernel lacks what the link asks for.
            ToolMissing: `ip` and `tc` are not installed.
        """
        self.link = link or Link()
        self.hosts = hosts
        iproute.require()
        self._namespaces = Namespaces()
        self.has_netem = netem.available()
        if self.link.delay_ms and not self._supports_delay():
            raise LabError("this kernel has no netem, so links cannot have a delay; use the user-mode-linux switch")
        self._filter = self._choose_filter()
        self._build()
        self.set_loss(loss)

    @staticmethod
    def address(host: int) -> str:
        """IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def set_loss(self, share: float) -> None:
        """Loses each packet that crosses the switch with this probability, 0 to 1, from now on; zeroes the counters."""
        self._filter.set_loss(share)

    def loss_counters(self) -> LossCounters:
        """Packets that crossed the switch since `set_loss`, and those of them that were lost on purpose."""
        return self._filter.counters()

    def spawn(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a program on a host; `options` are those of `subprocess.Popen`. It is ended by `close`."""
        return self._namespaces.spawn(host, command, **options)

    def on_host(self, host: int) -> AbstractContextManager[None]:
        """Within it, this thread's new sockets belong to the host."""
        return self._namespaces.on_host(host)

    def set_congestion_control(self, algorithm: str) -> None:
        """Has TCP connections made on the hosts from now on use `cubic`, `bbr` or another one that the kernel has.

        It is set on the route, as only the machine's first network namespace may choose freely by sysctl.

        Raises:
            LabError: the kernel does not have it.
        """
        for host in range(self.hosts):
            route = f"10.77.0.0/24 dev {DEVICE} proto kernel scope link src {self.address(host)}"
            with self.on_host(host):
                iproute.ip(f"route replace {route} congctl {algorithm}")

    def close(self) -> None:
        """Ends the programs that were started, asking first, and gives the namespaces up."""
        self._namespaces.end_programs()
        self._filter.close()
        self._namespaces.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _supports_delay(self) -> bool:
        return self.has_netem

    def _neighbour(self, host: int, peer: int) -> str:  # noqa: ARG002  (a bridge is the same for all)
        """The link address under which a host reaches a peer."""
        return _mac(peer)

    def _choose_filter(self) -> LossFilter | NetemLoss:
        """Packet filter first: it draws before the port's buffer, as a bad cable does, and it counts."""
        try:
            return LossFilter()
        except LabError:
            if not self.has_netem:
                raise
            return NetemLoss([f"port{host}" for host in range(self.hosts)], self._emulation())

    def _build(self) -> None:
        iproute.add_queueing_bridge("switch", MTU_BYTES)
        iproute.ip("link set lo up")
        for host in range(self.hosts):
            self._add_host(host, "master switch up")
            self._shape(f"port{host}", self.link.buffer_bytes)
            with self.on_host(host):
                self._set_up_host(host)
        iproute.wait_until_forwarding([f"port{host}" for host in range(self.hosts)])

    def _add_host(self, host: int, port_settings: str) -> str:
        """Makes a host's namespace and the link to it; returns the name of the switch's end, which gets these settings."""
        port, namespace = f"port{host}", self._namespaces.path(self._namespaces.add())
        iproute.ip(
            f"link add {port} type veth peer name {DEVICE} address {_mac(host)}",
            f"link set {DEVICE} netns {namespace}",
            f"link set {port} {port_settings}",
        )
        offload.switch_off(port)
        return port

    def _add_hosts_without_bridge(self) -> list[str]:
        """All hosts, for a switch that is a program; returns the names of its ports."""
        iproute.ip("link set lo up")
        return [self._add_host(host, f"mtu {MTU_BYTES} up") for host in range(self.hosts)]

    def _set_up_host(self, host: int) -> None:
        with suppress(OSError):  # a kernel without IPv6 has nothing to switch off
            Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        offload.switch_off(DEVICE)
        peers = [other for other in range(self.hosts) if other != host]
        iproute.ip(
            "link set lo up",
            f"addr add {self.address(host)}/24 dev {DEVICE}",
            f"link set {DEVICE} up",
            *(
                f"neigh add {self.address(p)} lladdr {self._neighbour(host, p)} dev {DEVICE} nud permanent"
                for p in peers
            ),
        )
        self._shape(DEVICE, _HOST_QUEUE_PACKETS * MTU_BYTES)

    def _shape(self, device: str, limit_bytes: int) -> None:
        mbit = self.link.host_rate_mbit if device == DEVICE and self.link.host_rate_mbit else self.link.rate_mbit
        rate = f"rate {mbit}mbit burst {iproute.BUCKET_BYTES} limit {limit_bytes}"
        iproute.tc(f"qdisc add dev {device} root handle 1: tbf {rate}")
        if device != DEVICE and (self.link.delay_ms or isinstance(self._filter, NetemLoss)):
            iproute.tc(
                self._emulation().command("add", device),
                f"qdisc add dev {device} parent 2: handle 4: bfifo limit {limit_bytes}",
            )

    def _emulation(self) -> Emulation:
        """The switch's port as netem: what its delay line holds at full rate is on the wire, not in the buffer, which is below it."""
        on_the_wire = self.link.rate_mbit * 1e3 * self.link.delay_ms / 8
        return Emulation(self.link.delay_ms, netem.packets_of(self.link.buffer_bytes + on_the_wire))


def _mac(host: int) -> str:
    return f"02:67:77:00:00:{host + 1:02x}"  # locally administered
