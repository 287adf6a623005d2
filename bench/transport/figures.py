"""What the results of a transport benchmark say: a table in Markdown, targets with verdicts, a picture.

Pure functions of the results (the dictionary that `--json` writes), so that they say the same of a file years later.
`bench/report.py` puts them into docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Results = dict[str, Any]

GRADWIRE = "gradwire"
COLOURS = {GRADWIRE: "#0b7a75", "bbr": "#b5651d", "cubic": "#8a8f98", "reno": "#5b6ea6"}
BUFFER_COLOURS = (COLOURS[GRADWIRE], COLOURS["bbr"], COLOURS["reno"])  # of the lines in a panel of the fairness picture
QUIET_LOAD = 0.5  # of the machine before a run; above it the figures are those of a development run
GOODPUT_TARGETS = ((0.01, 0.90), (0.05, 0.85))  # up to this loss, at least this share of the link
FAIR = (0.35, 0.65)  # of gradwire beside bbr
FAIR_SAMPLES_MIN = 5  # shares of single samples are up to eight points apart


@dataclass(frozen=True)
class Verdict:
    """One target and what was measured: both shares, 0 to 1."""

    what: str
    measured: float
    target: str
    reached: bool

    def line(self) -> str:
        """One line for people."""
        return f"{self.what}: {self.measured:.1%}, target {self.target}: {'reached' if self.reached else 'MISSED'}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, the first column to the left."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def is_development_run(results: Results) -> bool:
    """Whether the machine was not quiet, or the run was only a look."""
    return results["small"] or results["machine"]["load"] > QUIET_LOAD


def describe_machine(results: Results) -> str:
    """What the numbers belong to, in one line."""
    machine = results["machine"]
    facts = [
        f"commit {machine['commit']}",
        f"{machine['cores']} cores ({machine.get('processor') or 'unknown processor'})",
        f"Linux {machine['kernel']}",
        f"load before the run {machine['load']:.2f}",
    ]
    return ", ".join(facts)


# --- goodput ---------------------------------------------------------------------------------------------------------


def goodput_markdown(results: Results) -> str:
    """One line for each flow and round trip, one column for each loss: Mbit/s, share, and what gradwire's target says."""
    settings = results["settings"]
    lines = []
    for rtt in settings["rtts_ms"]:
        for flow in settings["flows"]:
            rows = {row["loss"]: row for row in results["rows"] if (row["flow"], row["rtt_ms"]) == (flow, rtt)}
            cells = [_goodput_cell(rows[loss]) if loss in rows else "" for loss in settings["losses"]]
            name = f"**{flow}**" if flow == GRADWIRE else f"TCP {flow}"
            lines.append([name, f"{rtt:g} ms", *cells])
        targets = [goodput_target(loss) for loss in settings["losses"]]
        lines.append(["target", f"{rtt:g} ms", *(f"{target:.0%}" if target else "" for target in targets)])
    return table(["flow", "round trip", *(f"{100 * loss:g} % lost" for loss in settings["losses"])], lines)


def _goodput_cell(row: dict[str, Any]) -> str:
    return f"{row['median_mbit']:.0f} Mbit/s, {row['share']:.1%}"


def goodput_notes(results: Results) -> str:
    """What was counted in the network before anything was measured over it."""
    network, settings, parts = results.get("network", {}), results["settings"], []
    for rtt in settings["rtts_ms"]:
        measured, lab = network.get(f"rtt_ms_at_{rtt}"), network.get(f"lab_share_at_{rtt}")
        losses = [network.get(f"counted_loss_at_{loss}_{rtt}ms") for loss in settings["losses"]]
        counted = ", ".join(f"{100 * loss:.2g} %" for loss in losses if loss is not None)
        if measured is not None and lab is not None:
            parts.append(
                f"at {rtt:g} ms: round trip {measured:.2f} ms, lost {counted}, plain UDP gets {lab:.1%} of the link"
            )
    return f"Counted before: {'; '.join(parts)}." if parts else ""


def goodput_target(loss: float) -> float | None:
    """Share of the link that gradwire must reach at this loss."""
    return next((share for most, share in GOODPUT_TARGETS if loss <= most), None)


def goodput_verdicts(results: Results) -> list[Verdict]:
    """Whether gradwire reaches its share of the link in each case that has a target."""
    verdicts = []
    for row in results["rows"]:
        target = goodput_target(row["loss"])
        if row["flow"] == GRADWIRE and target is not None:
            what = f"goodput at {row['rtt_ms']:g} ms, {100 * row['loss']:g} % lost"
            verdicts.append(Verdict(what, row["share"], f"at least {target:.0%} of the link", row["share"] >= target))
    return verdicts


