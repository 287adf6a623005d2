"""`gradwire.torch` needs NumPy, torch does not: where it is missing the error says what to install."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            raise ModuleNotFoundError("No module named 'numpy'", name=name)

sys.meta_path.insert(0, Missing())
import gradwire
try:
    import gradwire.torch
except gradwire.errors.MissingExtraError as error:
    print(error.extra, error.package, error)
"""


def test_without_numpy_the_error_names_the_extra() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("torch numpy ")
    assert "pip install 'gradwire[torch]'" in ended.stdout
