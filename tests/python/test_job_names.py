"""A job is found by the name that it was given, whatever its sockets are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradwire.observe.client import find_sockets
from gradwire.observe.status import JOB_CHARS_MAX, StatusServer, job_name_of


@pytest.mark.parametrize("job", ["fine tuning/7", "x" * (JOB_CHARS_MAX + 1), "[::1]:29400"])
def test_a_job_is_found_by_the_name_that_it_was_given(
    job: str, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    servers = [StatusServer(name, 0, {}) for name in (job_name_of(job), "other")]
    try:
        assert find_sockets(job) == [servers[0].path]
    finally:
        for server in servers:
            server.stop()


def test_a_whole_name_is_not_taken_for_the_beginning_of_another(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    servers = [StatusServer(name, 0, {}) for name in ("train", "train-2")]
    try:
        assert find_sockets("train") == [servers[0].path]
        assert set(find_sockets("trai")) == {server.path for server in servers}
    finally:
        for server in servers:
            server.stop()


def test_long_names_that_differ_in_their_ends_are_those_of_different_jobs() -> None:
    names = {job_name_of(f"/home/somebody/experiments/of this year/run-{number}/met-here") for number in range(3)}
    assert len(names) == 3
    assert job_name_of("\udcff" * 2 * JOB_CHARS_MAX), "of bytes that are no text"
    assert {job_name_of(name) for name in names} == names, "who types such a name finds the job"
    assert max(map(len, names)) <= JOB_CHARS_MAX
