"""Writes the results of transport benchmarks into docs/benchmarks.md and draws the pictures in docs/img.

    python bench/transport/goodput.py --json results/goodput.json
    python bench/transport/fairness.py --json results/fairness.json
    python bench/report.py results/*.json

Each file holds the results of one benchmark, and says of which. Its table, what it was measured on and its targets replace what
stands in the document between `<!-- NAME: begin -->` and `<!-- NAME: end -->`; everything else stays as it is. Results of a
machine that was not quiet (load above 0.5 before the run) are labelled as a development run, in the text and in the picture.

Exit code: 0 written, 1 written but a target is missed or a file has none that was judged, 2 nothing written (a file that is no
result, a document without the markers).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from gradwire.bench.display import as_written

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench" / "transport"))

import figures  # noqa: E402 - found by the line above

DEVELOPMENT = "**Development run** on a machine that did other things at the same time: no conclusions."


def section(results: dict[str, Any], picture: str) -> str:
    """What the document says about these results; `picture` is its address there."""
    name = results["benchmark"]
    view = figures.FIGURES[name]
    verdicts = view.verdicts(results)
    missed = [f"- {verdict.line()}" for verdict in verdicts if not verdict.reached]
    summary = f"{len(verdicts) - len(missed)} of {len(verdicts)} targets reached" + (":" if missed else ".")
    if not verdicts:
        summary = "No target was judged."
    parts = [
        *([DEVELOPMENT] if figures.is_development_run(results) else []),
        f"Measured: {figures.describe_machine(results)}.",
        view.markdown(results),
        *([notes] if (notes := view.notes(results)) else []),
        "\n".join([summary, *missed]),
        f"![{name}]({picture})",
    ]
    return "\n\n".join(parts)


def replace_section(document: str, name: str, text: str) -> str:
    """The document with `text` between the markers of `name`.

    Raises:
        ValueError: a marker is missing, or there are several.
    """
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(begin) > document.index(end):
        raise ValueError(f"the document needs one line '{begin}' and after it one line '{end}'")
    before, rest = document.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def load(path: Path) -> dict[str, Any]:
    """The results in a file.

    Raises:
        ValueError: it holds none.
    """
    try:
        results = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    needed = {"benchmark", "machine", "small", "settings", "rows"}
    if not isinstance(results, dict) or not needed <= results.keys() or results["benchmark"] not in figures.FIGURES:
        raise ValueError(f"{path} holds no results of {' or '.join(figures.FIGURES)}")
    return results


def write(files: list[Path], document: Path, images: Path) -> bool:
    """Writes the sections and pictures of all files; whether every target is reached, and each file has some that were judged.

    Raises:
        ValueError: a file holds no results, the document has no place for them.
    """
    everything = [load(path) for path in files]
    text = document.read_text()
    for results in everything:
        name = results["benchmark"]
        text = replace_section(text, name, section(results, f"{images.name}/{name}.png"))
    images.mkdir(parents=True, exist_ok=True)
    for results in everything:
        figures.FIGURES[results["benchmark"]].draw(results, images / f"{results['benchmark']}.png")
    document.write_text(text)
    judged = [figures.FIGURES[results["benchmark"]].verdicts(results) for results in everything]
    return all(verdicts and all(verdict.reached for verdict in verdicts) for verdicts in judged)


@click.command(help=as_written(__doc__))
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--document", default=ROOT / "docs" / "benchmarks.md", type=click.Path(path_type=Path),
              help="Written to; its pictures go into the folder img beside it.")  # fmt: skip
def main(files: tuple[Path, ...], document: Path) -> None:
    """Reads the options and writes."""
    try:
        all_reached = write(list(files), document, document.parent / "img")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"written: {document}")
    sys.exit(0 if all_reached else 1)


if __name__ == "__main__":
    main()
