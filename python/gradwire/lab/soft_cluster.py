"""The same small cluster, with `SoftSwitch` as its switch: delay on every machine, at a tenth of user-mode-linux's cost."""

from __future__ import annotations

from gradwire.lab.cluster import Cluster, Link
from gradwire.lab.loss_filter import LossCounters
from gradwire.lab.soft_switch import PortCounters, SoftSwitch


class SoftCluster(Cluster):
    """A `Cluster` whose switch is a program.

    `Link.delay_ms` is the one-way delay of one crossing of the switch, so a round trip takes twice of it.
    """

    def __init__(self, hosts: int, link: Link | None = None, loss: float = 0.0) -> None:
        """Builds the network and starts the switch.

        Raises:
            LabError: the switch does not start.
            ToolMissing: a C compiler, `ip` or `tc` is not installed.
        """
        self._switch: SoftSwitch | None = None
        super().__init__(hosts, link, loss)

    def set_link(self, link: Link, loss: float = 0.0) -> None:
        """Gives the switch's ports another rate, delay and buffer from now on; the hosts' own devices stay as they are."""
        self.link = link
        self.set_loss(loss)

    def set_loss(self, share: float) -> None:
        """Loses each packet that comes to a port with this probability from now on; zeroes the counters."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"loss is a share between 0 and 1, not {share}")
        assert self._switch is not None
        for port in range(self.hosts):
            self._switch.shape(port, self.link, share)

    def loss_counters(self) -> LossCounters:
        """Packets that came to the ports since `set_loss`, and those that were lost by chance."""
        counters = self.port_counters()
        return LossCounters(counters.seen, counters.lost)

    def port_counters(self) -> PortCounters:
        """The same with what the buffers dropped."""
        assert self._switch is not None
        return self._switch.counters()

    def close(self) -> None:
        """Ends the programs that were started, and the switch."""
        super().close()
        if self._switch is not None:
            self._switch.close()

    def _supports_delay(self) -> bool:
        return True

    def _build(self) -> None:
        self._switch = SoftSwitch(self._add_hosts_without_bridge())
        for host in range(self.hosts):
            with self.on_host(host):
                self._set_up_host(host)


__all__ = ["SoftCluster"]
