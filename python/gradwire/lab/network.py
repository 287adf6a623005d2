r"""A small network on one machine whose every port can change while it runs: what `gradwire lab` builds.

    host 0: eth0 --veth-- p0x0 \                  host 0: eth1 --veth-- p1x0 \
    host 1: eth0 --veth-- p0x1  rail 0's switch   host 1: eth1 --veth-- p1x1  rail 1's switch
    ...                        /                  ...                        /

Each host has one link for each rail. Host h has the address 10.77.r.(h+1) on rail r, and what it sends from that address
takes that rail, whichever of the receiver's addresses it names: a program with several local addresses uses all rails. As in
`Cluster`, neighbours are entered by hand and offloads are off, and everything is gone when process 1 of the sandbox ends.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from gradwire.lab import iproute, offload
from gradwire.lab.errors import LabError, WrongRequest
from gradwire.lab.namespaces import Namespaces
from gradwire.lab.switches import BridgeSwitch, Port, PortLosses, SoftRail, Switch, UmlRail, check, choose

HOSTS_MAX, RAILS_MAX = 15, 8  # hosts: those of the small switch program
_HOST_QUEUE_PACKETS = 1_000  # Linux's default transmit queue length
_LOOKS_MAX = 1_000  # for processes that started while others were ended: a millisecond each
_RULE_TABLE = 100  # the first of the routing tables, one for each rail


@dataclass(frozen=True)
class Layout:
    """What a network is made of, and what all its ports do at first.

    Attributes:
        hosts: how many.
        rails: links of each host.
        port: settings of every port.
        mtu_bytes: largest IP packet.
        switch: `auto`, `netem`, `uml`, `nft` or `soft`.
        host_rate_mbit: what a host's own devices send at; None: the ports' rate.
    """

    hosts: int = 4
    rails: int = 1
    port: Port = Port()  # noqa: RUF009  (frozen)
    mtu_bytes: int = 1500
    switch: str = "auto"
    host_rate_mbit: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= HOSTS_MAX or not 1 <= self.rails <= RAILS_MAX:
            raise WrongRequest(f"1 to {HOSTS_MAX} hosts and 1 to {RAILS_MAX} rails, not {self.hosts} and {self.rails}")
        if not 576 <= self.mtu_bytes <= 9000:
            raise WrongRequest(f"an MTU is between 576 and 9000 bytes, not {self.mtu_bytes}")
        check(self.switch, self.mtu_bytes, self.port)


class Network:
    """A running network. A context manager; needs rights over the current network namespace."""

    def __init__(self, layout: Layout | None = None) -> None:
        """Builds it.

        Raises:
            LabError: the kernel lacks what is asked for.
            ToolMissing: a program is not installed.
        """
        self.layout = layout or Layout()
        iproute.require()
        self.kind = choose(self.layout.switch, self.layout.mtu_bytes)
        check(self.kind, self.layout.mtu_bytes, self.layout.port)
        self._namespaces = Namespaces()
        self._is_closed = False
        self._switches: list[Switch] = []
        self._losses: PortLosses | None = None
        self._ports: dict[tuple[int, int], Port] = {}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(host: int, rail: int = 0) -> str:
        """IPv4 address of a host."""
        return f"10.77.{rail}.{host + 1}"

    def ports(self) -> dict[tuple[int, int], Port]:
        """Settings of each port, by (host, rail)."""
        return dict(self._ports)

    def set(self, hosts: Sequence[int], rails: Sequence[int], **changes: Any) -> None:
        """Changes fields of `Port` for these hosts' ports; no hosts or no rails: all of them.

        Raises:
            WrongRequest: there is no such port, or the switch cannot do it; nothing has changed.
            LabError: a switch could not all the same; the ports of the rails before have changed.
        """
        settings = {chosen: replace(self._ports[chosen], **changes) for chosen in self._chosen(hosts, rails)}
        for port in settings.values():
            check(self.kind, self.layout.mtu_bytes, port)
        self._set(settings)

    def _set(self, settings: Mapping[tuple[int, int], Port]) -> None:
        """Rail by rail."""
        for rail, switch in enumerate(self._switches):
            of_rail = {chosen: port for chosen, port in settings.items() if chosen[1] == rail}
            if of_rail:
                switch.set({host: port for (host, _), port in of_rail.items()})
                self._ports.update(of_rail)

    def set_host_rate(self, host: int, rate_mbit: float) -> None:
        """Has a host's own devices send at this rate from now on; `set` is about what comes to it."""
        with self.on_host(host):
            iproute.tc(*(self._host_queue("change", rail, rate_mbit) for rail in range(self.layout.rails)))

    def set_congestion_control(self, algorithm: str) -> None:
        """Has TCP connections made on the hosts from now on use `cubic`, `bbr` or another one that the kernel has.

        It is set on the routes, as only the machine's first network namespace may choose freely by sysctl.

        Raises:
            LabError: the kernel does not have it.
        """
        for host, rail in self._chosen([], []):
            device, address = f"eth{rail}", self.address(host, rail)
            routes = [f"10.77.{rail}.0/24 dev {device} proto kernel scope link src {address}"]
            if self.layout.rails > 1:
                routes.append(f"10.77.0.0/16 dev {device} src {address} table {_RULE_TABLE + rail}")
            with self.on_host(host):
                iproute.ip(*(f"route replace {route} congctl {algorithm}" for route in routes))

    def run_on_switch(self, rail: int, commands: Sequence[str]) -> str:
        """Runs shell commands, one line each, on a rail's switch, whose port towards host h is vec<h>; returns what they print.

        Of a port, `set` replaces what they have made of its queues.

        Raises:
            WrongRequest: the switch is not of kind `uml`, or there is no such rail.
            LabError: a command fails; those before it have run.
        """
        self._chosen([], [rail])
        switch = self._switches[rail]
        if not isinstance(switch, UmlRail):
            raise WrongRequest(
                "this switch takes no commands, as only one of kind uml does, which is a Linux kernel of its own"
            )
        return switch.run(commands)

    def statistics(self) -> list[dict[str, Any]]:
        """For each port its settings, what the switch counted towards the host, and what the host's device counted.

        Settings are None where `run_on_switch` has changed the port's queue since: what it does then nobody here knows.
        """
        rows = []
        for (host, rail), settings in self._ports.items():
            count, named = self._switches[rail].count(host), asdict(settings)
            if host in self._switches[rail].changed:
                named = dict.fromkeys(named)
            rows.append(
                {"host": host, "rail": rail, "address": self.address(host, rail), **named,
                 "passed": count.passed, "lost": count.lost, **self._device_counters(host, rail)}
            )  # fmt: skip
        return rows

    def spawn(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a program on a host; `options` are those of `subprocess.Popen`. It is ended by `close`."""
        self._chosen([host], [])
        return self._namespaces.spawn(host, command, **options)

    def check_hosts(self, hosts: Sequence[int]) -> None:
        """Raises WrongRequest where one of them is not there."""
        self._chosen(hosts, [])

    def signal(self, host: int, number: int) -> int:
        """Sends a signal to every process on a host, whoever started it; returns how many there were.

        Before a process hears of it, it may have started others, which are not among those that were looked up. So those that nobody can
        ignore, SIGKILL and SIGSTOP, are sent until no more processes are found.

        Raises:
            LabError: more came up each time.
        """
        self._chosen([host], [])
        found = self._namespaces.signal(host, number)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            return len(found)
        for _ in range(_LOOKS_MAX):
            more = self._namespaces.signal(host, number, found)
            if not more:
                return len(found)
            found |= more
        raise LabError(f"programs on host {host} start others faster than they are found")

    def on_host(self, host: int) -> AbstractContextManager[None]:
        """Within it, this thread's new sockets belong to the host."""
        return self._namespaces.on_host(host)

    def close(self) -> None:
        """Ends the programs that were started and the switches, and gives the namespaces up. The second time nothing is left to do."""
        if self._is_closed:
            return
        self._is_closed = True
        self._namespaces.end_programs()
        for switch in self._switches:
            switch.close()
        with suppress(LabError):  # the last that were asked for may never have been made
            iproute.ip(*(f"link del {_port(host, rail)}" for host, rail in self._chosen([], [])))
        if self._losses is not None:
            self._losses.close()
        self._namespaces.close()
        self._switches.clear()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _chosen(self, hosts: Sequence[int], rails: Sequence[int]) -> list[tuple[int, int]]:
        layout = self.layout
        for name, asked, count in (("host", hosts, layout.hosts), ("rail", rails, layout.rails)):
            wrong = [number for number in asked if not 0 <= number < count]
            if wrong:
                raise WrongRequest(f"there is no {name} {wrong[0]}: they are 0 to {count - 1}")
        return [(host, rail) for host in hosts or range(layout.hosts) for rail in rails or range(layout.rails)]

    def _build(self) -> None:
        layout = self.layout
        _switch_ipv6_off()  # or the switch's devices would send packets of their own
        iproute.ip("link set lo up")
        for _ in range(layout.hosts):
            self._namespaces.add()
        for rail in range(layout.rails):
            for host in range(layout.hosts):
                self._add_link(host, rail)
        if self.kind == "nft":
            self._losses = PortLosses([_port(h, r) for r in range(layout.rails) for h in range(layout.hosts)])
        for rail in range(layout.rails):
            self._switches.append(self._make_switch(rail))
        for host in range(layout.hosts):
            with self.on_host(host):
                self._set_up_host(host)
        if isinstance(self._switches[0], BridgeSwitch):
            iproute.wait_until_forwarding([_port(host, rail) for host, rail in self._chosen([], [])])
        self._ports = dict.fromkeys(self._chosen([], []), layout.port)
        self._set(self._ports)

    def _add_link(self, host: int, rail: int) -> None:
        port, device, mtu = _port(host, rail), f"eth{rail}", self.layout.mtu_bytes
        iproute.ip(
            f"link add {port} mtu {mtu} type veth peer name {device} address {_mac(host, rail)} mtu {mtu}",
            f"link set {device} netns {self._namespaces.path(host)}",
            f"link set {port} up",
        )
        offload.switch_off(port)

    def _make_switch(self, rail: int) -> Switch:
        layout = self.layout
        ports = [_port(host, rail) for host in range(layout.hosts)]
        if self.kind == "soft":
            return SoftRail(ports)
        if self.kind != "uml":
            macs = {port: _mac(host, rail) for host, port in enumerate(ports)}
            return BridgeSwitch(f"rail{rail}", macs, self._losses, layout.mtu_bytes)
        switch = UmlRail(ports, layout.mtu_bytes)
        for host in range(layout.hosts):
            addresses = [self.address(host, other) for other in range(layout.rails)]
            switch.join(host, _mac(host, rail, is_port=True), _mac(host, rail), addresses, layout.mtu_bytes)
        return switch

    def _set_up_host(self, host: int) -> None:
        _switch_ipv6_off()
        for name in ("all", "default"):  # an answer may come back on another rail than the one that the routes name
            Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
        iproute.ip("link set lo up")
        for rail in range(self.layout.rails):
            self._set_up_device(host, rail)

    def _set_up_device(self, host: int, rail: int) -> None:
        device, address, layout = f"eth{rail}", self.address(host, rail), self.layout
        offload.switch_off(device)
        peers = [other for other in range(layout.hosts) if other != host]
        is_router = self.kind == "uml"
        neighbours = [
            f"neigh add {self.address(peer, other)} lladdr {_mac(host if is_router else peer, rail, is_port=is_router)}"
            f" dev {device} nud permanent"
            for peer in peers
            for other in range(layout.rails)
        ]
        rate = layout.host_rate_mbit or layout.port.rate_mbit
        iproute.ip(f"addr add {address}/24 dev {device}", f"link set {device} up", *neighbours)
        iproute.tc(self._host_queue("add", rail, rate))
        if layout.rails > 1:
            table = _RULE_TABLE + rail
            iproute.ip(
                f"route add 10.77.0.0/16 dev {device} src {address} table {table}",
                f"rule add from {address} lookup {table}",
            )

    def _host_queue(self, verb: str, rail: int, rate_mbit: float) -> str:
        mtu = self.layout.mtu_bytes
        bucket = max(self.layout.port.bucket_bytes, 4 * (mtu + 14))
        return (
            f"qdisc {verb} dev eth{rail} root handle 1: tbf rate {rate_mbit}mbit burst {bucket}"
            f" limit {_HOST_QUEUE_PACKETS * mtu}"
        )

    def _device_counters(self, host: int, rail: int) -> dict[str, int]:
        with self.on_host(host):
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        words = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"eth{rail}:"))
        names = ("rx_bytes", "rx_packets", "tx_bytes", "tx_packets")
        return dict(zip(names, (int(words[place]) for place in (0, 1, 8, 9)), strict=True))


def _switch_ipv6_off() -> None:
    """In the current network namespace."""
    for name in ("all", "default"):
        with suppress(OSError):  # a kernel without IPv6 has nothing to switch off
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")


def _port(host: int, rail: int) -> str:
    return f"p{rail}x{host}"


def _mac(host: int, rail: int, *, is_port: bool = False) -> str:
    """Locally administered; the small switch program reads the host from the last byte."""
    return f"02:67:77:{rail:02x}:{int(is_port):02x}:{host + 1:02x}"
