"""What the lab's switches are compiled with, where it fails: a word and no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.lab import LabError
from gradwire.lab.soft_switch import SoftSwitch
from gradwire.lab.uml_switch import _build_fpu_shim

# As gcc says it where the C library's headers are not installed.
NO_HEADER = """soft_switch.c:9:10: fatal error: errno.h: No such file or directory
    9 | #include <errno.h>
      |          ^~~~~~~~~
compilation terminated.
"""
FAILURES = {
    f"cat >&2 <<'END'\n{NO_HEADER}END\nexit 1": "soft_switch.c:9:10: fatal error: errno.h: No such file or directory",
    "echo one >&2; echo 'out of space' >&2; exit 1": "out of space",
    "exit 7": "it ended with 7",
}


@pytest.fixture(params=FAILURES)
def expected(request, tmp_path, monkeypatch):
    """Puts a compiler on the path that fails; gives what is told of it."""
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{request.param}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return FAILURES[request.param]


def test_a_switch_that_cannot_be_compiled_is_one_line_with_the_compilers_reason(expected, tmp_path):
    for start, source in ((lambda: SoftSwitch([]), "soft_switch.c"), (lambda: _build_fpu_shim(tmp_path), "uml_fpu.c")):
        with pytest.raises(LabError, match=f"^{tmp_path}/cc does not build {source}: {expected}$"):
            start()


@pytest.mark.usefixtures("namespaces")
def test_a_benchmark_without_a_switch_could_not_run(expected, tmp_path):
    pytest.importorskip("torch")
    program = "from gradwire.cli import main; main()"
    options = ["bench", "--quick", "--network", "soft", "--tcp", "none", "--out", str(tmp_path / "out")]
    ran = subprocess.run(
        [sys.executable, "-c", program, *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 2, ran.stderr
    assert f"error: {Path(tmp_path, 'cc')} does not build soft_switch.c: {expected}" in ran.stdout + ran.stderr
