"""The network that a benchmark runs over: the bare loopback device, a bridge of virtual links, or a network of the lab.

    loopback   all ranks in one namespace
    bridge     a namespace for each rank, veth and a bridge with their offloads on, MTU 1500, no shaping
    lab, ...   `gradwire.lab.network`: rate, delay, loss and buffer of each port, and several rails

Everything is made inside the sandbox's namespaces and gone with them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from gradwire.bench.plan import (
    GRAY_LOSS,
    HEALTHY,
    INCAST_BUFFER_PACKETS,
    KERNEL,
    SLOW_SHARE,
    Condition,
    NetworkPlan,
)
from gradwire.lab import Link, iproute, netem
from gradwire.lab.crew import rendezvous_environment
from gradwire.lab.loss_filter import LossCounters
from gradwire.lab.namespaces import Namespaces, Program, Start
from gradwire.lab.network import Layout, Network
from gradwire.lab.probe import probe_loss, probe_round_trip_ms
from gradwire.lab.switches import Port, choose

FRAME_BYTES = 1514
_PORT_BASE = 29_400


class Ground:
    """Hosts 0 to n - 1, of which each has one rank. A context manager."""

    def __init__(self, hosts: int, plan: NetworkPlan) -> None:
        """Builds it.

        Raises:
            LabError: the kernel lacks what is asked for.
            ToolMissing: a program is not installed.
        """
        self.hosts, self.plan = hosts, plan
        self.link = Link(plan.rate_mbit, plan.buffer_bytes)
        self.network: Network | None = None
        self._namespaces: Namespaces | None = None
        self._children: list[Program] = []
        self._now: Condition | None = None
        iproute.require()
        if plan.kind == "loopback":
            iproute.ip("link set lo up")
        elif plan.kind == "bridge":
            self._namespaces = Namespaces()
            self._build_bridge()
        else:
            self.network = Network(layout_of(hosts, plan))

    @property
    def kind(self) -> str:
        """Its kind, with what `lab` stands for here."""
        return self.network.kind if self.network else self.plan.kind

    def address(self, host: int) -> str:
        """IPv4 address of a host's first link."""
        return "127.0.0.1" if self.plan.kind == "loopback" else Network.address(host)

    def environment(self, rank: int, crew: int = 0) -> dict[str, str]:
        """What the process of a rank needs to meet the others of its crew.

        Of several rails gradwire uses all at once; gloo gets all devices and takes them by turns, call by call.
        """
        device = "lo" if self.plan.kind == "loopback" else ",".join(f"eth{rail}" for rail in range(self.plan.rails))
        local = rank if self.plan.kind == "loopback" else 0
        meeting = rendezvous_environment(rank, self.hosts, self.address(0), device, local)
        found = {**meeting, "MASTER_PORT": str(_PORT_BASE + crew), "GRADWIRE_PORT": "0"}
        if self.plan.rails > 1 and "GRADWIRE_PATHS" not in os.environ:
            found["GRADWIRE_PATHS"] = str(self.plan.rails)
        return found

    def spawn(self, host: int, command: Sequence[str], *, start: Start = subprocess.Popen, **options: Any) -> Any:
        """Starts a program on a host by `start(command, **options)`, which returns it."""
        if self.network is not None:
            return self.network.spawn(host, command, start=start, **options)
        if self._namespaces is not None:
            return self._namespaces.spawn(host, command, start=start, **options)
        child = start(command, **options)
        self._children.append(child)
        return child

    def on_host(self, host: int) -> AbstractContextManager[None]:
        """Within it, this thread's new sockets belong to the host; not over loopback, where there is one."""
        holder = self.network or self._namespaces
        assert holder is not None
        return holder.on_host(host)

    def use_tcp(self, algorithm: str) -> None:
        """Has TCP connections that are made from now on use `cubic`, `bbr` or another one that the kernel has.

        It is set on the routes, as only the machine's first network namespace may choose freely by sysctl.

        Raises:
            LabError: the kernel does not have it.
        """
        if self.network is not None:
            self.network.set_congestion_control(algorithm)
        elif self._namespaces is not None:
            for host in range(self.hosts):
                with self.on_host(host):
                    route = f"10.77.0.0/24 dev eth0 proto kernel scope link src {self.address(host)}"
                    iproute.ip(f"route replace {route} congctl {algorithm}")
        else:
            for route in ("127.0.0.0/8", "127.0.0.1/32"):
                local = "dev lo table local proto kernel scope host src 127.0.0.1"
                iproute.ip(f"route replace local {route} {local} congctl {algorithm}")

    def set(self, condition: Condition) -> None:
        """Has the network do this from now on."""
        if condition == self._now or self.network is None:
            return
        self._now = condition
        self.link = replace(self.link, delay_ms=condition.rtt_ms / 2)
        buffer = INCAST_BUFFER_PACKETS * FRAME_BYTES if condition.scenario == "incast" else self.plan.buffer_bytes
        self.network.set(
            [], [], loss=condition.loss, delay_ms=self.link.delay_ms, buffer_bytes=buffer, rate_mbit=self.plan.rate_mbit
        )
        if condition.scenario == "gray":
            self.network.set([], [self.plan.rails - 1], loss=max(condition.loss, GRAY_LOSS))
        slow = self.plan.rate_mbit * (SLOW_SHARE if condition.scenario == "slow-host" else 1.0)
        self.network.set([self.hosts - 1], [], rate_mbit=slow)
        self.network.set_host_rate(self.hosts - 1, slow)

    def count(self, conditions: Sequence[Condition]) -> dict[str, Any]:
        """What the network does to packets between two hosts, counted before anything is measured over it."""
        facts: dict[str, Any] = {"switch": self.kind}
        if self.kind == "uml" and self.network is not None:
            facts["switch_kernel"] = self.network.run_on_switch(0, ["uname -r"]).strip()
        if self.plan.kind == "loopback":
            return facts
        for rtt_ms in dict.fromkeys(each.rtt_ms for each in conditions):
            self.set(Condition(rtt_ms=rtt_ms))
            facts[f"counted_rtt_ms_at_{rtt_ms:g}"] = round(probe_round_trip_ms(self), 4)
        for condition in dict.fromkeys(replace(each, scenario=HEALTHY) for each in conditions):
            if condition.loss:
                self.set(condition)
                facts[f"counted_loss_at_{condition.loss:g}"] = probe_loss(self).share
        for condition in (each for each in conditions if each.scenario == "gray"):
            self.set(condition)
            gray = _Rail(self, self.plan.rails - 1)
            facts[f"counted_gray_loss_at_{max(condition.loss, GRAY_LOSS):g}"] = probe_loss(gray).share
        self.set(Condition())
        return facts

    def loss_counters(self) -> LossCounters:
        """Packets that came to the switch's ports since it was made, and those that were lost there; 0 where there is no such switch."""
        rows = [] if self.network is None else self.network.statistics()
        lost = sum(row["lost"] for row in rows)
        return LossCounters(sum(row["passed"] for row in rows) + lost, lost)

    def close(self) -> None:
        """Ends the programs and the network."""
        for child in self._children:
            child.terminate()
            child.wait()
        self._children.clear()
        if self.network is not None:
            self.network.close()
        if self._namespaces is not None:
            self._namespaces.end_programs()
            self._namespaces.close()

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build_bridge(self) -> None:
        assert self._namespaces is not None
        mtu = self.plan.mtu_bytes
        iproute.add_bridge("switch", mtu)
        iproute.ip("link set lo up")
        for host in range(self.hosts):
            namespace = self._namespaces.path(self._namespaces.add())
            iproute.ip(
                f"link add port{host} mtu {mtu} type veth peer name eth0 mtu {mtu}",
                f"link set eth0 netns {namespace}",
                f"link set port{host} master switch up",
            )
            with self.on_host(host):
                iproute.ip("link set lo up", f"addr add {self.address(host)}/24 dev eth0", "link set eth0 up")
        iproute.wait_until_forwarding([f"port{host}" for host in range(self.hosts)])


