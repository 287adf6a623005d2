"""What `gradwire monitor` shows: rates from two answers of a rank, and the screen made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from gradwire.observe.columns import Columns, height_of

ENDS = ("all_arrived", "bound_met", "soft_threshold", "early_timeout", "deadline")
# A rank that is no server of such a reduction expects nothing of others: its own contribution is what may be lost.
REDUCED_BY_SERVERS = "all_reduce/parameter_server"
# Heads of the two tables.
RANKS = (
    "rank",
    "host",
    "group",
    "calls/s",
    "mean ms",
    "compute",
    "lost",
    "filled",
    "repaired",
    "ended by",
    "deadline",
    "in flight",
)
PEERS = ("from", "to", "path", "out MB/s", "in MB/s", "packets/s", "RTT ms", "lost", "waited for")
# Whom a collective waits for is said when it has done so for so long.
WAITED_S = 1.0
# Of the room of two tables the first one may take two thirds; of more than two it is as much more than a like share of them.
FIRST_SHARE = 4 / 3
# Without news for so long a rank is shown as silent.
SILENT_S = 5.0
# At most this part of a screen's lines tells of stragglers, and each names so many of those that wait for it.
STRAGGLERS_PART = 8
RANKS_NAMED = 8
# Of a path that is suspended, beside shares that are lost or waited.
SUSPENDED_WEIGHT = 0.5
# And after so long it is shown no more, as soon as another one answers: a restarted job has new processes.
GONE_S = 300.0


@dataclass
class Rank:
    """One process: its latest answer and the one before."""

    latest: dict[str, Any]
    before: dict[str, Any] | None = None
    seen_s: float = 0.0

    @property
    def span_s(self) -> float:
        """Between the two answers, by the rank's wall clock; not above 0 where that was set back."""
        return 0.0 if self.before is None else float(self.latest["time_s"] - self.before["time_s"])


@dataclass
class Board:
    """All ranks that were heard of, by job, rank and process."""

    ranks: dict[tuple[str, int, str, int], Rank] = field(default_factory=dict)

    def take(self, answer: dict[str, Any], now_s: float) -> dict[str, Any]:
        """Takes an answer; returns what it says about the time since the one before, as `--json` prints it."""
        key = (answer["job"], answer["rank"], answer["host"], answer["pid"])
        known = self.ranks.get(key)
        rank = Rank(answer, None if known is None else known.latest, now_s)
        self.ranks = {other: seen for other, seen in self.ranks.items() if now_s - seen.seen_s < GONE_S}
        self.ranks[key] = rank
        return {**answer, "rates": rates(rank)}


def rates(rank: Rank) -> dict[str, Any]:
    """Of each group what happened each second since the answer before; empty at first, and where no time has passed by its clock.

    A group that was formed since then has none either, whatever it is called. Of one whose members have changed since then peers and
    paths have none: their connections are new, and count from 0.

    By group: `calls_per_s`, `lost_share` (of the contributions expected here, or of this rank's own at its servers), `filled_share`
    (of the results, where calls may lose some),
    `repaired_share`, `waits` (share of the time of collectives that went to compute), `ended_by` (counts by reason),
    `deadline_ms`, and by peer and path bytes or packets each second, RTT and loss.
    """
    if rank.before is None or rank.span_s <= 0:
        return {}
    old = {_identity(group): group for group in rank.before["groups"]}
    return {
        group["name"]: _group_rates(group, old[_identity(group)], rank.span_s)
        for group in rank.latest["groups"]
        if _identity(group) in old
    }


def _identity(group: Mapping[str, Any]) -> tuple[str, float | None]:
    """Which group it is: torch calls those of each life of a process alike."""
    return group["name"], group.get("formed_s")


def _group_rates(group: Mapping[str, Any], old: Mapping[str, Any], span_s: float) -> dict[str, Any]:
    grown = _CallsGrown(group["calls"], old["calls"])
    peers_before = {peer["rank"]: peer for peer in old["peers"]}
    expected, received = grown.contributions()
    sent = grown.total("bytes_sent")
    elapsed = grown.total("elapsed_s.sum")
    ends = {
        reason: grown.total(f"reduce.ended_by.{reason}") + grown.total(f"gather.ended_by.{reason}") for reason in ENDS
    }
    return {
        "calls_per_s": grown.total("calls") / span_s,
        "mean_ms": elapsed / grown.total("calls") * 1e3 if grown.total("calls") else 0.0,
        "lost_share": 1 - received / expected if expected else 0.0,
        "filled_share": grown.filled_share(),
        "repaired_share": grown.total("bytes_retransmitted") / sent if sent else 0.0,
        "uncounted_elems_per_s": grown.total("elems_uncounted") / span_s,
        "compute_wait_share": grown.total("compute_wait_s.sum") / elapsed if elapsed else 0.0,
        "ended_by": {reason: count for reason, count in ends.items() if count},
        "deadline_ms": max((call["reduce"]["deadline_s"] for call in group["calls"]), default=0.0) * 1e3,
        "peers": [
            _peer_rates(peer, peers_before[peer["rank"]], span_s)
            for peer in (group["peers"] if group.get("connected_s") == old.get("connected_s") else ())
            if peer["rank"] in peers_before
        ],
    }


