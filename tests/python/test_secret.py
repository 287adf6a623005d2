"""The job secret: where it comes from, what is refused, and that it is never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gradwire import _joining, _runtime
from gradwire.config import Config
from gradwire.errors import ConfigError
from gradwire.secret import job_secret

SECRET = "0123456789abcdef"


def file_with(folder: Path, text: str, mode: int = 0o600) -> Config:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return Config(secret_file=str(path))


def test_it_comes_from_the_environment_or_from_a_file(tmp_path: Path) -> None:
    assert job_secret(Config(), {}) is None
    assert job_secret(Config(), {"GRADWIRE_SECRET": SECRET}) == SECRET.encode()
    assert job_secret(file_with(tmp_path, SECRET + "\n"), {}) == SECRET.encode()
    assert job_secret(Config(security="off"), {"GRADWIRE_SECRET": SECRET}) is None


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_it_is_the_same_from_the_variable_as_from_the_file_whose_content_that_has(tmp_path: Path, end: str) -> None:
    from_file = job_secret(file_with(tmp_path, SECRET + end), {})
    assert job_secret(Config(), {"GRADWIRE_SECRET": SECRET + end}) == from_file == SECRET.encode()
    with pytest.raises(ConfigError, match="15 bytes"):
        job_secret(Config(), {"GRADWIRE_SECRET": SECRET[1:] + end})


def test_who_takes_it_out_of_the_environment_behind_the_first_group_meets_others_with_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_runtime._process, "runtime", None)
    monkeypatch.setenv("GRADWIRE_PORT", "0")
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET)
    owner = _runtime.runtime()
    try:
        monkeypatch.delenv("GRADWIRE_SECRET")
        assert _joining._secret() == SECRET.encode()
    finally:
        owner.stop()


def test_bytes_that_are_no_text_are_a_secret_too() -> None:
    assert job_secret(Config(), {"GRADWIRE_SECRET": os.fsdecode(b"\xff\xfe" * 8)}) == b"\xff\xfe" * 8


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o601])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"chmod 600 .* set GRADWIRE_SECRET instead"):
        job_secret(file_with(tmp_path, SECRET, mode), {})


def test_what_is_too_short_says_how_to_make_one_and_does_not_show_it(tmp_path: Path) -> None:
    for short in (
        lambda: job_secret(Config(), {"GRADWIRE_SECRET": SECRET[1:]}),
        lambda: job_secret(file_with(tmp_path, SECRET[1:]), {}),
    ):
        with pytest.raises(ConfigError, match="openssl rand -hex 32") as caught:
            short()
        assert "15 bytes" in str(caught.value)
        assert SECRET[1:] not in str(caught.value) + repr(caught.value.fields)


def test_two_sources_or_a_missing_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both set"):
        job_secret(file_with(tmp_path, SECRET), {"GRADWIRE_SECRET": SECRET})
    with pytest.raises(ConfigError, match="cannot be read"):
        job_secret(Config(secret_file=str(tmp_path / "nothing")), {})


def test_the_secret_is_no_setting_and_no_explanation_shows_it() -> None:
    config = Config.from_env(environ={"GRADWIRE_SECRET": SECRET})
    assert SECRET not in config.explain() + repr(config)
    with pytest.raises(ConfigError, match="GRADWIRE_SECRETS"):
        Config.from_env(environ={"GRADWIRE_SECRETS": SECRET})
