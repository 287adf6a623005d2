"""What a typed program sees of gradwire: the stub of the binding is the binding, and mistakes are found without running."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Types of arguments, which exist for checkers alone.
ONLY_IN_THE_STUB = r"""
gradwire\._native\.(Call|Memory|PolicyNumbers|__all__)
"""
PROGRAM = """
from datetime import timedelta
import numpy as np
from numpy.typing import NDArray
import gradwire
from typing_extensions import assert_type

def train(gradients: NDArray[np.float32]) -> float:
    with gradwire.Communicator("10.0.0.1:29400", rank=0, world_size=2, timeout=timedelta(seconds=9)) as whole:
        operation = whole.all_reduce(gradients, "mean", tolerate_loss=True, async_op=True)
        assert_type(operation, gradwire.Operation)
        assert_type(operation.is_completed(), bool)
        operation.wait(timedelta(seconds=1))
        rows = whole.reduce_scatter(gradients, "mean", tolerate_loss=True, loss_bound=0.1, residual=gradients.copy())
        assert_type(rows.report(), gradwire.DeliveryReport)
        part = whole.split(0 if whole.rank else None)
        if part is not None:
            assert_type(part, gradwire.Communicator)
            part.barrier()
        return operation.report().lost_share
"""
MISTAKES = {
    "a list is no array": ("whole.all_reduce([1.0])", "arg-type"),
    "a timeout is no number": ("whole.all_reduce(array).wait(3)", "arg-type"),
    "an unknown argument": ("whole.all_reduce(array, loss=0.1)", "call-arg"),
    "a deadline is no number": ("whole.reduce_scatter(array, tolerate_loss=True, deadline=3)", "arg-type"),
    "a part may be none": ("whole.split(0).barrier()", "union-attr"),
    "a configuration has no such field": ("gradwire.Config(presets='mlt')", "call-arg"),
}


def program_of_the_readme() -> str:
    blocks = [block.partition("```")[0] for block in (ROOT / "README.md").read_text().split("```python\n")[1:]]
    (program,) = [block for block in blocks if "gradwire.torch.tolerate_loss(model)" in block]
    return program


def mistakes() -> str:
    array = "np.ndarray[tuple[int], np.dtype[np.float32]]"
    head = f"import gradwire\nimport numpy as np\ndef run(whole: gradwire.Communicator, array: {array}) -> None:"
    return "\n".join([head, *(f"    {text}" for text, _ in MISTAKES.values())])


@pytest.fixture(scope="module")
def said_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each program, in one run: each reads all that gradwire imports."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("programs")
    programs = {"typed.py": PROGRAM, "readme.py": program_of_the_readme(), "mistakes.py": mistakes()}
    for name, text in programs.items():
        (folder / name).write_text(text)
    files = [str(folder / name) for name in programs]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", "--strict", *cache, *files]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr  # there are mistakes, and it went to its end
    lines = ran.stdout.splitlines()
    assert f"(checked {len(programs)} source files)" in lines[-1]
    assert all(any(f"{name}:" in line for name in programs) for line in lines[:-1]), ran.stdout
    return {name: [line for line in lines if f"{name}:" in line] for name in programs}


@pytest.mark.parametrize("program", ["typed.py", "readme.py"])
def test_a_typed_program_passes(said_of: dict[str, list[str]], program: str) -> None:
    assert said_of[program] == []


def test_mistakes_are_found(said_of: dict[str, list[str]]) -> None:
    said = said_of["mistakes.py"]
    for number, (name, (_, code)) in enumerate(MISTAKES.items(), start=4):
        assert any(f"mistakes.py:{number}:" in line and f"[{code}]" in line for line in said), f"{name}: {said}"


def test_the_stub_of_the_binding_is_the_binding(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    allowed = tmp_path / "allowed"
    allowed.write_text(ONLY_IN_THE_STUB)
    alone = tmp_path / "stubs"  # beside it the whole package would be read
    (alone / "gradwire").mkdir(parents=True)
    (alone / "gradwire" / "__init__.pyi").touch()
    shutil.copy(ROOT / "python" / "gradwire" / "_native.pyi", alone / "gradwire")
    command = [sys.executable, "-m", "mypy.stubtest", "gradwire._native", "--concise", "--allowlist", str(allowed)]
    found = {**os.environ, "MYPYPATH": str(alone)}
    ran = subprocess.run(command, cwd=ROOT, env=found, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
