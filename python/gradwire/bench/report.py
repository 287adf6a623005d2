"""Shows results: the table on the terminal, and one HTML file that needs nothing beside it. Both from what the JSON file holds."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire import _files
from gradwire.bench import figures, tables
from gradwire.bench.plan import size_text
from gradwire.bench.results import Row, comparisons

_HEADS = (
    "variant", "collective", "ranks", "size", "condition", "samples", "wrong", "p50 ms", "p95", "p99", "p99.9",
    "algbw GB/s", "busbw GB/s", "of links", "lost", "filled", "CPU s/GB",
)  # fmt: skip
_COMPARED_HEADS = (
    "gradwire", "beside", "collective", "ranks", "size", "condition", "p50 times", "by turns", "p99 times", "CPU times",
)  # fmt: skip
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem;color:#1d2733}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2.2rem}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #e3e6ea;white-space:nowrap}
th{background:#f5f7f9;position:sticky;top:0}th:first-child,td:first-child,td.text{text-align:left}
tr.own td:first-child{color:#0b7a75;font-weight:600}td.bad,li.bad{color:#b3261e;font-weight:600}
.wide{overflow-x:auto}svg{max-width:100%;height:auto}pre{background:#f5f7f9;padding:.8rem;white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}
.quiet{color:#5b6672}
"""


def cells_of(row: Row) -> list[str]:
    """One line of the table; what a percentile has too few samples for is a dash, and so is what could not be judged."""
    times = [_number(row[name]) for name in ("p50_ms", "p95_ms", "p99_ms", "p999_ms")]
    bandwidths = [f"{row[name]:.3g}" for name in ("algbw_gb_s", "busbw_gb_s")]
    return [
        row["variant"], row["collective"], str(row["ranks"]), size_text(row["bytes"]), figures.condition_text(row),
        str(row["samples"]), _wrong_text(row), *times, *bandwidths, _links_text(row), *_shares(row),
        f"{row['cpu_s_per_gb']:.3g}",
    ]  # fmt: skip


def _links_text(row: Row) -> str:
    """A dash where links have no rate, and for files of before it was written."""
    share = row.get("link_share")
    return "-" if share is None else f"{share:.0%}"


def print_table(console: Console, rows: list[Row]) -> None:
    """One line for each cell, then how many times as long each peer takes."""
    tables.print_table(
        console, "time of one call on its slowest rank", _HEADS, [cells_of(row) for row in rows], names=5
    )
    lines = [_compared(each) for each in comparisons(rows)]
    if lines:
        title = "how many times as much as gradwire the peer takes"
        tables.print_table(console, title, _COMPARED_HEADS, lines, names=6)


def write_html(results: dict[str, Any], file: Path) -> None:
    """Writes the report. Raises OSError where the file cannot be written."""
    rows = results["rows"]
    network = results["network"]
    text = f"{network['switch']}, {results['settings']['hosts']} hosts"
    if network["rate_mbit"]:
        text += f", {network['rails']} x {network['rate_mbit']:g} Mbit/s each, buffers of {network['buffer_bytes'] / 1024:g} KB"
        text += f", buckets of {network['bucket_bytes'] / 1024:g} KB" if network.get("bucket_bytes") else ""
    parts = [targets_html(results["targets"])]
    parts += pictures(figures.charts(rows), file)
    parts.append("<h2>How many times as much as gradwire the peer takes</h2>" if comparisons(rows) else "")
    if comparisons(rows):
        parts.append(html_table(_COMPARED_HEADS, [_compared(each) for each in comparisons(rows)]))
    parts.append("<h2>All cells</h2>" + html_table(_HEADS, [cells_of(row) for row in rows]))
    page = html_page("gradwire bench", f"{text}. {network_text(network)}", "\n".join(parts), results)
    _files.replace(file, page)


def pictures(charts: Iterable[tuple[str, Any]], page: Path) -> list[str]:
    """The charts as parts of a page, and each as `PAGE-NUMBER.png` beside it."""
    found = []
    for number, (title, figure) in enumerate(charts, 1):
        drawn = figures.render(figure, page.with_name(f"{page.stem}-{number}.png"))
        found.append(f"<h2>{html.escape(title)}</h2>\n{drawn}")
    return found


