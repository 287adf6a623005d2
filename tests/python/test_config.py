"""The configuration object: checked when set, and the operator wins."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from gradwire import Config
from gradwire.config import PRESETS, service_links, settings
from gradwire.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536), ("port", -1), ("port", True), ("port", "47400"), ("mtu", 100), ("preset", "dlpc"), ("loss_bound", 1.0),
        ("loss_bound", float("nan")), ("floor", 1.1), ("deadline_ms", -1.0), ("algorithm", "tree"), ("eager_bytes", 0),
        ("ack_every", 0), ("peer_timeout_s", 0.0), ("dscp", 64), ("offload", "on"), ("sync_futures", 1), ("preset", None),
        ("ack_delay_us", 50_001), ("ack_delay_us", -1),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_with_its_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        Config(**{field: value})
    assert caught.value.field == field
    assert caught.value.allowed in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("paths", np.int64(2), 2), ("port", np.uint16(47_400), 47_400), ("loss_bound", np.float32(0.25), 0.25),
        ("loss_bound", np.int8(0), 0.0), ("floor", Fraction(1, 2), 0.5), ("deadline_ms", np.float64(7), 7.0),
    ],
)  # fmt: skip
def test_a_number_of_another_library_is_taken_as_pythons_own(field: str, value: object, kept: float) -> None:
    found = getattr(Config(**{field: value}), field)
    assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize(
    ("field", "value"),
    [("paths", np.float64(2)), ("paths", np.int64(17)), ("port", np.True_), ("loss_bound", np.True_), ("loss_bound", 10**400),
     ("floor", np.float32("nan"))],
)  # fmt: skip
def test_what_is_no_number_of_the_range_stays_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} = .* is not allowed"):
        Config(**{field: value})


def test_a_number_that_python_does_not_write_is_refused_by_its_type() -> None:
    with pytest.raises(ConfigError, match=r"paths = \(of type int\) is not allowed"):
        Config(paths=10**5000)


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="los_bound"):
        Config(los_bound=0.1)


def test_the_environment_wins_over_arguments_which_win_over_defaults() -> None:
    config = Config.from_env(Config.mlt(ack_every=20, dscp=3), {"GRADWIRE_DSCP": "8", "HOME": "/"})
    assert (config.preset, config.ack_every, config.dscp, config.eager_bytes) == ("mlt", 20, 8, 262144)
    origins = [config.origin(name) for name in ("eager_bytes", "ack_every", "dscp")]
    assert origins == ["default", "argument", "environment GRADWIRE_DSCP"]
    assert config.pinned("dscp")
    assert not config.pinned("ack_every")


def test_explain_has_a_line_for_every_field_with_value_and_origin() -> None:
    lines = Config.from_env(environ={"GRADWIRE_LOSS_BOUND": "0.2"}).explain().splitlines()
    assert [line.split()[0] for line in lines] == [f.name for f in settings()]
    assert next(line for line in lines if line.startswith("loss_bound")).split(maxsplit=2)[1:] == [
        "0.2",
        "environment GRADWIRE_LOSS_BOUND",
    ]


def test_explain_of_a_program_s_own_settings_shows_what_the_operator_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/config.md: the operator wins, and `Config.explain` says so."""
    monkeypatch.setenv("GRADWIRE_PRESET", "mlt")
    rows = [line.split(maxsplit=2) for line in Config.auto(dscp=3).explain().splitlines()]
    assert ["preset", "mlt", "environment GRADWIRE_PRESET"] in rows
    assert ["dscp", "3", "argument"] in rows
    assert "GRADWIRE_PRESET" not in Config.auto(dscp=3).explain({})
    monkeypatch.setenv("GRADWIRE_LOSS_BOND", "0.1")
    with pytest.raises(ConfigError, match="GRADWIRE_LOSS_BOUND"):
        Config().explain()


def test_a_misspelt_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="GRADWIRE_LOSS_BOUND") as caught:
        Config.from_env(environ={"GRADWIRE_LOSBOUND": "0.1"})
    assert caught.value.nearest == "GRADWIRE_LOSS_BOUND"


