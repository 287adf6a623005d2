"""gradwire in ns-3 and gradwire in its own fabric: the same burst takes the same time. Skipped where ns-3 is not installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# So many that the p99 of 36 hosts is one: of 486 transfers each.
SEEDS = 6
PROFILES = [ROOT / "target" / profile for profile in ("debug", "release")]


def test_a_program_that_fails_is_no_missed_target(tmp_path: Path) -> None:
    program = tmp_path / "fails"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    program.chmod(0o755)
    command = [
        sys.executable,
        str(ROOT / "bench/ns3/crosscheck.py"),
        "--quick",
        f"--ns3={program}",
        f"--fabric={program}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, done.stderr
    assert f"{program} ended with 3: broken" in done.stderr


def newest(*patterns: str) -> Path | None:
    """What the Rust build left, whichever of its profiles was built last; tests leave libraries under their full names."""
    there = [path for folder in PROFILES for pattern in patterns for path in folder.glob(pattern)]
    return max(there, key=lambda path: path.stat().st_mtime, default=None)


def test_both_simulators_agree_within_two_percent(tmp_path: Path) -> None:
    if not Path("/usr/include/ns3/core-module.h").exists() or shutil.which("cmake") is None:
        pytest.skip("ns-3 is not installed: apt install libns3-dev cmake")
    library, fabric = newest("libgradwire.a", "deps/libgradwire-*.a"), newest("gradwire-sim")
    if library is None or fabric is None:
        pytest.skip("not built: cargo build -p gradwire-capi -p gradwire-sim")
    build = tmp_path / "build"
    options = ["-S", str(ROOT / "bench/ns3"), "-B", str(build), f"-DGRADWIRE_LIBRARY={library}"]
    subprocess.run(["cmake", *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(build), "--target", "gradwire"], check=True, capture_output=True)
    command = [sys.executable, str(ROOT / "bench/ns3/crosscheck.py"), "--quick", f"--seeds={SEEDS}", "--json"]
    done = subprocess.run(
        [*command, f"--ns3={build / 'gradwire'}", f"--fabric={fabric}"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
    )
    results: list[dict[str, Any]] = json.loads(done.stdout)
    most = {str(one["scenario"]): max(one["differences"].values()) for one in results}
    assert done.returncode == 0, most
    assert all({"mean_us", "count"} <= one["differences"].keys() for one in results)
    golden = next(one for one in results if one["scenario"]["hosts"] == 36)
    assert {"mean_us", "p50_us", "p99_us", "dropped", "count"} <= golden["differences"].keys()