def _peer_rates(peer: Mapping[str, Any], old: Mapping[str, Any], span_s: float) -> dict[str, Any]:
    paths_before = {path["path"]: path for path in old["paths"]}
    waits = {
        cause: peer["straggler"][f"{cause}_s"] - old["straggler"][f"{cause}_s"]
        for cause in ("compute", "network", "receiver")
    }
    return {
        "rank": peer["rank"],
        "sent_bytes_per_s": (peer["bytes_sent"] - old["bytes_sent"]) / span_s,
        "received_bytes_per_s": (peer["bytes_received"] - old["bytes_received"]) / span_s,
        "lost_share": _share(peer["packets_lost"] - old["packets_lost"], peer["packets_sent"] - old["packets_sent"]),
        "rtt_ms": peer["rtt_smoothed_us"] / 1e3,
        # A call counts its seconds when it ends: it may have waited since before the answer before.
        "waited_share": {cause: min(1.0, seconds / span_s) for cause, seconds in waits.items() if seconds},
        "paths": [
            {
                "path": path["path"],
                "packets_per_s": (path["packets_sent"] - paths_before[path["path"]]["packets_sent"]) / span_s,
                "lost_share": _share(
                    path["packets_lost"] - paths_before[path["path"]]["packets_lost"],
                    path["packets_sent"] - paths_before[path["path"]]["packets_sent"],
                ),
                "rtt_ms": path["rtt_smoothed_us"] / 1e3,
                "share": path["share"],
                "trusted": path["trusted"],
            }
            for path in peer["paths"]
            if path["path"] in paths_before
        ],
    }


class _CallsGrown:
    """What the collectives of a group count more than before."""

    def __init__(self, calls: list[Mapping[str, Any]], old: list[Mapping[str, Any]]) -> None:
        before = {(call["collective"], call["preset"]): call for call in old}
        self._pairs = [(call, before.get((call["collective"], call["preset"]))) for call in calls]

    def total(self, key: str) -> float:
        return sum(_grown(call, old, key) for call, old in self._pairs)

    def contributions(self) -> tuple[float, float]:
        """Elements that were expected, and those that arrived; of reductions that others' servers make, of this rank's own."""
        expected = received = 0.0
        for call, old in self._pairs:
            here = _grown(call, old, "reduce.elems_expected")
            if here or not call["collective"].startswith(REDUCED_BY_SERVERS):
                expected += here
                received += _grown(call, old, "reduce.elems_received")
            else:
                pushed = _grown(call, old, "elems")
                expected += pushed
                received += pushed - min(pushed, _grown(call, old, "elems_uncounted"))  # rotated ones are a few more
        return expected, received

    def filled_share(self) -> float:
        """Of the results of calls that may lose some: elements that did not arrive and were filled in."""
        lossy = [(call, old) for call, old in self._pairs if call["preset"] != "exact"]
        elems = sum(_grown(call, old, "elems") for call, old in lossy)
        filled = sum(_grown(call, old, "elems_filled") for call, old in lossy)
        return min(1.0, filled / elems) if elems else 0.0  # rotated ones are a few more


def _grown(call: Mapping[str, Any], old: Mapping[str, Any] | None, key: str) -> float:
    return _at(call, key) - (0 if old is None else _at(old, key))


