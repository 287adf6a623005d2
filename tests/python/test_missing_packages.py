"""What needs torch, NumPy, matplotlib or the extension module says so where it is missing, and what to do; the rest works without.

Nothing is uninstalled: a finder that Python asks first hides the packages.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.cli.main import _COMMANDS

HIDES = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {hidden!r}:
            raise {error}(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
COMMAND = "from gradwire.cli import main; main(prog_name='gradwire')"
INSTALL_TORCH = "needs the package torch, which is not installed: pip install 'gradwire[torch]'"


def without(
    hidden: list[str], program: str, *arguments: str, error: str = "ModuleNotFoundError"
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "MASTER_"))}
    command = [sys.executable, "-c", HIDES.format(hidden=hidden, error=error) + program, *arguments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_importing_the_backend_names_the_extra(package: str) -> None:
    program = """
import gradwire
try:
    import gradwire.torch
except gradwire.errors.MissingExtraError as error:
    print(error.extra, error.package, error)
"""
    ended = without([package], program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"torch {package} ")
    assert "pip install 'gradwire[torch]'" in ended.stdout


def test_a_communicator_without_numpy_names_the_extra() -> None:
    program = """
import gradwire
try:
    gradwire.Communicator
except gradwire.errors.MissingExtraError as error:
    print(error.extra, error.package, error)
"""
    ended = without(["torch", "numpy"], program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("numpy numpy gradwire.Communicator needs ")
    assert "pip install 'gradwire[numpy]'" in ended.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["monitor", "--help"], ["switch", "--help"]])
def test_the_command_works_without_them(arguments: list[str]) -> None:
    ended = without(["torch", "numpy", "matplotlib", "scipy"], COMMAND, *arguments)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("package", "status", "arguments", "said"),
    [
        ("torch", 2, ["serve", "--store", "tcp://127.0.0.1:1"], INSTALL_TORCH),
        ("torch", 2, ["demo"], "pip install 'gradwire[demo]'"),
        ("torch", 2, ["bench", "--quick"], "pip install 'gradwire[bench]'"),
        ("torch", 2, ["simulate", "model.pt"], INSTALL_TORCH),
        ("torch", 3, ["doctor", "--rank", "0", "--world-size", "2", "--store", "tcp://127.0.0.1:1"],
         "torch is not installed: pip install 'gradwire[torch]', or meet in a folder"),
        ("matplotlib", 2, ["simulate", "--bytes", "4", "--workers", "2", "--servers", "1", "--picture", "step.png"],
         "pip install 'gradwire[bench]'"),
        ("matplotlib", 2, ["switch", "--os", "tc", "--rate", "1000", "--buffer", "256", "--plot", "plan.png"],
         "pip install 'gradwire[switch]'"),
    ],
)  # fmt: skip
def test_a_command_that_needs_one_says_so_before_it_does_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, status: int, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").touch()
    ended = without([package], COMMAND, *arguments)
    assert (ended.returncode, ended.stdout) == (status, ""), ended.stderr
    assert said in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_help_loads_no_command_and_so_works_where_the_extension_does_not() -> None:
    ended = without(["gradwire._native"], COMMAND, "--help", error="ImportError")
    assert ended.returncode == 0, ended.stderr
    assert "simulate" in ended.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["simulate", "--bytes", "4"]])
def test_where_the_extension_does_not_load_the_command_says_what_to_do(arguments: list[str]) -> None:
    ended = without(["gradwire._native"], COMMAND, *arguments, error="ImportError")
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith("gradwire: the extension module cannot be loaded here: ")
    assert "Build the wheel on this host, or for manylinux" in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_the_table_of_commands_says_what_each_says_of_itself() -> None:
    for name, text in _COMMANDS.items():
        command = importlib.import_module(f"gradwire.cli.{name}").command
        assert command.get_short_help_str(limit=len(text) + 1) == text
