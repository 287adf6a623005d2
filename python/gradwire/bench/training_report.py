"""Shows the results of `gradwire bench --training`: a table, a picture and an HTML page, from what the JSON file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire import _files
from gradwire.bench import figures, report, tables
from gradwire.bench.training import Row, ratio_of

_HEADS = (
    "variant", "packets lost", "s to target", "of its own at 0 %", "peer's time, times", "step p50 ms", "communication",
    "gradient lost", "filled", "steps apart", "last loss",
)  # fmt: skip


def lines_of(rows: list[Row]) -> list[list[str]]:
    """One for each run; a dash where the target was not reached."""
    return [_line(row, rows) for row in rows]


def print_table(console: Console, rows: list[Row], target: float) -> None:
    """One line for each run."""
    title = f"time until the validation loss is {target:.4f} nats for each byte"
    tables.print_table(console, title, _HEADS, lines_of(rows), names=2)


def write_html(results: dict[str, Any], file: Path) -> None:
    """Writes the page and `PAGE-NUMBER.png` beside it. Raises OSError where one of them cannot be written."""
    rows, target, network = results["rows"], results["target"], results["network"]
    charts = [
        ("Time to accuracy", figures.picture([_seconds(rows), _shares(rows)], height=3.8)),
        ("Validation loss by time", figures.picture(_curves(rows, target), height=3.8)),
    ]
    body = report.targets_html(results["targets"])
    body += "\n".join(report.pictures(charts, file))
    body += "<h2>All runs</h2>" + report.html_table(_HEADS, lines_of(rows))
    rate = f", {network['rate_mbit']:g} Mbit/s each" if network["rate_mbit"] else ""
    about = f"Time until the example's validation loss is {target:.4f} nats for each byte: {results['settings']['ranks']} workers, "
    about += f"{network['switch']}{rate}. {report.network_text(network)}"
    _files.replace(file, report.html_page("gradwire bench --training", about, body, results))


def _line(row: Row, rows: list[Row]) -> list[str]:
    calm = [other for other in rows if other["variant"] == row["variant"] and not other["loss"]]
    own = ratio_of(row, calm[0]) if calm else None
    peers = [] if row["peer"] else [other for other in rows if other["peer"] and other["loss"] == row["loss"]]
    ratios = [(other["variant"], ratio_of(other, row)) for other in peers]
    beside = [f"{variant} {ratio:.2f}" for variant, ratio in ratios if ratio is not None]
    seconds = "-" if row["seconds"] is None else f"{row['seconds']:.1f}"
    filled = f"{row['filled_share']:.3%}" if "filled_share" in row else "-"  # a file of before it was written
    shares = [f"{row['comm_share']:.0%}", f"{row['lost_share']:.3%}", filled, f"{row['steps_apart']} of {row['steps']}"]
    last = f"{row['curve'][-1][2]:.4f}"
    return [
        row["variant"],
        f"{100 * row['loss']:g} %",
        seconds,
        "-" if own is None else f"{own:.2f}",
        ", ".join(beside) or "-",
        f"{row['step_ms_p50']:.0f}",
        *shares,
        last,
    ]


def _seconds(rows: list[Row]) -> figures.Draw:
    losses = sorted({row["loss"] for row in rows})

    def draw(axes: Any) -> None:
        for variant, colour in figures.colours(rows).items():
            mine = [row for row in rows if row["variant"] == variant and row["seconds"] is not None]
            places = [losses.index(row["loss"]) for row in mine]
            axes.plot(places, [row["seconds"] for row in mine], "o-", color=colour, label=variant)
        axes.set_xticks(range(len(losses)), [f"{100 * loss:g} %" for loss in losses])
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("packets lost")
        axes.set_title("seconds to the target loss", loc="left")

    return draw


def _shares(rows: list[Row]) -> figures.Draw:
    losses = sorted({row["loss"] for row in rows})

    def draw(axes: Any) -> None:
        variants = figures.colours(rows)
        width = 0.8 / len(variants)
        for at, (variant, colour) in enumerate(variants.items()):
            mine = [row for row in rows if row["variant"] == variant]
            places = [losses.index(row["loss"]) + width * (at - (len(variants) - 1) / 2) for row in mine]
            axes.bar(places, [100 * row["comm_share"] for row in mine], width * 0.9, color=colour)
        axes.set_xticks(range(len(losses)), [f"{100 * loss:g} %" for loss in losses])
        axes.set_xlabel("packets lost")
        axes.set_title("share of a step with gradients under way, %", loc="left")

    return draw


def _curves(rows: list[Row], target: float) -> list[figures.Draw]:
    losses = sorted({row["loss"] for row in rows})

    def panel(loss: float) -> figures.Draw:
        def draw(axes: Any) -> None:
            for variant, colour in figures.colours(rows).items():
                for row in rows:
                    if row["variant"] == variant and row["loss"] == loss:
                        axes.plot(
                            [point[1] for point in row["settled"]],
                            [point[2] for point in row["settled"]],
                            color=colour,
                            label=variant,
                        )
            axes.axhline(target, color="#444", linewidth=0.8, linestyle=":")
            axes.set_xlabel("s")
            axes.set_title(f"{100 * loss:g} % of the packets lost", loc="left")

        return draw

    return [panel(loss) for loss in (losses[0], losses[-1])] if len(losses) > 1 else [panel(losses[0])]
