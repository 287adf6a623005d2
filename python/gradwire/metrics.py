"""Every metric of gradwire: its name, unit and labels, and where in `gradwire.stats()` it lies.

One catalogue for all ways out: the Prometheus endpoint, OpenTelemetry, and docs/metrics.md, which
`scripts/metrics_docs.py` makes of it. Names end in their unit (`_seconds`, `_bytes`, `_ratio`), counters in `_total`.
Importing this needs nothing but Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]

PREFIX = "gradwire_"
REASONS = ("all_arrived", "bound_met", "soft_threshold", "early_timeout", "deadline")
CAUSES = ("compute", "network", "receiver")
STAGES = ("reduce", "gather")


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as Prometheus shows it.
        kind: `counter` (only grows), `gauge` or `histogram`.
        scope: what there is one of: `engine`, `group`, `peer`, `path`, `call`, `stage`; decides the labels.
        key: where it lies in that part of the statistics; with `each`, the dictionary of its values.
        doc: what it counts.
        each: label whose values are the keys below `key`, and those keys.
        scale: from the statistics' unit to the name's.
        bounds: which histogram bounds.
    """

    name: str
    kind: Kind
    scope: str
    key: str
    doc: str
    each: tuple[str, Labels] | None = None
    scale: float = 1.0
    bounds: str = "seconds"

    @property
    def labels(self) -> Labels:
        """Names of its labels."""
        return SCOPES[self.scope] + (() if self.each is None else (self.each[0],))

    @property
    def unit(self) -> str:
        """For people: what the name says."""
        base = self.name.removesuffix("_total")
        return next((text for suffix, text in UNITS.items() if base.endswith(suffix)), "count")


@dataclass(frozen=True)
class Sample:
    """One value of a metric; of a histogram the counts of its buckets, not cumulative, and their sum."""

    metric: Metric
    labels: Labels
    value: float = 0.0
    counts: tuple[int, ...] = ()
    sum: float = 0.0


SCOPES: Mapping[str, Labels] = {
    "engine": (),
    "group": ("group", "rank"),
    "peer": ("group", "rank", "peer"),
    "path": ("group", "rank", "peer", "path"),
    "call": ("group", "rank", "collective", "preset"),
    "stage": ("group", "rank", "collective", "preset", "stage"),
}
UNITS = {
    "_bytes_per_second": "bytes per second",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_ratio": "share, 0 to 1",
    "_elements": "elements",
    "_packets": "packets",
    "_datagrams": "datagrams",
}


def _counter(scope: str, name: str, key: str, doc: str, **more: Any) -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", scope, key, doc, **more)


def _gauge(scope: str, name: str, key: str, doc: str, **more: Any) -> Metric:
    return Metric(PREFIX + name, "gauge", scope, key, doc, **more)


def _histogram(scope: str, name: str, key: str, doc: str, **more: Any) -> Metric:
    return Metric(PREFIX + name, "histogram", scope, key, doc, **more)


