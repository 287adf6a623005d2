"""`gradwire switch` from outside."""

import errno
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from gradwire.cli import main
from gradwire.config import Config
from gradwire.switch import make_plan, picture

COMMON = ["--rate", "1000", "--buffer", "256"]


def run(*arguments, **variables):
    return CliRunner().invoke(main, ["switch", *arguments], env=variables)


@pytest.mark.parametrize("system", ["tc", "sonic", "onyx", "cumulus", "eos"])
def test_each_system_gets_text_and_the_summary_goes_elsewhere(system):
    result = run("--os", system, *COMMON, "--port", "portX")
    assert result.exit_code == 0, result.output
    assert "portX" in result.stdout
    assert "GRADWIRE_CLASSES=7" in result.stderr
    assert "expected loss" not in result.stdout
    if system == "sonic":
        json.loads(result.stdout)


@pytest.mark.parametrize("system", ["tc", "sonic", "onyx", "cumulus", "eos"])
@pytest.mark.parametrize("name", ["eth0; touch PWNED #", "", "Et1\nreload", "Et1\n", "-all", "$(reboot)"])
def test_what_is_no_name_of_a_port_gets_into_no_configuration(system, name):
    result = run("--os", system, *COMMON, "--port", name)
    assert (result.exit_code, result.stdout, "is no name of a port" in result.stderr) == (2, "", True)


def test_a_port_that_is_named_twice_is_written_once():
    ports = ["--port", "eth0.100", "--port", "vlan@eth1", "--port", "eth0.100"]
    text = run("--os", "tc", *COMMON, *ports).stdout
    assert re.findall(r"tc qdisc add dev (\S+) root", text) == ["eth0.100", "vlan@eth1"]


def test_the_environment_of_the_job_decides_the_code_points():
    result = run(
        "--os", "sonic", *COMMON, GRADWIRE_CLASSES="2", GRADWIRE_DSCP_CLASSES="12,8", GRADWIRE_DSCP_CONTROL="46"
    )
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)["DSCP_TO_TC_MAP"]["gradwire"]
    assert (table["46"], table["12"], table["8"], table["34"]) == ("7", "6", "5", "4")


def test_classes_of_the_command_line_go_before_the_environments_and_keep_its_code_points():
    result = run(
        "--os", "sonic", *COMMON, "--classes", "3", GRADWIRE_DSCP_CLASSES="12,10,8", GRADWIRE_DSCP_CONTROL="46"
    )
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)["DSCP_TO_TC_MAP"]["gradwire"]
    assert (table["12"], table["10"], table["8"]) == ("6", "5", "4")
    result = run("--os", "tc", *COMMON, "--classes", "3", GRADWIRE_CLASSES="2")
    assert "GRADWIRE_CLASSES=3" in result.stderr


def test_an_environment_with_which_the_job_runs_decides_how_many_classes_there_are():
    result = run("--os", "tc", *COMMON, GRADWIRE_DSCP_CLASSES="34,26,18,10", GRADWIRE_DSCP_CONTROL="40")
    assert result.exit_code == 0, result.stderr
    assert "GRADWIRE_CLASSES=4" in result.stderr
    assert "GRADWIRE_DSCP_CLASSES=34,26,18,10" in result.stderr


def test_the_plan_as_json_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    picture = tmp_path / "plan.png"
    result = run(
        *("--os", "tc", *COMMON, "--layers", "1,2,3,4,5,6,7", "--bucket-mb", "0"),
        *("--thresholds", "optimal", "--json", "--plot", str(picture)),
    )
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert [queue["name"] for queue in plan["queues"]] == ["control", *(f"class {number}" for number in range(7))]
    assert plan["queues"][7]["share"] == pytest.approx(7 / 28)
    assert plan["frame_bytes"] == 1514
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_mtu_and_the_buckets_of_the_job_are_taken():
    sizes = ",".join(str(megabytes << 20) for megabytes in (3, 20, 10, 4, 22, 5, 1, 2))
    arguments = ["--os", "tc", "--rate", "1000", "--buffer", "1024", "--classes", "4", "--json", "--layers", sizes]

    def shares(*more):
        plan = json.loads(run(*arguments, *more).stdout)
        return plan["frame_bytes"], [round(queue["share"] * 67) for queue in plan["queues"][1:5]]

    assert shares() == (1514, [37, 0, 28, 2])
    assert shares("--bucket-mb", "25") == (1514, [37, 0, 30, 0])
    assert shares("--bucket-mb", "0", "--mtu", "9000") == (9014, [23, 14, 27, 3])


