"""The files of `gradwire bench`: whole or not there, of JSON's own numbers, and of the source that they name."""

import importlib.util
import json
import math
import os
import shutil
import stat
import subprocess

import pytest
from gradwire.bench import machine, numbers
from gradwire.lab import NamespacesUnavailable, sandbox


def test_what_is_not_finite_is_null(tmp_path):
    file = tmp_path / "numbers.json"
    numbers.write(file, {"rows": [{"curve": [(0, 5.5), (1, math.nan)], "loss": -math.inf}], "steps": 3, "name": None})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(file.read_text(), parse_constant=refuse)
    assert found == {"rows": [{"curve": [[0, 5.5], [1, None]], "loss": None}], "steps": 3, "name": None}
    assert os.listdir(tmp_path) == ["numbers.json"]


def test_a_full_disk_leaves_the_numbers_of_an_earlier_run_and_nothing_else(tmp_path):
    def main() -> int:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", tmp_path], check=True)
        file = tmp_path / "numbers.json"
        numbers.write(file, {"run": 1})
        with pytest.raises(OSError, match="No space left"):
            numbers.write(file, {"run": 2, "samples_ms": [0.5] * 10_000})
        assert os.listdir(tmp_path) == ["numbers.json"]
        assert json.loads(file.read_text()) == {"run": 1}
        return 0

    try:
        assert sandbox.run(main) == 0
    except NamespacesUnavailable as error:
        pytest.skip(str(error))


def test_two_runs_whose_processes_have_the_same_number_do_not_share_an_unfinished_file(tmp_path):
    """As those have that are the first in the namespace of their sandbox."""
    file, own = tmp_path / "numbers.json", tmp_path / f".numbers.json.{os.getpid()}"
    own.write_text("of another run")
    numbers.write(file, {"run": 1})
    assert own.read_text() == "of another run"
    assert json.loads(file.read_text()) == {"run": 1}


def test_numbers_have_the_mode_of_any_file(tmp_path):
    (tmp_path / "any").touch()
    numbers.write(tmp_path / "numbers.json", {"run": 1})
    assert len({stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}) == 1


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        numbers.write(pipe, {"run": 1})
        assert json.loads(reader.read()) == {"run": 1}
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_source_and_not_of_a_repository_around_an_environment(tmp_path):
    def git(*words):
        own = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", "-C", str(tmp_path), *own, *words], capture_output=True, check=True)

    installed = tmp_path / "venv" / "machine.py"
    installed.parent.mkdir()
    shutil.copy(machine.__file__, installed)
    spec = importlib.util.spec_from_file_location("installed_machine", installed)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "train.py").touch()
    git("init")
    git("add", "train.py")
    git("commit", "-m", "Theirs")
    assert module._commit() == ""
    git("add", "venv")
    git("commit", "-m", "Ours")
    assert module._commit()
