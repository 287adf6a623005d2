"""What is installed: README's commands install what was built, the command names its build, and the package says what it has."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import gradwire
import pytest
from click.testing import CliRunner
from gradwire import _board, _native
from gradwire.cli import main

ROOT = Path(__file__).parents[2]
PROGRAM = "from gradwire import NAME; print(NAME)"


def commands_of_readme() -> list[str]:
    """Of each way to install a wheel: how it is found, and the command that installs it."""
    text = (ROOT / "README.md").read_text()
    return [" && ".join(found) for found in re.findall(r"(wheel=\$\(.*\))\n    (pip install .*)", text)]


def make_wheel(folder: Path, name: str) -> None:
    """A package of gradwire's name and version, with no more in it than a name."""
    tag = f"py3-none-manylinux_2_28_{platform.machine()}"
    wheel = folder / f"gradwire-0.1.0-{tag}.whl"
    files = {
        "gradwire/__init__.py": f"NAME = {name!r}\n",
        "gradwire-0.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: gradwire\nVersion: 0.1.0\nProvides-Extra: torch\n",
        "gradwire-0.1.0.dist-info/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "gradwire-0.1.0.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(record, "".join(f"{path},,\n" for path in (*files, record)))


@pytest.mark.parametrize("command", commands_of_readme())
def test_the_commands_of_the_readme_install_a_new_build_of_the_same_version(command: str, tmp_path: Path) -> None:
    environment, dist = tmp_path / "environment", tmp_path / "dist"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    dist.mkdir()
    # As an active environment has it, but without a pip of its own, which takes seconds to come.
    tools = tmp_path / "tools"
    tools.mkdir()
    pip = tools / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip --python "{environment}/bin/python" "$@"\n')
    pip.chmod(0o755)
    offline = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PATH": f"{tools}:{os.environ['PATH']}"}
    for name in ("the first build", "the second build"):
        make_wheel(dist, name)
        subprocess.run(["sh", "-ec", command], cwd=tmp_path, env={**os.environ, **offline}, check=True)
        found = subprocess.run(
            [environment / "bin" / "python", "-I", "-c", PROGRAM],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == name


def test_the_readme_has_both_ways_to_install_a_wheel() -> None:
    assert len(commands_of_readme()) == 2


def test_the_command_and_the_records_name_the_build() -> None:
    shown = CliRunner().invoke(main, ["--version"]).output
    assert re.fullmatch(r"gradwire 0\.1\.0 \(build [0-9a-f]{8}\)\n", shown)
    assert shown == f"gradwire {_native.VERSION}\n"
    assert f"{gradwire.__version__} (build {_native.BUILD})" == _native.VERSION
    assert _board.VERSIONS["gradwire"] == _native.VERSION


def test_the_package_is_a_command_too() -> None:
    ran = subprocess.run([sys.executable, "-m", "gradwire", "--version"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"gradwire {_native.VERSION}\n", "")
    ran = subprocess.run([sys.executable, "-m", "gradwire", "--help"], capture_output=True, text=True, check=False)
    assert "Usage: python -m gradwire " in ran.stdout


def test_completion_finds_what_is_imported_when_it_is_asked_for() -> None:
    code = "import sys, gradwire; print(sorted(set(gradwire.__all__) - set(dir(gradwire))), 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[] False"
    assert dir(gradwire) == sorted(set(dir(gradwire)))


def test_a_demo_without_a_checkout_says_where_the_examples_are(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "out"), "--examples", str(tmp_path)])
    assert ran.exit_code == 2
    said = " ".join(ran.output.split())
    assert "an installed package has no examples, name their folder in the sources with --examples" in said