@pytest.mark.parametrize(
    ("system", "form", "span"),
    [
        ("tc", r" min (\d+) max (\d+)", 9014),
        ("onyx", r"minimum-absolute (\d+) maximum-absolute (\d+)", 10),
        ("eos", r"minimum-threshold (\d+) bytes maximum-threshold (\d+)", 9014),
        ("cumulus", r"min-threshold (\d+)\n.* max-threshold (\d+)", 9014),
        ("sonic", r'"green_min_threshold": "(\d+)",\s*"green_max_threshold": "(\d+)"', 9014),
    ],
)
def test_on_every_system_the_two_thresholds_of_a_queue_lie_a_frame_of_the_mtu_apart(system, form, span):
    text = run("--os", system, "--rate", "100", "--buffer", "1024", "--mtu", "9000").stdout
    assert [int(high) - int(low) for low, high in re.findall(form, text)] == [span] * 7


def bars(axes, label):
    """Top to bottom, each as (row of its middle, where it begins, where it ends)."""
    (found,) = [container for container in axes.containers if container.get_label().startswith(label)]
    return [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_x() + bar.get_width()) for bar in found.patches]


def test_the_picture_shows_the_plans_thresholds_limits_and_losses():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    plan = make_plan(1000, 256 * 1024, Config.mlt(classes=3), layers=[1, 2, 5])
    figure = picture.figure_of(plan)
    left, right = figure.axes
    rows, data = list(enumerate(plan.queues)), [(row, q) for row, q in enumerate(plan.queues) if q.threshold_bytes]
    assert len(data) == 3
    assert "1000 Mbit/s, 262.144 KB" in figure.get_suptitle()
    assert bars(left, "limit L") == [(row, 0, pytest.approx(queue.limit_bytes / 1000)) for row, queue in rows]
    assert bars(left, "threshold S") == [
        (row, 0, pytest.approx((queue.threshold_bytes or 0) / 1000)) for row, queue in rows
    ]
    assert [text.get_text() for text in left.get_yticklabels()] == [
        f"{queue.name}  (DSCP {', '.join(map(str, queue.code_points)) or 'others'})" for queue in plan.queues
    ]
    for label, field, offset in (("small", "small_loss", -0.2), ("large", "large_loss", 0.2)):
        losses = [max(1e-15, getattr(queue, field)) for _, queue in data]
        found = bars(right, label)
        assert [middle for middle, _, _ in found] == pytest.approx([row + offset for row, _ in data])
        assert [end for _, _, end in found] == pytest.approx(losses, rel=1e-6, abs=0)
        assert {start for _, start, _ in found} == {right.get_xlim()[0]}, "a logarithmic axis has no 0"
        assert {f"{loss:.1e}" for loss in losses} <= {text.get_text() for text in right.texts}
    assert right.get_xscale() == "log"
    assert left.yaxis_inverted()
    assert right.yaxis_inverted()
    pyplot.close(figure)


def test_the_configuration_goes_into_a_file(tmp_path):
    result = run("--os", "tc", *COMMON, "--out", str(tmp_path / "port.sh"))
    assert result.exit_code == 0
    assert result.stdout == ""
    assert (tmp_path / "port.sh").read_text().startswith("#!/bin/sh")