def _at(part: Any, key: str) -> float:
    for word in key.split("."):
        part = part[word]
    return float(part)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def screen(board: Board, now_s: float, failures: Sequence[str] = (), lines: int | None = None) -> RenderableType:
    """The whole picture: what goes wrong first, since a terminal has room for so many lines only, and then the tables.

    Args:
        board: what was heard.
        now_s: of the clock by which answers were taken.
        failures: a line for each host that cannot be seen.
        lines: of the terminal. Where the tables have more rows than there is room for they show those that somebody waits for or that
            lose something, and say how many more there are. None: everything.
    """
    top = [Text(failure, style="bold red") for failure in failures]
    jobs: dict[str, list[Rank]] = {}
    for key in sorted(board.ranks):
        jobs.setdefault(key[0], []).append(board.ranks[key])
    if not jobs:
        return _Picture([([Text("no rank has answered yet"), *top], [])], lines)
    parts = []
    for job, ranks in jobs.items():
        presets = ", ".join(sorted({rank.latest["preset"] for rank in ranks}))
        head = Text(f"job {job}: {len(ranks)} ranks seen, preset {presets}", style="bold")
        parts.append(
            (
                [head, *top, *_some(_stragglers(ranks, now_s, lines), lines)],
                [_ranks_table(ranks, now_s), _peers_table(ranks, now_s)],
            )
        )
        top = []
    return _Picture(parts, lines)