_ENDED_BY = ("ended_by", REASONS)
METRICS: tuple[Metric, ...] = (
    _counter("engine", "sent_datagrams", "datagrams_sent", "Datagrams handed to the kernel."),
    _counter("engine", "sent_bytes", "bytes_sent", "UDP payload bytes handed to the kernel."),
    _counter("engine", "send_calls", "send_calls", "Send system calls."),
    _counter(
        "engine",
        "apart_batches",
        "batches_apart",
        "Batches that the thread for it handed to the kernel (`send_thread`).",
    ),
    _counter("engine", "received_datagrams", "datagrams_received", "Datagrams received."),
    _counter("engine", "received_bytes", "bytes_received", "UDP payload bytes received."),
    _counter(
        "engine",
        "in_runs_datagrams",
        "datagrams_in_runs",
        "Datagrams that were taken with their neighbours at once, as receive offload brings them.",
    ),
    _counter("engine", "receive_calls", "receive_calls", "Receive system calls."),
    _counter(
        "engine", "unknown_datagrams", "datagrams_unknown", "Datagrams that carry no connection id of this process."
    ),
    _counter(
        "engine", "not_authentic_datagrams", "datagrams_not_authentic", "Datagrams that nobody with the keys had made."
    ),
    _counter("engine", "replayed_datagrams", "datagrams_replayed", "Sealed datagrams that had come before."),
    _counter("engine", "ecn_marked_datagrams", "ecn_marked", "Datagrams that came with a switch's congestion mark."),
    _counter(
        "engine",
        "send_refused_datagrams",
        "send_refused",
        "Datagrams that the kernel refused: no route, firewall, too large, or one of several cards that takes nothing.",
    ),
    _counter("engine", "send_blocked", "send_blocked", "Times that the kernel's send buffer was full."),
    _counter(
        "engine",
        "receive_overflow_datagrams",
        "receive_overflows",
        "Datagrams that the kernel dropped because the receive buffer was full.",
    ),
    _counter(
        "engine",
        "group_turns",
        "group_turns",
        "Times that the network thread turned to a group, for which something had come or was due.",
    ),
    _counter("engine", "sleeps", "sleeps", "Times that the network thread slept."),
    _counter("engine", "busy_polls", "busy_polls", "Times that it looked for packets again instead (`busy_poll_us`)."),
    _counter(
        "engine",
        "yields",
        "yields",
        "Times that it let other threads of its core go first, and then looked for packets again.",
    ),
    _counter("engine", "chaos_lost_datagrams", "chaos_lost", "Datagrams that fault injection has lost on purpose."),
    _counter(
        "engine",
        "seals_refused_datagrams",
        "seals_refused",
        "Datagrams not sent because their number had been used: a bug.",
    ),
    _gauge("group", "group_ranks", "world_size", "Ranks in the group."),
    _gauge(
        "group",
        "epoch",
        "epoch.number",
        "Times that the group went on with other members, since ranks were lost or have joined; absent where a lost rank ends it.",
    ),
    _gauge("group", "datagram_bytes", "datagram_bytes", "UDP payload of a full datagram."),
    _counter("group", "failed_calls", "calls_failed", "Collectives that ended with an error."),
    _gauge(
        "group",
        "waiting_seconds",
        "waiting.waited_s",
        "Age of the oldest collective that has not ended; absent where there is none.",
    ),
    _gauge(
        "group",
        "agreed_rtt_seconds",
        "agreed.rtt_us",
        "Round trip of the empty network, as all ranks agree.",
        scale=1e-6,
    ),
    _gauge("group", "agreed_rate_bytes_per_second", "agreed.rate", "What one rank can send, as all ranks agree."),
    _gauge(
        "group",
        "agreed_packet_loss_ratio",
        "agreed.packet_loss",
        "Packets that the network lost lately, as all ranks agree.",
    ),
    _gauge(
        "group",
        "agreed_loss_ratio",
        "agreed.loss",
        "Share of packets lost lately, or of values that tolerant reductions ended without if that is more, as all ranks agree.",
    ),
    _gauge(
        "group",
        "agreed_slowest_link_ratio",
        "agreed.slowest_link",
        "Rate of the slowest rank's link beside the usual one, as all ranks agree; 1 where none is much slower.",
    ),
    _gauge(
        "group",
        "agreed_shares_cores",
        "agreed.shares_cores",
        "1 where some host has more ranks than cores, as all ranks agree; else 0.",
    ),
    _gauge(
        "group",
        "agreed_network_threads",
        "agreed.threads",
        "Network threads between which each rank divides large calls, as all ranks agree; 1 where none does.",
    ),
    _counter("group", "served_calls", "served.calls", "Reductions that this dedicated server took part in."),
    _counter("group", "served_expected_elements", "served.elems_expected", "Contributions that this server expected."),
    _counter(
        "group", "served_received_elements", "served.elems_received", "Contributions that arrived at this server."
    ),
    _counter("group", "served_received_bytes", "served.bytes_received", "Payload that arrived at this server."),
    _counter(
        "group", "served_sent_bytes", "served.bytes_sent", "Payload that this server sent, retransmissions included."
    ),
    _counter(
        "group", "served_retransmitted_bytes", "served.bytes_retransmitted", "Payload that this server sent again."
    ),
    _counter("peer", "peer_sent_packets", "packets_sent", "Data packets sent to the peer, retransmissions included."),
    _counter("peer", "peer_sent_bytes", "bytes_sent", "Payload sent to the peer, retransmissions included."),
    _counter("peer", "peer_retransmitted_packets", "packets_retransmitted", "Data packets sent again."),
    _counter("peer", "peer_lost_packets", "packets_lost", "Data packets to the peer taken for lost."),
    _counter("peer", "peer_received_packets", "packets_received", "Data packets from the peer that counted."),
    _counter("peer", "peer_received_bytes", "bytes_received", "Payload from the peer that counted."),
    _counter("peer", "peer_duplicate_packets", "packets_duplicate", "Data packets from the peer that arrived again."),
    _counter("peer", "peer_dropped_packets", "packets_dropped", "Packets from the peer dropped for another reason."),
    _counter(
        "peer",
        "peer_not_authentic_datagrams",
        "datagrams_not_authentic",
        "Datagrams that named the connection and were not authentic.",
    ),
    _counter(
        "peer",
        "peer_replayed_datagrams",
        "datagrams_replayed",
        "Sealed datagrams of the connection that had come before.",
    ),
    _counter(
        "peer",
        "peer_seals_refused_datagrams",
        "seals_refused",
        "Datagrams not sent because their number had been used: a bug.",
    ),
    _counter("peer", "peer_control_packets", "control_sent", "Control packets sent to the peer."),
    _counter("peer", "peer_probe_packets", "probes_sent", "Questions sent because nothing was heard."),
    _gauge("peer", "peer_rtt_seconds", "rtt_smoothed_us", "Smoothed round trip.", scale=1e-6),
    _gauge("peer", "peer_rtt_least_seconds", "rtt_min_us", "Least round trip.", scale=1e-6),
    _gauge("peer", "peer_bandwidth_bytes_per_second", "bandwidth", "Estimated bottleneck bandwidth to the peer."),
    _gauge("peer", "peer_congestion_window_bytes", "cwnd", "Congestion window."),
    _gauge("peer", "peer_silent_seconds", "silent_s", "How long nothing was heard from the peer."),
    _counter(
        "peer",
        "peer_straggler_seconds",
        "straggler.{}_s",
        "How long this rank waited for the peer alone, and why: it called later "
        "than the others (compute), its bytes came later (network), it took its bytes later (receiver). Overlapping collectives count "
        "once.",
        each=("cause", CAUSES),
    ),
    _counter(
        "peer",
        "peer_straggler_episodes",
        "straggler.{}_episodes",
        "Separate times that this rank waited so.",
        each=("cause", CAUSES),
    ),
    _counter("peer", "peer_important_sent_packets", "tags.important_sent", "Data packets sent as important."),
    _counter(
        "peer", "peer_important_received_packets", "tags.important_received", "Data packets that came as important."
    ),
    _counter(
        "peer",
        "peer_ecn_capable_packets",
        "tags.ecn_capable_received",
        "Data packets that came ECN-capable, marked ones included.",
    ),
    _counter(
        "peer",
        "peer_congestion_marked_packets",
        "tags.congestion_received",
        "Data packets that came with a congestion mark.",
    ),
    _counter(
        "peer",
        "peer_class_sent_packets",
        "tags.sent.{}",
        "Data packets sent, by traffic class.",
        each=("class", tuple(map(str, range(8)))),
    ),
    _counter(
        "peer",
        "peer_class_received_packets",
        "tags.received.{}",
        "Data packets that came with the code point of a class.",
        each=("class", tuple(map(str, range(8)))),
    ),
    _counter("path", "path_sent_packets", "packets_sent", "Data packets sent on the path, copies included."),
    _counter("path", "path_copies_packets", "copies_sent", "Copies that only try whether the path has healed."),
    _counter("path", "path_lost_packets", "packets_lost", "Data packets on the path taken for lost."),
    _gauge(
        "path",
        "path_rtt_seconds",
        "rtt_smoothed_us",
        "Smoothed round trip of the path; 0 before the first sample.",
        scale=1e-6,
    ),
    _histogram(
        "path",
        "path_round_trip_seconds",
        "round_trip_s",
        "Round trips on the path, less what the peer held its answer back: one for each acknowledgement that measured one.",
    ),
    _gauge(
        "path", "path_share_ratio", "share", "Share of the last data packets (about a thousand) that took the path."
    ),
    _gauge(
        "path", "path_trusted", "trusted", "1 where the path carries data, 0 while it is much worse than the others."
    ),
    _counter("call", "calls", "calls", "Collectives that ended well."),
    _histogram("call", "call_duration_seconds", "elapsed_s", "From the call to the end."),
    _histogram("call", "call_compute_wait_seconds", "compute_wait_s", "Of it, until the last rank had called."),
    _histogram("call", "call_network_wait_seconds", "network_wait_s", "Of it, the rest."),
    _histogram(
        "call",
        "call_lost_ratio",
        "lost_share",
        "Share of the expected contributions that did not arrive; reductions only.",
        bounds="shares",
    ),
    _counter("call", "call_elements", "elems", "Elements of the results."),
    _counter("call", "call_expected_bytes", "bytes_expected", "Payload expected."),
    _counter("call", "call_received_bytes", "bytes_received", "Payload that arrived."),
    _counter(
        "call", "call_sent_bytes", "bytes_sent", "Payload sent, retransmissions until the result was there included."
    ),
    _counter(
        "call",
        "call_retransmitted_bytes",
        "bytes_retransmitted",
        "Payload sent again until the result was there: lost and repaired.",
    ),
    _counter(
        "call",
        "call_uncounted_elements",
        "elems_uncounted",
        "This rank's values that did not count somewhere; error feedback adds them to the next step.",
    ),
    _counter("call", "call_filled_elements", "elems_filled", "Results that did not arrive here and were filled in."),
    _counter("call", "call_rotated", "rotated", "Collectives whose bucket was sent rotated (Hadamard)."),
    _counter("call", "call_warm_ups", "warm_ups", "Collectives that were exact because their policy measures first."),
    _counter("stage", "stage_expected_elements", "elems_expected", "Elements expected from peers in the stage."),
    _counter("stage", "stage_received_elements", "elems_received", "Elements that arrived in the stage."),
    _histogram(
        "stage",
        "stage_duration_seconds",
        "network_s",
        "From the first packet to the end, of the peer that took longest.",
    ),
    _counter(
        "stage",
        "stage_ends",
        "ended_by.{}",
        "What ended the stage, of several reasons the one that accepts least.",
        each=_ENDED_BY,
    ),
    _counter(
        "stage",
        "stage_transfer_ends",
        "transfers_ended_by.{}",
        "What ended each transfer of the stage.",
        each=_ENDED_BY,
    ),
    _gauge(
        "stage",
        "stage_deadline_seconds",
        "deadline_s",
        "Latest deadline of a transfer, from its first packet; 0: there was none.",
    ),
)


