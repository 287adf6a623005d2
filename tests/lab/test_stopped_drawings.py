"""Ctrl-Z of a command that draws within a sandbox: the shell gets its terminal back as it was, and `fg` draws again."""

import os
import sys
from pathlib import Path

import pytest
from lab_command import CTRL_Z, Shell

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DRAWS = """
import sys
from gradwire.lab import sandbox
from {0} import {1}
def main():
    with {2}:
        print("begun")
        sys.stdin.readline()
    return 7
sys.exit(sandbox.run(main))
"""
SHOWS_CURSOR, HIDES_CURSOR, UP = "\x1b[?25h", "\x1b[?25l", "\x1b[1A"


pytestmark = pytest.mark.usefixtures("namespaces")


@pytest.mark.parametrize(
    ("module", "name", "display"),
    [
        ("gradwire.bench", "display", "display.Display(display.make_console(), 1.0)"),
        (
            "gradwire.cli",
            "demo",
            f"demo._Display(demo.make_console(), demo.Plan(demo.Path('{EXAMPLES}'), ('gloo',), (0.0,)))",
        ),
    ],
    ids=["bench", "demo"],
)
def test_what_is_drawn_in_a_sandbox_is_taken_away_before_the_shell_has_the_terminal(tmp_path, module, name, display):
    script = tmp_path / "draws.py"
    script.write_text(DRAWS.format(module, name, display))
    with Shell(os.environ) as shell:
        shell.type(f"{sys.executable} {script}\n")
        shell.until("begun")
        for _ in range(2):
            shell.type(CTRL_Z)
            assert SHOWS_CURSOR in shell.until("Stopped")
            shell.type("echo qui''et; fg\n")
            assert "\x1b" not in shell.until("quiet")
            shell.until("draws.py\r\n")  # what goes on, as `fg` says
            said = shell.until("0/")
            assert HIDES_CURSOR in said
            assert said.count(UP) <= said.count("\n"), "it erases what the shell has written"
        shell.type("\n")
        shell.until(SHOWS_CURSOR)
        shell.type("echo sta''tus $?\n")
        shell.until("status 7")
