"""The C compiler that builds the small programs of the lab's switches when they are started."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from gradwire.lab.errors import LabError, ToolMissing


def build(source: Path, output: Path, *options: str) -> None:
    """Compiles one file.

    Args:
        source: in C.
        output: the program or library.
        options: of the compiler.

    Raises:
        ToolMissing: there is no compiler.
        LabError: there is one, and it fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ToolMissing("no C compiler found: install one (apt install gcc)")
    command: list[str | Path] = [compiler, "-O2", *options, "-o", output, source]
    ran = subprocess.run(command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", check=False)
    if ran.returncode != 0:
        raise LabError(
            f"{compiler} does not build {source.name}: {_reason(ran.stderr) or f'it ended with {ran.returncode}'}"
        )


def _reason(text: str) -> str:
    """The first error that a compiler tells: what follows explains it, or says that it gives up."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return (errors or lines[-1:] or [""])[0]