def test_a_configuration_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    """A switch would take a part of one for all of it."""
    out = tmp_path / "port.sh"
    out.write_text("of an earlier plan")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = run("--os", "tc", *COMMON, "--out", str(out))
    assert (result.exit_code, "No space left" in result.stderr) == (2, True), result.output
    assert (out.read_text(), [each.name for each in tmp_path.iterdir()]) == ("of an earlier plan", ["port.sh"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--os", "ios", *COMMON],
        ["--os", "tc", "--rate", "0", "--buffer", "256"],
        ["--os", "tc", "--rate", "1000", "--buffer", "10"],
        ["--os", "tc", *COMMON, "--layers", "nowhere.pt"],
        ["--os", "tc", *COMMON, "--first", "200"],
        ["--os", "tc", *COMMON, "--first", "12.8"],
        ["--os", "tc", *COMMON, "--classes", "7", "--queues", "4"],
        ["--os", "tc", *COMMON, "--mtu", "9000"],
        ["--os", "tc", *COMMON, "--mtu", "500"],
        ["--os", "tc", *COMMON, "--bucket-mb", "-1"],
        ["--os", "tc", *COMMON, "--out", "/dev/full"],
        ["--os", "tc", *COMMON, "--out", "nowhere/port.sh"],
    ],
)
def test_wrong_usage_is_status_2_in_one_line(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("Error:") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--os", "tc", "--thresholds", "optimal", "--first", "20"], "--first is of --thresholds arithmetic"),
        (["--os", "tc", "--thresholds", "optimal", "--step", "0.5"], "--step is of --thresholds arithmetic"),
        (["--os", "tc", "--bucket-mb", "25"], "--bucket-mb is of the layers of --layers"),
        (["--os", "sonic", "--tx-queue", "uc-tx-queue"], "--tx-queue is of --os eos"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused_with_the_remedy(arguments, message):
    result = run(*arguments, *COMMON)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "leave it out" in result.stderr


@pytest.mark.parametrize(
    ("rate", "buffer", "reason"),
    [
        ("0.000007", "256", "8 bit/s"),
        ("138000000", "4000", "137438953 Mbit/s"),
        ("1000", "4294968", "4294967295"),
        ("1000", "2454268", "a threshold of 1073742250 bytes"),
    ],
)
def test_what_tc_cannot_express_is_refused_and_is_no_reason_for_another_system(rate, buffer, reason):
    plan = ["--rate", rate, "--buffer", buffer, "--queues", "2", "--classes", "1"]
    result = run("--os", "tc", *plan)
    assert (result.exit_code, result.stdout, reason in result.stderr) == (2, "", True), result.stderr
    assert run("--os", "sonic", *plan).exit_code == 0


def test_a_threshold_beyond_what_arista_allows_is_refused_and_is_no_reason_for_another_system():
    plan = ["--rate", "100000", "--queues", "2", "--classes", "1", "--buffer"]
    taken = run("--os", "eos", *plan, "585139")  # half of seven eighths, and a frame
    assert re.findall(r"maximum-threshold (\d+)", taken.stdout) == ["255999826"]
    refused = run("--os", "eos", *plan, "585141")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "a threshold of 256000701 bytes is more than EOS can express: 256000000" in refused.stderr
    assert run("--os", "sonic", *plan, "585141").exit_code == 0


def test_a_rate_that_red_cannot_be_told_is_said_in_the_script():
    fast = run("--os", "tc", "--rate", "100000", "--buffer", "512")
    assert set(re.findall(r"bandwidth (\d\w+)", fast.stdout)) == {"34359738360bit"}
    assert "tbf rate 100000000000bit" in fast.stdout
    assert "not the port's 100000000000bit" in fast.stdout
    slow = run("--os", "tc", "--rate", "34359.73836", "--buffer", "512")
    assert set(re.findall(r"bandwidth (\d\w+)", slow.stdout)) == {"34359738360bit"}
    assert "not the port's" not in slow.stdout


@pytest.mark.parametrize("system", ["tc", "sonic", "onyx", "cumulus", "eos"])
@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        ({"GRADWIRE_DSCP_CLASSES": "10,12,14"}, "GRADWIRE_DSCP_CONTROL=40"),
        ({"GRADWIRE_DSCP_CLASSES": "10,12,14", "GRADWIRE_DSCP": "14"}, "GRADWIRE_DSCP_CONTROL=40"),
        ({"GRADWIRE_DSCP_CONTROL": "0"}, "GRADWIRE_DSCP_CONTROL=40"),
        ({"GRADWIRE_DSCP_CLASSES": "10,0,14", "GRADWIRE_DSCP_CONTROL": "40"}, "GRADWIRE_DSCP_CLASSES=34,36,26"),
    ],
)
def test_best_effort_never_goes_before_gradients_on_any_system(system, variables, remedy):
    result = run("--os", system, *COMMON, GRADWIRE_CLASSES="3", **variables)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert remedy in result.stderr


def test_the_largest_first_threshold_is_named_as_the_option_takes_it():
    refused = run("--os", "tc", *COMMON, "--first", "12.8")
    assert "--first 9.772" in refused.stderr
    assert run("--os", "tc", *COMMON, "--first", "9.773").exit_code == 2
    taken = run("--os", "tc", *COMMON, "--first", "9.772")
    assert taken.exit_code == 0, taken.output
    ends = re.findall(r"red limit (\d+) min \d+ max (\d+)", taken.stdout)
    assert len(ends) == 7
    assert all(int(limit) - int(high) >= 1513 for limit, high in ends), "a packet's room above RED's max"


@pytest.mark.parametrize("suffix", [".txt", ".tar.gz"])
def test_a_picture_of_no_known_format_is_status_2_in_one_line(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    result = run("--os", "tc", *COMMON, "--plot", str(tmp_path / f"plan{suffix}"))
    assert result.exit_code == 2
    assert (result.stderr.count("Error:"), result.stdout) == (1, "")
    assert "supported formats: " in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_picture_without_a_suffix_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    assert run("--os", "tc", *COMMON, "--plot", str(tmp_path / "plan")).exit_code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--os", "tc", *COMMON, "--plot", str(tmp_path / "plan.png"))
    assert result.exit_code == 2
    assert "gradwire[switch]" in result.stderr


def test_without_scipy_the_optimum_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    result = run("--os", "tc", *COMMON, "--thresholds", "optimal")
    assert result.exit_code == 2
    assert "gradwire[switch]" in result.stderr
