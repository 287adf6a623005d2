"""Tables of `gradwire bench` on terminals of any width: no number is folded or cut."""

import io

import pytest
from gradwire.bench import report, tables, training_report
from rich.console import Console

HEADS = ("variant", "collective", "ranks", "size", "p50 ms", "p95", "lost")
LINES = [
    ["gradwire-auto/halving_doubling", "all_reduce", "4", "1 MB", "1234.5", "1300.25", "0.125%"],
    ["gloo-cubic", "all_reduce", "4", "1 MB", "98765.5", "99999.75", "0.000%"],
]


def printed(width: int, heads=HEADS, lines=LINES, names: int = 4) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    tables.print_table(console, "time of a call", heads, lines, names)
    return console.file.getvalue().splitlines()


def words_of(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.replace("\u2502", " ").replace("\u2503", " ").split()]


def test_what_fits_is_one_table():
    lines = printed(120)
    assert lines[0].strip() == "time of a call"
    assert len(lines) == 1 + 2 + 1 + len(LINES) + 1


@pytest.mark.parametrize("width", [80, 60, 50, 20])
def test_where_it_does_not_fit_every_cell_is_whole_and_beside_its_variant(width):
    lines = printed(width)
    words = words_of(lines)
    for variant, *_, p50, p95, lost in LINES:
        for cell in (p50, p95, lost):
            assert words.count(cell) == 1
            assert [line for line in lines if cell in line and variant in line]
    if width >= 50:  # the longest variant and one number
        assert max(map(len, lines)) <= width


def test_a_title_says_what_all_lines_have_in_common():
    assert " ".join(" ".join(printed(60)).split()).startswith(
        "time of a call, collective all_reduce, ranks 4, size 1 MB "
    )
    assert "all_reduce" not in " ".join(printed(60)[2:])


def row_of(variant: str, p50: float) -> dict:
    return {
        "variant": variant, "peer": "gloo" in variant, "collective": "all_reduce", "ranks": 4, "bytes": 1 << 20, "rtt_ms": 0.0,
        "loss": 0.001, "scenario": "healthy", "samples": 1000, "block": 0, "wrong": 0, "unjudged": 0, "p50_ms": p50, "p95_ms": 1.1 * p50,
        "p99_ms": 1.2 * p50, "p999_ms": 1.3 * p50, "algbw_gb_s": 1.2345 / p50, "busbw_gb_s": 2.3456 / p50, "lost_share": 0.00123,
        "filled_share": 0.00056, "cpu_s_per_gb": 7.891, "samples_ms": [p50],
    }  # fmt: skip


def test_every_number_of_a_benchmark_is_whole_on_a_terminal_of_80_columns():
    rows = [row_of("gloo-cubic", 234.56), row_of("gradwire-reliable/halving_doubling/rotated", 123.45)]
    console = Console(file=io.StringIO(), width=80)
    report.print_table(console, rows)
    lines = console.file.getvalue().splitlines()
    words = words_of(lines)
    for row in rows:
        assert set(report.cells_of(row)[5:]) <= set(words)
    assert {"1.9", "1.14"} & set(words)
    assert not any("\u2026" in line for line in lines)


def test_every_number_of_trainings_is_whole_on_a_terminal_of_80_columns():
    curve = [(0, 0.0, 5.5), (10, 12.5, 2.3456)]
    shared = {"curve": curve, "comm_share": 0.53, "lost_share": 0.00123, "filled_share": 0.00456, "step_ms_p50": 1234.0,
              "steps": 10, "steps_apart": 7}  # fmt: skip
    times = (("gloo-cubic", 0.0, 123.4), ("gradwire-auto", 0.0, 111.1), ("gloo-cubic", 0.01, 987.6))
    rows = [
        {"variant": name, "peer": "gloo" in name, "loss": loss, "seconds": seconds, **shared}
        for name, loss, seconds in times
    ]
    console = Console(file=io.StringIO(), width=80)
    training_report.print_table(console, rows, 2.5)
    words = set(words_of(console.file.getvalue().splitlines()))
    assert {"123.4", "111.1", "987.6", "1234", "53%", "0.123%", "0.456%", "7", "2.3456"} <= words
