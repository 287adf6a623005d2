"""How faults are written down."""

from __future__ import annotations

import pytest
from gradwire import Config
from gradwire.chaos import Chaos
from gradwire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss=1%", Chaos(loss=0.01)),
        ("loss=0.25", Chaos(loss=0.25)),
        ("loss=1%,tail=10%,delay=2ms,seed=7", Chaos(0.01, 0.1, 0.002, 7)),
        ("corrupt=3%,duplicate=0.5", Chaos(corrupt=0.03, duplicate=0.5)),
        (" delay = 1.5s , seed = 0 ", Chaos(delay_s=1.5)),
        ("delay=50us", Chaos(delay_s=0.00005)),
    ],
)
def test_each_part_has_its_unit_and_may_be_left_out(text: str, expected: Chaos) -> None:
    assert Config(chaos=text).faults() == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"), ("loss", "loss"), ("los=1%", "los=1%"), ("loss=1%,loss=2%", "twice"), ("loss=91%", "loss=91%"), ("loss=1", "loss=1"),
        ("loss=-1%", "loss=-1%"), ("tail=ten", "tail=ten"), ("delay=2", "delay=2"), ("delay=11s", "delay=11s"), ("seed=-1", "seed=-1"),
        ("seed=18446744073709551616", "seed"), ("loss=1%,", "''"), ("loss=nan%", "loss=nan%"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_is_allowed(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match="chaos = ") as caught:
        Config(chaos=text)
    assert part in str(caught.value)
    assert "loss=1%,tail=10%,delay=2ms,seed=7" in str(caught.value)
    assert caught.value.field == "chaos"


def test_there_are_no_faults_unless_they_are_asked_for() -> None:
    assert Config().faults() is None
    assert Config.from_env(environ={"GRADWIRE_CHAOS": "loss=1%"}).faults() == Chaos(loss=0.01)