def draw_goodput(results: Results, path: Path) -> None:
    """Writes one PNG: share of the link against loss, a panel for each round trip."""
    settings, losses = results["settings"], results["settings"]["losses"]
    figure, panels = _canvas(1, len(settings["rtts_ms"]), 3.6, results)
    for axes, rtt in zip(panels[0], settings["rtts_ms"], strict=True):
        for flow in settings["flows"]:
            rows = [row for row in results["rows"] if (row["flow"], row["rtt_ms"]) == (flow, rtt)]
            places, shares = [losses.index(row["loss"]) for row in rows], [100 * row["share"] for row in rows]
            width, label = (2.4, flow) if flow == GRADWIRE else (1.4, f"TCP {flow}")
            axes.plot(places, shares, "o-", color=COLOURS[flow], label=label, linewidth=width, markersize=4)
        targets = [(losses.index(loss), goodput_target(loss)) for loss in losses]
        for place, target in ((place, target) for place, target in targets if target is not None):
            axes.hlines(100 * target, place - 0.3, place + 0.3, colors="black", linestyles="dotted", linewidth=1.2)
        axes.set_xticks(range(len(losses)), [f"{100 * loss:g} %" for loss in losses])
        axes.set_title(f"{settings['rate_mbit']:g} Mbit/s, round trip {rtt:g} ms", loc="left", fontsize=11)
        axes.set_xlabel("packets lost (dotted: gradwire's target)")
        axes.set_ylim(0, 105)
        axes.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel("goodput, % of what the link carries")
    panels[0][0].legend(frameon=False, loc="lower left")
    _save(figure, path)


# --- fairness --------------------------------------------------------------------------------------------------------


def fairness_markdown(results: Results) -> str:
    """One line for each case; the range is that of all samples."""
    lines = []
    for row in results["rows"]:
        spread = f" ({min(row['shares']):.0%} to {max(row['shares']):.0%})" if row["samples"] > 1 else ""
        verdict = _fairness_verdict(row)
        target = verdict.target if verdict else "none"
        lines.append(
            [
                f"TCP {row['peer']}",
                f"{row['rtt_ms']:g} ms",
                f"{row['buffer_bdps']:g} BDP",
                f"{row['gradwire_mbit']:.0f}",
                f"{row['peer_mbit']:.0f}",
                f"{row['share']:.1%}{spread}",
                target,
                f"{row['link_used']:.1%}",
                f"{row['overflowed']:.2%}",
                str(row["samples"]),
            ]
        )
    header = ["beside", "round trip", "buffer", "gradwire Mbit/s", "TCP Mbit/s", "gradwire's share", "target"]
    return table([*header, "link used", "overflowed", "samples"], lines)


def _fairness_verdict(row: dict[str, Any]) -> Verdict | None:
    if row["peer"] != "bbr" or row["samples"] < FAIR_SAMPLES_MIN:
        return None
    what = f"share of gradwire beside bbr at {row['rtt_ms']:g} ms, buffer of {row['buffer_bdps']:g} BDP, median of {row['samples']}"
    return Verdict(what, row["share"], f"{FAIR[0]:.0%} to {FAIR[1]:.0%}", FAIR[0] <= row["share"] <= FAIR[1])


def fairness_verdicts(results: Results) -> list[Verdict]:
    """Whether gradwire and bbr each get between 35 and 65 %; other peers and cases of few samples are reported only."""
    return [verdict for row in results["rows"] if (verdict := _fairness_verdict(row)) is not None]


def draw_fairness(results: Results, path: Path) -> None:
    """Writes one PNG: gradwire's share over time in the first sample, a panel for each peer and round trip."""
    settings = results["settings"]
    peers, rtts, bdps = settings["peers"], settings["rtts_ms"], settings["bdps"]
    figure, panels = _canvas(len(peers), len(rtts), 2.8, results)
    for row in results["rows"]:
        at = bdps.index(row["buffer_bdps"])
        axes = panels[peers.index(row["peer"])][rtts.index(row["rtt_ms"])]
        times, shares = row["curve"]
        label = f"buffer of {row['buffer_bdps']:g} BDP: {row['share']:.0%}"
        style, colour = ("-", "--", ":")[at % 3], BUFFER_COLOURS[at % len(BUFFER_COLOURS)]
        axes.plot(times, shares, style, color=colour, label=label, linewidth=1.6)
        axes.set_title(f"beside {row['peer']}, round trip {row['rtt_ms']:g} ms", loc="left", fontsize=11)
        axes.set_ylim(0, 130)  # room for the legend above the curves
        axes.set_yticks(range(0, 101, 20))
        axes.set_xlabel("seconds")
        axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    for peer, line in zip(peers, panels, strict=True):
        line[0].set_ylabel("share of gradwire (%)")
        if peer == "bbr":
            for axes in line:
                axes.axhspan(100 * FAIR[0], 100 * FAIR[1], color=COLOURS[GRADWIRE], alpha=0.08, linewidth=0)
    _save(figure, path)


# --- both ------------------------------------------------------------------------------------------------------------


def _canvas(rows: int, columns: int, height: float, results: Results) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    size = (4.6 * columns, height * rows + 0.4)
    figure, panels = pyplot.subplots(rows, columns, figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    if is_development_run(results):
        figure.suptitle("development run on a busy machine", fontsize=9, color="#a33", x=0.99, ha="right")
    return figure, panels


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    # Without the version of matplotlib inside, the same results give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


@dataclass(frozen=True)
class View:
    """What can be said about the results of one benchmark."""

    markdown: Callable[[Results], str]
    verdicts: Callable[[Results], list[Verdict]]
    draw: Callable[[Results, Path], None]
    notes: Callable[[Results], str] = lambda _: ""


FIGURES = {
    "goodput": View(goodput_markdown, goodput_verdicts, draw_goodput, goodput_notes),
    "fairness": View(fairness_markdown, fairness_verdicts, draw_fairness),
}
