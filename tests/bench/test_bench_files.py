"""Files of commands that take minutes: that they cannot be written is said before, and each is written though another cannot be."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from gradwire import _files
from gradwire.bench import report, run
from gradwire.bench.display import make_console
from gradwire.cli import demo, main, simulate, trace
from gradwire.demo.plan import Plan
from gradwire.demo.results import RunResults
from gradwire.lab import sandbox

CLOSED = Path("/proc")  # where nobody can make a file, not even root
FULL = Path("/dev/full")  # what cannot be written and is found out only by writing
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_folder_is_tried_and_nothing_stays_in_it(tmp_path):
    _files.check_folder(tmp_path)
    _files.check(tmp_path / "numbers.json")
    _files.check(FULL)
    assert list(tmp_path.iterdir()) == []
    for folder in (CLOSED, tmp_path / "missing"):
        with pytest.raises(OSError, match=str(folder)):
            _files.check(folder / "numbers.json")


@pytest.mark.parametrize(
    "options",
    [
        ["bench", "--json", "x", "--html", "./x"], ["bench", "--json", "bench.html"], ["bench", "--training", "--json", "training.html"],
        ["bench", "--json", "x", "--html", "linked"], ["demo", "--json", "demo.png"],
        ["simulate", "--bytes", "4000", "--json", "x.png", "--picture", "x.png"],
        ["switch", "--os", "tc", "--rate", "100", "--buffer", "256", "--out", "x.png", "--plot", "x.png"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_two_files_that_are_one_are_refused_before_one_is_written_over_the_other(tmp_path, monkeypatch, options):
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: pytest.fail("it would be measured"))
    monkeypatch.setattr(simulate, "simulate", lambda _: pytest.fail("it would be simulated"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to("x")
    more = ["--out", "."] if options[0] in ("bench", "demo") else []
    found = CliRunner().invoke(main, [*options, *more])
    assert (found.exit_code, "are one file" in found.output) == (2, True), found.output


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["bench"], "--json"),
        (["bench"], "--html"),
        (["demo"], "--json"),
        (["simulate", "--bytes", "4000"], "--picture"),
    ],
)
def test_a_hyphen_is_no_file_where_the_standard_output_has_tables(tmp_path, monkeypatch, command, option):
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: pytest.fail("it would be measured"))
    monkeypatch.setattr(simulate, "simulate", lambda _: pytest.fail("it would be simulated"))
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, [*command, option, "-"])
    assert (found.exit_code, f"Invalid value for '{option}'" in found.output) == (2, True), found.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options", [["bench", "--network", "loopback", "--loss", "0.1"], ["bench", "--network", "loopback", "--rate", "10"],
                ["bench", "--training", "--require", "busbw=1"]], ids=" ".join)  # fmt: skip
def test_a_plan_that_is_refused_leaves_no_folder(tmp_path, monkeypatch, options):
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: pytest.fail("it would be measured"))
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, options)
    assert (found.exit_code, list(tmp_path.iterdir())) == (2, []), found.output


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_second_run_does_not_write_into_the_folder_of_one_that_runs(tmp_path, monkeypatch, command):
    runs = []
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: runs.append(command) or 0)
    with _files.held(tmp_path):
        found = CliRunner().invoke(main, [command, "--out", str(tmp_path)])
        assert (found.exit_code, "another run writes into it" in found.output, runs) == (2, True, []), found.output
    found = CliRunner().invoke(main, [command, "--out", str(tmp_path)])
    assert (found.exit_code, len(runs), list(tmp_path.iterdir())) == (0, 1, []), found.output


def test_a_page_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    page = tmp_path / "x.html"
    page.write_text("of an earlier run")
    monkeypatch.setattr(report, "html_page", lambda *_: "new")
    monkeypatch.setattr(report, "pictures", lambda *_: [])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    measured = {"rows": [], "network": {"switch": "nft", "rate_mbit": None}, "settings": {"hosts": 2}, "targets": []}
    with pytest.raises(OSError, match="No space left"):
        report.write_html(measured, page)
    assert (page.read_text(), [each.name for each in tmp_path.iterdir()]) == ("of an earlier run", ["x.html"])


def test_a_timeline_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    file = tmp_path / "step.json"
    file.write_text("of an earlier step")
    monkeypatch.setattr(trace, "_answers_here", lambda *_: [{"job": "x"}])
    monkeypatch.setattr(trace, "find_sockets", lambda _: [])
    monkeypatch.setattr(trace, "align_answers", lambda _: ([None], [None]))
    monkeypatch.setattr(trace, "last_calls", lambda *_: [])
    monkeypatch.setattr(trace, "chrome_trace", lambda *_: {})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    found = CliRunner().invoke(main, ["trace", "-o", str(file)])
    assert (found.exit_code, f"{file}: No space left" in found.output.replace("\n", "")) == (2, True), found.output
    assert (file.read_text(), [each.name for each in tmp_path.iterdir()]) == ("of an earlier step", ["step.json"])


def test_bytes_of_a_command_line_that_are_no_text_are_written_as_escapes_whatever_the_locale(tmp_path):
    """As in the report, which holds the command line."""
    for name in ("new.html", "linked.html"):
        _files.replace(tmp_path / name, "caf\udce9 \u00e9")
        assert (tmp_path / name).read_bytes() == b"caf\\udce9 \xc3\xa9"
    assert _files.shown(Path("caf\udce9")) == "caf\\udce9"
    program = "import sys; from pathlib import Path; from gradwire import _files; _files.replace(Path(sys.argv[1]), chr(0x3bc))"
    latin = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, tmp_path / "other.html"], env=latin, check=True)
    assert (tmp_path / "other.html").read_bytes() == b"\xce\xbc"


def test_a_run_ends_in_order_though_its_folder_has_such_a_name(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    outcome = run.Outcome(folder, folder / "x.json")
    form = run._Form("bench.html", lambda whole, file: _files.replace(file, whole["command"]), lambda: None)
    run._conclude(make_console(), {"command": f"bench --out {folder}", "targets": []}, outcome, form)
    assert {file.name for file in folder.iterdir()} == {"bench.html", "x.json"}
    assert "caf\\udce9" in capsys.readouterr().out.replace("\n", "")


def test_what_is_thrown_away_may_be_thrown_to_one_place():
    _files.check_apart(json=Path("/dev/null"), html=Path("/dev/null"), picture=None, out=None)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        _files.check(tmp_path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY])
def test_a_file_that_may_be_written_and_not_replaced_is_written_where_it_is(tmp_path, monkeypatch, code):
    """As one that is mounted by itself; the refusal of the kernel is played, since the tests may run as root and without namespaces."""
    file = tmp_path / "x.json"
    file.write_text("of an earlier run, and longer")

    def refuse(*_):
        raise OSError(code, "")

    monkeypatch.setattr(Path, "replace", refuse)
    _files.check(file)
    _files.replace(file, "new")
    assert (file.read_text(), [each.name for each in tmp_path.iterdir()]) == ("new", ["x.json"])


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        ("bench", "--out", ""), ("bench", "--json", "x.json"), ("bench", "--html", "x.html"), ("demo", "--out", ""),
        ("demo", "--json", "x.json"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path, monkeypatch, command, option, name
):
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: pytest.fail("it would be measured"))
    found = CliRunner().invoke(main, [command, "--out", str(tmp_path), option, str(CLOSED / name)])
    assert (found.exit_code, str(CLOSED) in found.output) == (2, True), found.output


@pytest.mark.parametrize("option", ["--json", "--picture"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_simulation_is_not_begun_where_its_files_cannot_be_written(tmp_path, monkeypatch, option, is_there):
    monkeypatch.setattr(simulate, "simulate", lambda _: pytest.fail("it would be simulated"))
    file = (CLOSED if is_there else tmp_path / "missing") / "x.png"
    found = CliRunner().invoke(main, ["simulate", "--bytes", "4000", option, str(file)])
    assert (found.exit_code, str(file.parent) in found.output) == (2, True), found.output


def written(folder: Path, *, json_file: Path, page: Path) -> set[str]:
    """What stays of a benchmark one of whose files cannot be written, which is raised."""
    outcome = run.Outcome(folder, json_file, page)
    form = run._Form("bench.html", lambda whole, file: file.write_text(whole["command"]) and None, lambda: None)
    with pytest.raises(OSError, match="No space left"):
        run._conclude(make_console(), {"command": "it", "targets": []}, outcome, form)
    return {file.name for file in folder.iterdir()}


def test_a_page_is_written_though_the_numbers_cannot_be_and_the_other_way_round(tmp_path):
    assert written(tmp_path, json_file=FULL, page=tmp_path / "x.html") == {"x.html"}
    assert written(tmp_path, json_file=tmp_path / "x.json", page=FULL) == {"x.html", "x.json"}


def test_a_picture_of_the_demo_is_drawn_though_the_numbers_cannot_be_written_and_the_other_way_round(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plan = Plan(EXAMPLES)
    results = [RunResults(each) for each in plan.runs]
    for result in results:
        record = {"step_ms": 10.0, "comm_ms": 5.0, "bytes_lost_share": 0.0}
        result.add_step([{"begun": 0.0, "ended": 0.01, "record": record}], timed=True)
        result.validation.append((1, 2.5))
    with pytest.raises(OSError, match="No space left"):
        demo._conclude(make_console(), plan, results, tmp_path / "demo.png", FULL)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OSError, match="missing"):
        demo._conclude(make_console(), plan, results, tmp_path / "missing" / "demo.png", tmp_path / "x.json")
    assert len(json.loads((tmp_path / "x.json").read_text())["runs"]) == 4
    assert capsys.readouterr().out.count("step slowest") == 2, "the table is printed in any case"


def test_a_picture_of_a_simulation_is_drawn_though_the_numbers_cannot_be_written(tmp_path):
    pytest.importorskip("matplotlib")
    small = ["--bytes", "40000", "--workers", "4", "--servers", "1", "--warm-up", "0"]
    found = CliRunner().invoke(main, ["simulate", *small, "--json", str(FULL), "--picture", str(tmp_path / "x.png")])
    assert (found.exit_code, "No space left" in found.output) == (2, True), found.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_of_the_folder_says_at_once_what_cannot_be_written(load_benchmark, tmp_path, capsys):
    frame = load_benchmark("frame")
    for out, json_file in ((CLOSED, None), (tmp_path, CLOSED / "x.json")):
        with pytest.raises(SystemExit) as ended:
            frame.run("name", frame.Settings(True, json_file, out), {}, lambda _: pytest.fail("measured"),
                      lambda *_: True, in_lab=False)  # fmt: skip
        assert ended.value.code == frame.NOT_RUN
        assert str(CLOSED) in capsys.readouterr().out


def test_a_benchmark_of_the_folder_draws_though_the_numbers_cannot_be_written(load_benchmark, tmp_path, capsys):
    frame, concluded = load_benchmark("frame"), []
    with pytest.raises(SystemExit) as ended:
        frame.run("name", frame.Settings(True, FULL, tmp_path), {}, lambda _: {"rows": [1]},
                  lambda _, results: concluded.append(results["rows"]) or True, in_lab=False)  # fmt: skip
    assert (ended.value.code, concluded) == (frame.NOT_RUN, [[1]])
    assert "No space left" in capsys.readouterr().out
