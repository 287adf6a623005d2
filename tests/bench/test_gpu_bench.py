"""What the benchmark of GPU tensors concludes from times and ranges; that it says so where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "torch"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu

    return gpu


def test_copies_are_hidden_where_a_call_is_in_flight(gpu: Any) -> None:
    copies = [(0.0, 2.0), (1.0, 3.0), (10.0, 11.0)]
    assert gpu.hidden_share(copies, [(2.0, 5.0), (2.5, 4.0)]) == pytest.approx(1 / 4)
    assert gpu.hidden_share(copies, [(3.0, 10.0)]) == 0.0
    assert gpu.hidden_share(copies, [(0.0, 20.0)]) == 1.0


def found(gpu: Any, *, step_ms: float = 9.0, calls: tuple[float, float] = (0.5, 3.0), **wrong: Any) -> dict[str, Any]:
    times = dict.fromkeys(gpu.VARIANTS, 30.0) | {gpu.VARIANTS[0]: 10.0, gpu.VARIANTS[1]: step_ms}
    measured = [
        {"turn": turn, "variant": variant, "what": what, "ms": ms + 3 * turn}
        for turn in range(3)
        for variant, ms in times.items()
        for what in ("step", "all_reduce")
    ]
    ranges = {"out": [(0.0, 1.0)], "back": [(2.0, 3.0)], "out_bytes": 4, "back_bytes": 4, "calls": [calls]}
    watched = [{"variant": v, "what": w, **ranges} for v in gpu.VARIANTS[1:] for w in ("step", "all_reduce")]
    parameters = {variant: {"equal": True, "from_gloo": 0.0, **wrong} for variant in gpu.VARIANTS}
    return {"measured": measured, "watched": watched, "parameters": parameters}


def test_targets_are_judged(gpu: Any) -> None:
    def met(**options: Any) -> list[bool]:
        return [row["met"] for row in gpu.rows_of(found(gpu, **options))]

    assert met() == [True] * 4
    assert met(step_ms=10.1) == [True, False, True, True]
    assert met(calls=(0.9, 2.1)) == [True, False, True, True]
    assert met(equal=False) == [False] * 4
    assert met(from_gloo=1e-2) == [False] * 4


def test_without_a_gpu_it_could_not_run() -> None:
    command = [sys.executable, str(FOLDER / "gpu.py"), "--quick"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=hidden)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "no GPU" in ran.stdout
