"""The same small cluster, with a real Linux kernel as its switch: links then have a delay on every machine.

    host i: eth0 --veth-- port i --raw socket-- [user-mode-linux: routes, and shapes each port]

All hosts keep their addresses in one network. A host's neighbour entries name the switch's interface for every peer, so
that the switch can route between them by address without a bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradwire.lab.cluster import MTU_BYTES, Cluster, Link, _mac
from gradwire.lab.loss_filter import LossCounters
from gradwire.lab.uml_switch import UmlSwitch


class UmlCluster(Cluster):
    """A `Cluster` whose switch is user-mode-linux.

    `Link.delay_ms` is the one-way delay of one crossing of a port, so a round trip takes twice of it.
    """

    def __init__(self, hosts: int, link: Link | None = None, loss: float = 0.0) -> None:
        """Builds the network and boots the switch.

        Raises:
            LabError: the switch does not start.
            ToolMissing: user-mode-linux, a C compiler, `ip` or `tc` is not installed.
        """
        self._switch: UmlSwitch | None = None
        super().__init__(hosts, link, loss)

    def set_link(self, link: Link, loss: float = 0.0) -> None:
        """Gives the switch's ports another rate, delay and buffer from now on; the hosts' own devices stay as they are."""
        self.link = link
        self.set_loss(loss)

    def set_loss(self, share: float) -> None:
        """Loses each packet that leaves a port with this probability from now on; zeroes the counters."""
        assert self._switch is not None
        for port in range(self.hosts):
            self._switch.shape(port, self.link.rate_mbit, self.link.delay_ms, share, self.link.buffer_bytes)
        self._before = self._count()

    def mark_long_queues(self, threshold_bytes: int) -> None:
        """From now on every port marks ECN-capable packets, and drops others, while its queue is longer than this.

        Replaces delay and random losses.
        """
        assert self._switch is not None
        for port in range(self.hosts):
            self._switch.mark_long_queues(port, self.link.rate_mbit, threshold_bytes, self.link.buffer_bytes)

    def configure(self, port: int, commands_of: Callable[[str], Sequence[str]]) -> None:
        """Runs shell commands on the switch for one port, for example those of `gradwire.switch.linux`.

        Replaces what the link says about that port: rate, delay, losses, buffer.

        Args:
            port: number of the host behind it.
            commands_of: given the port's name on the switch, the commands.
        """
        assert self._switch is not None
        self._switch.run(*commands_of(f"vec{port}"))

    def port_statistics(self, port: int) -> str:
        """What `tc -s qdisc show` says about a port."""
        assert self._switch is not None
        return self._switch.run(f"tc -s qdisc show dev vec{port}")

    def loss_counters(self) -> LossCounters:
        """Packets that left the ports since `set_loss`, and those that the ports dropped (by chance or for want of buffer)."""
        now = self._count()
        return LossCounters(now.seen - self._before.seen, now.dropped - self._before.dropped)

    def close(self) -> None:
        """Ends the programs that were started, and the switch."""
        super().close()
        if self._switch is not None:
            self._switch.close()

    def _supports_delay(self) -> bool:
        return True

    def _build(self) -> None:
        self._switch = UmlSwitch(self._add_hosts_without_bridge())
        self._switch.run("echo 1 > /proc/sys/net/ipv4/ip_forward")
        for host in range(self.hosts):
            self._join(host)
            with self.on_host(host):
                self._set_up_host(host)

    def _join(self, host: int) -> None:
        """Gives the switch its interface and its route to a host."""
        assert self._switch is not None
        device = f"vec{host}"
        self._switch.run(
            f"ip link set {device} address {_port_mac(host)} mtu {MTU_BYTES} up",
            f"ip route add {self.address(host)}/32 dev {device}",
            f"ip neigh add {self.address(host)} lladdr {_mac(host)} dev {device} nud permanent",
        )

    def _neighbour(self, host: int, peer: int) -> str:  # noqa: ARG002  (all peers are behind the switch)
        return _port_mac(host)

    def _count(self) -> LossCounters:
        assert self._switch is not None
        lost = sent = 0
        for port in range(self.hosts):
            for line in self._switch.run(f"tc -s qdisc show dev vec{port}").split("qdisc "):
                words = line.split()
                if words[:1] == ["netem"]:
                    sent += int(words[words.index("pkt") - 1])
                    lost += int(words[words.index("(dropped") + 1].rstrip(","))
        return LossCounters(sent + lost, lost)


def _port_mac(host: int) -> str:
    return f"02:67:77:00:01:{host + 1:02x}"  # locally administered


__all__ = ["UmlCluster"]