def samples(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """Every value in what `gradwire.stats()` returned, metric by metric."""
    parts = list(_parts(stats))
    for metric in METRICS:
        for scope, labels, part in parts:
            if scope == metric.scope:
                yield from _of(metric, labels, part)


def _of(metric: Metric, labels: Labels, part: Mapping[str, Any]) -> Iterator[Sample]:
    for choice in (None,) if metric.each is None else metric.each[1]:
        value = _find(part, metric.key if choice is None else metric.key.format(choice))
        own = labels if choice is None else (*labels, choice)
        if value is None:
            continue
        if metric.kind == "histogram":
            yield Sample(metric, own, counts=tuple(value["counts"]), sum=float(value["sum"]))
        else:
            yield Sample(metric, own, value=float(value) * metric.scale)


def _find(part: Any, key: str) -> Any:
    for word in key.split("."):
        if isinstance(part, list):
            part = part[int(word)] if int(word) < len(part) else None
        else:
            part = part.get(word) if part is not None else None
    return part


def _parts(stats: Mapping[str, Any]) -> Iterator[tuple[str, Labels, Mapping[str, Any]]]:
    """Scope, label values and values of every part of the statistics."""
    if stats.get("engine"):
        yield "engine", (), stats["engine"]
    for group in stats["groups"]:
        own = (group["name"], str(group["rank"]))
        yield "group", own, group
        for peer in group["peers"]:
            yield "peer", (*own, str(peer["rank"])), peer
            for path in peer["paths"]:
                yield "path", (*own, str(peer["rank"]), str(path["path"])), path
        for call in group["calls"]:
            named = (*own, call["collective"], call["preset"])
            yield "call", named, call
            for stage in STAGES:
                yield "stage", (*named, stage), call[stage]