def html_page(title: str, subtitle: str, body: str, results: dict[str, Any]) -> str:
    """A whole page: what was found, then what it was measured on and how to repeat it."""
    facts = {key: value for key, value in results.items() if key not in ("rows", "runs")}
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p><p class='quiet'>{html.escape(machine_text(results['machine']))}</p>"
        f"{left_html(results)}{body}<h2>Repeat it</h2><pre>{html.escape(repeat_text(results))}</pre>"
        f"<details><summary>All settings and versions</summary><pre>{html.escape(json.dumps(facts, indent=1))}</pre></details></html>\n"
    )


def html_table(heads: Sequence[str], lines: list[list[str]]) -> str:
    """A table whose first column is the variant's name; `wrong` stands out where something is."""
    wrong = heads.index("wrong") if "wrong" in heads else -1
    rows = []
    for line in lines:
        cells = [
            f"<td{_class(at == wrong and cell not in ('0', '-'))}>{html.escape(cell)}</td>"
            for at, cell in enumerate(line)
        ]
        rows.append(f"<tr{' class=own' if line[0].startswith('gradwire') else ''}>{''.join(cells)}</tr>")
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    return f"<div class='wide'><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def machine_text(machine: dict[str, Any]) -> str:
    """The machine in a line."""
    return (
        f"{machine['at']}; commit {machine['commit'] or 'unknown'}, {machine['cores']} cores ({machine['processor']}),"
        f" Linux {machine['kernel']}, torch {machine['packages']['torch']}, load before the run {machine['load']:.2f}"
    )


def network_text(network: dict[str, Any]) -> str:
    """What was counted before the measurement, in a line."""
    counted = _counted(network, "counted_rtt_ms_at_")
    parts = [f"round trip {ms:.2f} ms" + (f" with {added} ms added" if float(added) else "") for added, ms in counted]
    for prefix, what in (("counted_loss_at_", ""), ("counted_gray_loss_at_", "the gray rail ")):
        lost = _counted(network, prefix)
        parts += [f"{what}set to lose {100 * float(loss):g} %, counted {100 * share:.2g} %" for loss, share in lost]
    return ("Before the run: " + "; ".join(parts) + ".") if parts else ""


def _counted(network: dict[str, Any], prefix: str) -> list[tuple[str, float]]:
    """(what was set, what was counted) of one kind."""
    return [(name.removeprefix(prefix), value) for name, value in network.items() if name.startswith(prefix)]


def repeat_text(results: dict[str, Any]) -> str:
    """The command with its variables, for a shell."""
    variables = (f"{name}={shlex.quote(value)} \\" for name, value in results["environment"].items())
    return "\n".join([*variables, results["command"]])


def _compared(each: Row) -> list[str]:
    front = [each["variant"], each["against"], each["collective"], str(each["ranks"]), size_text(each["bytes"])]
    return [
        *front,
        figures.condition_text(each),
        _number(each["p50_times"], 3),
        _turns_text(each["turns"]),
        *(_number(each[name], 3) for name in ("p99_times", "cpu_times")),
    ]


def _turns_text(turns: list[float]) -> str:
    """From the least to the most, and of how many."""
    return f"{min(turns):.2f}-{max(turns):.2f} ({len(turns)})" if len(turns) > 1 else "-"


def targets_html(targets: list[dict[str, Any]]) -> str:
    """What was required, as part of a page."""
    if not targets:
        return ""
    lines = []
    for each in targets:
        word = "reached" if each["reached"] else "MISSED"
        lines.append(f"<li{_class(not each['reached'])}>{word}: {html.escape(each['text'])}</li>")
    return f"<h2>Required</h2><ul>{''.join(lines)}</ul>"


def left_html(results: dict[str, Any]) -> str:
    """What was not measured, or not as it should be, as part of a page; files of before it was written say nothing."""
    lines = [f"ended early by {results['ended_by']}"] if results.get("ended_by") else []
    lines += [f"not measured: {name}" for name in results.get("not_measured", ())]
    unsettled = sum(not row.get("settled", True) for row in results["rows"])
    lines += [f"not settled: {unsettled} of {len(results['rows'])} cells (settled: false)"] if unsettled else []
    return f"<ul>{''.join(f'<li{_class(True)}>{html.escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _class(bad: bool) -> str:
    return " class=bad" if bad else ""


def _wrong_text(row: Row) -> str:
    """A dash where nothing was found wrong, but not all could be judged."""
    return "-" if not row["wrong"] and row.get("unjudged") else str(row["wrong"])


def _shares(row: Row) -> list[str]:
    """What did not count, and what did not come back; of the latter a file of an earlier version says nothing."""
    filled = row.get("filled_share")
    return [f"{row['lost_share']:.3%}", "-" if filled is None else f"{filled:.3%}"]


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"