def test_what_kubernetes_makes_of_services_is_ignored() -> None:
    links = {
        "GRADWIRE_SERVICE_HOST": "10.0.0.7", "GRADWIRE_SERVICE_PORT": "47400", "GRADWIRE_SERVICE_PORT_METRICS": "9400",
        "GRADWIRE_PORT": "udp://10.0.0.7:47400", "GRADWIRE_PORT_47400_UDP": "udp://10.0.0.7:47400",
        "GRADWIRE_PORT_47400_UDP_PROTO": "udp", "GRADWIRE_PORT_47400_UDP_PORT": "47400", "GRADWIRE_PORT_47400_UDP_ADDR": "10.0.0.7",
        "GRADWIRE_METRICS_PORT": "tcp://10.0.0.8:9400", "GRADWIRE_METRICS_SERVICE_HOST": "10.0.0.8",
        "GRADWIRE_METRICS_PORT_9400_TCP_ADDR": "10.0.0.8", "GRADWIRE_X_PORT": "sctp://10.0.0.9:1",
        "GRADWIRE_X_PORT_1_SCTP": "sctp://10.0.0.9:1",
    }  # fmt: skip
    config = Config.from_env(environ={**links, "GRADWIRE_DSCP": "8"})
    assert (config.port, config.metrics_port, config.dscp) == (None, None, 8)
    assert config.origin("port") == config.origin("metrics_port") == "default"
    assert service_links({**links, "GRADWIRE_DSCP": "8", "TRAIN_PORT": "tcp://10.0.0.9:1"}) == sorted(links)
    assert service_links({f"GRADWIRE_{field.name.upper()}": "1" for field in settings()}) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GRADWIRE_PORT", "http://10.0.0.7:47400"), ("GRADWIRE_METRICS_PORT", "tcp"), ("GRADWIRE_PORTS", "tcp://10.0.0.7:1"),
        ("GRADWIRE_MTU", "tcp://10.0.0.7:1"), ("GRADWIRE_SERVICE_HOSTS", "10.0.0.7"), ("GRADWIRE_PORT_TCP", "1"),
    ],
)  # fmt: skip
def test_what_only_resembles_a_service_of_kubernetes_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_env(environ={name: text})


@pytest.mark.parametrize("text", ["many", "", "1.5", "0x10"])
def test_a_variable_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="GRADWIRE_ACK_EVERY"):
        Config.from_env(environ={"GRADWIRE_ACK_EVERY": text})


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("off", False), ("false", False)])
def test_switches_are_read_from_words(text: str, value: bool) -> None:
    assert Config.from_env(environ={"GRADWIRE_SYNC_FUTURES": text}).sync_futures is value


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1


# test of: mlt/rate-control, dlcp/receiving-rate, ltp/bdp-control
def test_each_preset_has_the_rate_control_of_its_paper_unless_one_is_named() -> None:
    controllers = {
        "auto": "bottleneck",
        "mlt": "timely",
        "dlcp": "receiving_rate",
        "ltp": "bottleneck",
        "ultima": "bottleneck",
        "reliable": "bottleneck",
    }
    assert {name: Config(preset=name).controller_name() for name in PRESETS} == controllers
    assert {Config(preset=name, controller="timely").controller_name() for name in PRESETS} == {"timely"}


def test_every_preset_exists_in_the_engine() -> None:
    from gradwire import _native

    for name in PRESETS:
        assert _native.preset_defaults(name) is not None
        assert getattr(Config, name)().preset == name
    assert _native.preset_defaults("another") is None
    assert tuple(_native.preset_names()) == PRESETS


def test_a_value_that_replaces_that_of_the_environment_is_an_argument() -> None:
    config = Config.from_env(environ={"GRADWIRE_LOSS_BOUND": "0.1", "GRADWIRE_DSCP": "3"})
    other = dataclasses.replace(config, loss_bound=0.2)
    assert other.origin("loss_bound") == "argument"
    assert not other.pinned("loss_bound")
    assert other.origin("dscp") == "environment GRADWIRE_DSCP", "it was left as it was"
    again = Config.from_env(other, environ={"GRADWIRE_LOSS_BOUND": "0.3"})
    assert (again.loss_bound, again.origin("loss_bound")) == (0.3, "environment GRADWIRE_LOSS_BOUND")
    assert again.origin("dscp") == "environment GRADWIRE_DSCP"


@pytest.mark.parametrize(
    "url",
    [
        "foo",
        "ftp://x/y",
        "http://",
        "http:///v1",
        "http://host:port/",
        "http://a b/",
        "https://u:p#w@h:1/",
        "u:p#w@h:1/",
        "http:/u:p#w@h",
        "http://u:\np#w@h",
    ],
)
def test_a_collector_has_a_url_of_http(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint") as caught:
        Config(otlp_endpoint=url)
    assert "http://HOST... | https://HOST..." in str(caught.value)
    assert "p#w" not in str(caught.value) + str(caught.value.fields)


def test_an_empty_url_is_none_and_one_with_a_password_is_shown_without() -> None:
    assert Config.from_env(environ={"GRADWIRE_OTLP_ENDPOINT": ""}).otlp_endpoint is None
    assert Config(otlp_endpoint="HTTPS://[::1]:4318").otlp_endpoint == "HTTPS://[::1]:4318"
    url = "http://user:hunter2@host:4318/v1/metrics"
    config = Config(otlp_endpoint=url)
    assert config.otlp_endpoint == url
    assert "http://***@host:4318/v1/metrics" in config.explain()
    assert "hunter2" not in config.explain() + repr(config)