def _some(stragglers: list[Text], lines: int | None) -> list[Text]:
    """As many as leave room for the tables, and how many more there are."""
    most = len(stragglers) if lines is None else max(1, lines // STRAGGLERS_PART)
    more = len(stragglers) - most
    return stragglers if more <= 0 else [*stragglers[:most], Text(f"\u2026 {more} more stragglers", style="bold red")]


class _Picture:
    """Of each job lines that are always shown, and tables that share what room there is left.

    Args:
        parts: lines and tables, job by job.
        lines: of the screen; None: without an end.
    """

    def __init__(self, parts: Sequence[tuple[list[Text], list[Columns]]], lines: int | None) -> None:
        self._parts, self._lines = parts, lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        heads = [height_of(texts, console, options) for texts, _ in self._parts]
        left = None if self._lines is None else self._lines - sum(heads)
        tables_left = sum(len(tables) for _, tables in self._parts)
        for texts, tables in self._parts:
            yield from texts
            for table in tables:
                if left is None:
                    yield table
                    continue
                # What one does not need is for those behind it, and the first one of two gets more: a rank has many peers.
                part = table.within(
                    left if tables_left == 1 else int(left * FIRST_SHARE / tables_left), console, options
                )
                left, tables_left = left - height_of([part], console, options), tables_left - 1
                yield part


def _ranks_table(ranks: list[Rank], now_s: float) -> Columns:
    several = _have_several_groups(ranks)
    texts = ("host", "group", "ended by", "in flight")
    table = Columns(RANKS, names=3, texts=texts, rest="ranks (gradwire monitor --json has all)")
    for rank in ranks:
        found = rates(rank)
        for group in rank.latest["groups"]:
            own = found.get(group["name"])
            who = (str(rank.latest["rank"]), rank.latest["host"], _short(group["name"]))
            weight = _weight_of_rank(group, own)
            if _is_silent(rank, now_s):
                silent = Text(f"silent for {now_s - rank.seen_s:.0f} s", style="bold red")
                table.add(*who, *["-"] * 8, silent, weight=math.inf)
            elif own is None:
                table.add(*who, *["-"] * 8, _in_flight(group, several), weight=weight)
            else:
                table.add(*who, *_rates_cells(own), _in_flight(group, several), weight=weight)
    return table


def _weight_of_rank(group: Mapping[str, Any], own: Mapping[str, Any] | None) -> float:
    """Who waits comes before who loses something."""
    waiting = group["waiting"]
    waited_s = 0.0 if waiting is None or waiting["straggler"] is None else float(waiting["waited_s"])
    return waited_s if waited_s >= WAITED_S else 0.0 if own is None else round(float(own["lost_share"]), 3)


def _is_silent(rank: Rank, now_s: float) -> bool:
    return now_s - rank.seen_s > SILENT_S


def _rates_cells(own: Mapping[str, Any]) -> list[str | Text]:
    ends = own["ended_by"]
    total = sum(ends.values())
    return [
        f"{own['calls_per_s']:.1f}",
        f"{own['mean_ms']:.2f}",
        f"{own['compute_wait_share']:.0%}",
        Text(f"{own['lost_share']:.3%}", style="yellow" if own["lost_share"] else ""),
        Text(f"{own['filled_share']:.3%}", style="yellow" if own["filled_share"] else ""),
        f"{own['repaired_share']:.3%}",
        ", ".join(f"{reason} {count / total:.0%}" for reason, count in ends.items()) or "-",
        f"{own['deadline_ms']:.1f} ms" if own["deadline_ms"] else "-",
    ]


def _in_flight(group: Mapping[str, Any], several: bool) -> str | Text:
    waiting = group["waiting"]
    if waiting is None:
        return ""
    text = f"{waiting['during']}, {waiting['waited_s']:.1f} s"
    if waiting["straggler"] is None or waiting["waited_s"] < WAITED_S:
        return text
    whom = f"{waiting['straggler']} of the group" if several else str(waiting["straggler"])
    return Text(f"{text}: waits for rank {whom} ({waiting['cause']})", style="red")


def _peers_table(ranks: list[Rank], now_s: float) -> Columns:
    """Ranks are those in the group, which stands beside them where a process has more than one. Those that are silent have no rows."""
    several = _have_several_groups(ranks)
    heads, texts = [*PEERS, "group"] if several else PEERS, ("waited for", "group")
    table = Columns(heads, names=3, texts=texts, rest="lines of peers (gradwire monitor --json has all)")
    for rank in ranks:
        if _is_silent(rank, now_s):
            continue
        in_group = _ranks_in_groups(rank)
        for name, own in rates(rank).items():
            for peer in own["peers"]:
                _add_peer(table, in_group[name], peer, [_short(name)] if several else [])
    return table


def _add_peer(table: Columns, rank: int, peer: Mapping[str, Any], group: list[str]) -> None:
    waits = ", ".join(f"{cause} {share:.0%}" for cause, share in peer["waited_share"].items() if share >= 0.01)
    paths = peer["paths"] if len(peer["paths"]) > 1 else []
    of_paths = [path["lost_share"] if path["trusted"] else SUSPENDED_WEIGHT for path in paths]
    # So rough that rows do not come and go with each answer.
    weight = round(max([peer["lost_share"], *peer["waited_share"].values(), *of_paths]), 3)
    table.add(
        str(rank),
        str(peer["rank"]),
        "all" if paths else "",
        f"{peer['sent_bytes_per_s'] / 1e6:.2f}",
        f"{peer['received_bytes_per_s'] / 1e6:.2f}",
        f"{sum(path['packets_per_s'] for path in peer['paths']):.0f}",
        f"{peer['rtt_ms']:.3f}",
        Text(f"{peer['lost_share']:.2%}", style="yellow" if peer["lost_share"] >= 0.001 else ""),
        Text(waits, style="red"),
        *group,
        weight=weight,
    )
    for path in paths:
        state = "" if path["trusted"] else Text("suspended", style="red")
        cells = (f"{path['packets_per_s']:.0f}", f"{path['rtt_ms']:.3f}", f"{path['lost_share']:.2%}")
        table.add("", "", str(path["path"]), "", "", *cells, state, *[""] * len(group), style="dim", weight=weight)


def _stragglers(ranks: list[Rank], now_s: float, lines: int | None) -> list[Text]:
    """Each straggler of a group once, with its ranks that wait for it and are not silent: of many only the first on a screen."""
    seen: dict[tuple[str, int, str], tuple[list[int], str]] = {}
    for rank in (rank for rank in ranks if not _is_silent(rank, now_s)):
        in_group = _ranks_in_groups(rank)
        for late in rank.latest["stragglers"]:
            if late["group"] in in_group:  # else it was left while the answer was made
                known = seen.setdefault((late["group"], late["rank"], late["cause"]), ([], late["text"]))
                known[0].append(in_group[late["group"]])
    return [
        Text(
            f"straggler: rank {late} of group {_short(group)} ({cause}), waited for by rank "
            f"{_listed(by, lines)}: {text}",
            style="bold red",
        )
        for (group, late, cause), (by, text) in seen.items()
    ]


def _listed(ranks: list[int], lines: int | None) -> str:
    more = 0 if lines is None else max(0, len(ranks) - RANKS_NAMED)
    named = ", ".join(map(str, ranks[: len(ranks) - more]))
    return f"{named} and {more} more" if more else named


def _ranks_in_groups(rank: Rank) -> dict[str, int]:
    """Which rank a process is in each of its groups, by name; not the same in all of them."""
    return {group["name"]: group["rank"] for group in rank.latest["groups"]}


def _have_several_groups(ranks: list[Rank]) -> bool:
    """Whether ranks of groups are not those of the job: there are several groups, or one of a part of all ranks."""
    groups = [
        (group["name"], group["rank"] == rank.latest["rank"]) for rank in ranks for group in rank.latest["groups"]
    ]
    return len({name for name, _ in groups}) > 1 or not all(is_same for _, is_same in groups)


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:19]}…"
