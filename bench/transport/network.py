"""What both transport benchmarks share: the shaped network, one gradwire flow, one TCP flow, and what both delivered.

    host 0 ---\
    host 1 ----+-- switch (a program of the lab): rate, delay, loss and a buffer of so many bytes at each port
    host 2 ---/

Hosts send at twice the rate of the switch's ports, so that a queue stands in the switch, whose buffer drops, and not in
the sender's own kernel, which would push back instead.

Goodput is counted at the receiver: payload bytes that the application got. A link of 200 Mbit/s (Ethernet headers
included, as tbf counts) cannot carry so much payload, so shares are of what it can: rate times payload over frame.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import GRADWIRE
from gradwire.lab import LabError, Link, ToolMissing
from gradwire.lab.soft_cluster import SoftCluster

ROOT = Path(__file__).resolve().parents[2]

HOST_RATE_FACTOR = 2.0
UDP = "udp"
# Payload and headers of a full frame.
FRAME_BYTES = {GRADWIRE: 1408 + 24 + 8 + 20 + 14, "tcp": 1448 + 32 + 20 + 14, UDP: 1448 + 8 + 20 + 14}
PAYLOAD_BYTES = {GRADWIRE: 1408, "tcp": 1448, UDP: 1448}
IPERF_PORT = 5201
TCP_BUFFER_BYTES = 32 << 20  # so that no socket buffer limits TCP, which grows into it by itself


def payload_mbit(flow: str, rate_mbit: float) -> float:
    """The most payload, in Mbit/s, that a link of this rate carries for a flow."""
    kind = flow if flow in FRAME_BYTES else "tcp"
    return rate_mbit * PAYLOAD_BYTES[kind] / FRAME_BYTES[kind]


@dataclass
class Flow:
    """What one flow delivered.

    Attributes:
        name: `gradwire` or TCP's congestion control.
        bytes: payload that arrived while it ran.
        seconds: how long it ran.
        timeline: (seconds since the start, bytes until then), in order.
        begun: when it started, seconds of the monotonic clock; for TCP when its program did.
        counters: whatever else its program reports.
    """

    name: str
    bytes: int
    seconds: float
    timeline: list[tuple[float, int]] = field(default_factory=list)
    begun: float = 0.0
    counters: dict[str, Any] = field(default_factory=dict)

    @property
    def mbit(self) -> float:
        """Goodput in Mbit/s."""
        return self.bytes * 8e-6 / self.seconds

    @property
    def ended(self) -> float:
        """The last time of the timeline, seconds of the monotonic clock."""
        return self.begun + (self.timeline[-1][0] if self.timeline else 0.0)

    def bytes_between(self, start: float, end: float) -> float:
        """Bytes delivered between two times of the monotonic clock."""
        return self.bytes_at(end - self.begun) - self.bytes_at(start - self.begun)

    def bytes_at(self, at: float) -> float:
        """Bytes delivered in the first `at` seconds, between the points of the timeline on a straight line."""
        before = (0.0, 0)
        for point in self.timeline:
            if point[0] >= at:
                return before[1] + (point[1] - before[1]) * (at - before[0]) / max(point[0] - before[0], 1e-9)
            before = point
        return before[1]


def link_of(rate_mbit: float, rtt_ms: float, buffer_bytes: int) -> Link:
    """A link whose round trip, without queues, is `rtt_ms`."""
    return Link(rate_mbit, buffer_bytes, rtt_ms / 2, host_rate_mbit=HOST_RATE_FACTOR * rate_mbit)


def bdp_bytes(rate_mbit: float, rtt_ms: float) -> int:
    """Bandwidth-delay product."""
    return int(rate_mbit * 1e3 * rtt_ms / 8)


class Ground:
    """The network, with the programs that send over it. A context manager, used inside `sandbox.run`."""

    def __init__(self, hosts: int, link: Link, stream: Path) -> None:
        """Starts the switch.

        Args:
            hosts: how many.
            link: of each host.
            stream: the built example `stream`.

        Raises:
            ToolMissing: iperf3 or a C compiler is not installed.
        """
        if shutil.which("iperf3") is None:
            raise ToolMissing("iperf3 not found: install it (apt install iperf3)")
        self._stream = stream
        self.cluster = SoftCluster(hosts, link)
        for host in range(hosts):
            with self.cluster.on_host(host):
                for name in ("tcp_rmem", "tcp_wmem"):
                    Path(f"/proc/sys/net/ipv4/{name}").write_text(f"4096 131072 {TCP_BUFFER_BYTES}")
        self._pool = ThreadPoolExecutor(8)

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self.cluster.close()

    def gradwire(
        self, sender: int, receiver: int, size: int, seconds: float, when_ready: Callable[[], None] = lambda: None
    ) -> Flow:
        """One transfer of `size` bytes, given up after `seconds`. Blocks until it is over.

        Args:
            sender: host that sends.
            receiver: host that receives.
            size: of the transfer, bytes.
            seconds: after which it is given up.
            when_ready: called when both ends have filled their memory and are about to connect.

        Raises:
            LabError: an end failed; a value arrived wrong.
        """
        ends = [self._start_end(rank, host, size, seconds) for rank, host in ((0, sender), (1, receiver))]
        records = "".join(end.stdout.readline() for end in ends)  # type: ignore[union-attr]
        when_ready()
        outputs = list(self._pool.map(lambda end: end.communicate(records, timeout=seconds + 60), ends))
        for end, (_, errors) in zip(ends, outputs, strict=True):
            if end.returncode != 0:
                raise LabError(f"{end.args} failed: {errors.strip()}")
        sent, received = ([json.loads(line) for line in output.splitlines()] for output, _ in outputs)
        last = received[-1]
        if last["wrong"]:
            raise LabError(f"{last['wrong']} words of {size // 4} arrived wrong")
        begun = sent[-1]["begun"]
        timeline = [(line["at"] - begun, line["bytes_received"]) for line in received[:-1]]
        counters = {"sender": sent, "receiver": received}
        return Flow(GRADWIRE, last["bytes"], last["ended"] - begun, timeline, begun, counters)

    def _start_end(self, rank: int, host: int, size: int, seconds: float) -> subprocess.Popen[str]:
        command = [str(self._stream), "--rank", str(rank), "--bytes", str(size // 4 * 4), "--seconds", str(seconds)]
        pipe = subprocess.PIPE
        return self.cluster.spawn(host, command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def tcp(self, algorithm: str, sender: int, receiver: int, seconds: float) -> Flow:
        """One iperf3 flow for so many seconds. Blocks until it is over.

        Raises:
            LabError: iperf3 failed.
        """
        self.cluster.set_congestion_control(algorithm)
        return self._iperf(algorithm, sender, receiver, seconds, ["--interval", "0.1"])

    def pair(self, algorithm: str, size: int, seconds: float) -> tuple[Flow, Flow]:
        """One gradwire flow from host 0 and one TCP flow from host 1, both to host 2, at the same time.

        Raises:
            LabError: either failed.
        """
        self.cluster.set_congestion_control(algorithm)
        flags = ["--interval", "0.1"]
        started: list[Future[Flow]] = []
        # Filling half a gigabyte takes seconds on a busy machine: TCP would have the link for itself until then.
        ours = self.gradwire(
            0, 2, size, seconds, lambda: started.append(self._pool.submit(self._iperf, algorithm, 1, 2, seconds, flags))
        )
        return ours, started[0].result()

    def udp_ceiling(self, rate_mbit: float, seconds: float = 2.0) -> float:
        """Mbit/s of payload that arrive when more than the link carries is sent by UDP: what the lab itself can do."""
        flags = ["--udp", "--bitrate", f"{1.05 * rate_mbit}M", "--length", str(PAYLOAD_BYTES[UDP])]
        flow = self._iperf(UDP, 0, 1, seconds, flags)
        return flow.mbit

    def _iperf(self, name: str, sender: int, receiver: int, seconds: float, flags: list[str]) -> Flow:
        pipe, address = subprocess.PIPE, self.cluster.address(receiver)
        server = self.cluster.spawn(
            receiver, ["iperf3", "--server", "--one-off", "--json"], stdout=pipe, stderr=pipe, text=True
        )
        self._wait_until_listening(receiver)
        begun = time.monotonic()
        client = self.cluster.spawn(
            sender,
            ["iperf3", "--client", address, "--time", f"{max(1, round(seconds))}", "--json", *flags],
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        ends = (server, client)
        outputs = list(self._pool.map(lambda end: end.communicate(timeout=seconds + 60)[0], ends))
        at_server, at_client = (json.loads(output) for output in outputs)
        if "error" in at_client:
            raise LabError(f"iperf3: {at_client['error']}")
        return _flow_of(name, begun, at_server, at_client)

    def _wait_until_listening(self, host: int) -> None:
        wanted = f":{IPERF_PORT:04X}"
        ends = time.monotonic() + 10
        with self.cluster.on_host(host):
            while time.monotonic() < ends:
                for table in ("tcp", "tcp6"):
                    lines = Path(f"/proc/thread-self/net/{table}").read_text().splitlines()[1:]
                    if any(line.split()[1].endswith(wanted) and line.split()[3] == "0A" for line in lines):
                        return
                time.sleep(0.005)
        raise LabError("iperf3's server does not listen")


def _flow_of(name: str, begun: float, at_server: dict[str, Any], at_client: dict[str, Any]) -> Flow:
    """What arrived, by the server's own intervals. Of UDP an older iperf3 tells what was sent and the share that was lost."""
    end = at_client["end"]
    received = end.get("sum_received")
    total = received or end["sum"]
    timeline, until = [], 0
    for interval in at_server.get("intervals", []):
        until += interval["sum"]["bytes"]
        timeline.append((interval["sum"]["end"], until))
    lost = 0.0 if received else total.get("lost_percent", 0.0) / 100
    return Flow(name, int(total["bytes"] * (1 - lost)), total["seconds"], timeline, begun, {"end": end})


def build_stream(small: bool) -> Path:
    """Builds the sending program and returns its path.

    Args:
        small: nobody compares the numbers, so the tests' build serves, which `make test` has made already.

    Raises:
        ToolMissing: there is no Rust.
    """
    if shutil.which("cargo") is None:
        raise ToolMissing("cargo not found: install Rust (https://rustup.rs)")
    # The tests are of the whole workspace, where dependencies have other features than those of one package.
    profile, folder, of = (
        ("test", "debug", ["--workspace"]) if small else ("release", "release", ["--package", "gradwire-engine"])
    )
    command = ["cargo", "build", "--quiet", "--profile", profile, "--locked", "--offline", *of, "--example", "stream"]
    subprocess.run(command, cwd=ROOT, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), folder, "examples", "stream")
