"""Sealed groups through torch: on when asked for, on between network namespaces, and typed errors when secrets differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradwire.lab.network import Layout, Network
from launch import Outcome, checks_of, in_lab, launch

SEALED = {"GRADWIRE_TEST_CIPHER": "sealed"}
SECRET = {"GRADWIRE_SECRET": "the secret of this job"}


@pytest.mark.parametrize("secret", [SECRET, {}], ids=["configured", "generated"])
def test_ranks_on_one_host_are_sealed_when_that_is_asked_for(tmp_path: Path, secret: dict[str, str]) -> None:
    outcome = launch("sealed", 3, tmp_path, env={**SEALED, **secret, "GRADWIRE_SECURITY": "on"})
    for check in checks_of("sealed"):
        outcome.require(check)
    outcome.require_clean_exit()
    assert SECRET["GRADWIRE_SECRET"] not in outcome.transcript()


@pytest.mark.parametrize("security", ["auto", "off"])
def test_between_network_namespaces_auto_is_on_and_off_is_said_once(tmp_path: Path, security: str) -> None:
    expected = {"GRADWIRE_TEST_CIPHER": "sealed" if security == "auto" else "clear"}
    env = {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_SECURITY": security, **expected}

    def main() -> Outcome:
        with Network(Layout(hosts=2, switch="nft")) as network:
            return launch("sealed", 2, tmp_path, env=env, spawn=network.spawn)

    outcome = in_lab(tmp_path, main)
    for check in checks_of("sealed"):
        outcome.require(check)
    for output in outcome.outputs:
        assert output.count("leave this host in clear") == (1 if security == "off" else 0), output


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("wrong")
    return launch("sealed_wrong", 3, folder, env={"GRADWIRE_SECURITY": "on"}, backend="")


@pytest.mark.parametrize("check", checks_of("sealed_wrong"))
def test_secrets_that_differ(wrong: Outcome, check: str) -> None:
    wrong.require(check)
    assert "something else altogether" not in "".join(wrong.outputs)
