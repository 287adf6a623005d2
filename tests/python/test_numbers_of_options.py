"""What is no number of the kind that an option takes is wrong usage of a command, with status 2 and one line."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from gradwire.cli import lab, main
from gradwire.errors import ConfigError
from gradwire.lab import sandbox
from gradwire.torch._serving import open_store

SWITCH = ["switch", "--os", "tc", "--rate", "100", "--buffer", "256"]
SIMULATE = ["simulate", "--bytes", "4000"]


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch):
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: pytest.fail("it would run"))
    monkeypatch.setattr(lab, "_start_in_background", lambda _: pytest.fail("it would run"))


def refused(option: list[str], number: str) -> None:
    found = CliRunner().invoke(main, [*option, number])
    assert (found.exit_code, type(found.exception)) == (2, SystemExit), found.output
    assert f"Invalid value for '{option[-1]}'" in found.output


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "option",
    [
        ["bench", "--size"], ["bench", "--minutes"], ["bench", "--target"], ["bench", "--rate"], ["bench", "--loss"],
        ["demo", "--rate"], ["demo", "--minutes"], ["serve", "--wait"], ["lab", "up", "--buffer"], ["lab", "up", "--bucket"],
        ["lab", "up", "--host-rate"], ["lab", "set", "--delay"], [*SWITCH, "--rate"], [*SWITCH, "--buffer"],
        [*SWITCH, "--first"], [*SWITCH, "--step"], [*SIMULATE, "--bucket-mb"], [*SIMULATE, "--rate"],
        [*SIMULATE, "--jitter-us"], ["doctor", "--wait"], ["doctor", "--loss-max"], ["monitor", "--every"], ["monitor", "--seconds"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_not_finite_is_wrong_usage(option, number):
    refused(option, number)


@pytest.mark.parametrize(
    "option",
    [["bench", "--size"], ["lab", "up", "--buffer"], [*SWITCH, "--buffer"], [*SWITCH, "--first"], [*SIMULATE, "--bucket-mb"]],
    ids=" ".join,
)  # fmt: skip
def test_bytes_that_no_machine_has_are_wrong_usage(option):
    refused(option, "1e308")


@pytest.mark.parametrize("seed", ["-1", str(1 << 64)])
def test_a_seed_that_the_simulator_cannot_hold_is_wrong_usage(seed):
    refused([*SIMULATE, "--seed"], seed)


@pytest.mark.parametrize("size", ["0", "-1"])
def test_a_size_of_nothing_is_wrong_usage(size):
    found = CliRunner().invoke(main, ["bench", "--size", size])
    assert (found.exit_code, "Invalid value for '--size'" in found.output) == (2, True), found.output


@pytest.mark.parametrize("factor", ["nan", "inf"])
def test_a_factor_that_nothing_or_everything_reaches_is_wrong_usage(tmp_path, factor):
    found = CliRunner().invoke(main, ["bench", "--out", str(tmp_path), "--require", f"busbw={factor}"])
    assert (found.exit_code, "nothing can be required" in found.output) == (2, True), found.output


@pytest.mark.parametrize("port", ["295000", "65536", "0", "-1", "²", ""])
def test_a_store_has_a_port(port):
    with pytest.raises(ConfigError, match="is not allowed: tcp://host:port"):
        open_store(f"tcp://127.0.0.1:{port}", 1.0)