class _Rail:
    """A network of which one rail is probed: who names an address of it takes it."""

    def __init__(self, ground: Ground, rail: int) -> None:
        self.link, self.on_host, self._rail = ground.link, ground.on_host, rail
        self.loss_counters = ground.loss_counters

    def address(self, host: int) -> str:
        """See `Probed`."""
        return Network.address(host, self._rail)


def layout_of(hosts: int, plan: NetworkPlan) -> Layout:
    """The lab's network. Several rails are switched by the small program: another kernel would need a core for each.

    Raises:
        LabError: no switch of this kind can do it.
    """
    kind = "auto" if plan.kind == "lab" else plan.kind
    if kind == "auto" and plan.rails > 1 and choose("auto") == "uml":
        kind = "soft"
    if kind == KERNEL:
        kind = "netem" if netem.available() else "nft"
    port = Port(
        rate_mbit=plan.rate_mbit, buffer_bytes=plan.buffer_bytes, bucket_bytes=plan.bucket_bytes or iproute.BUCKET_BYTES
    )
    return Layout(hosts, plan.rails, port, plan.mtu_bytes, kind)


def time_limit_s(size: int, plan: NetworkPlan) -> float:
    """How long a call may take: a hundred times what the bytes take at the link's rate, and two minutes."""
    rate = plan.rate_mbit if plan.is_shaped else 1000.0
    return 120.0 + 100 * size * 8 / (rate * 1e6)
