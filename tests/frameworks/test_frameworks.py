"""The examples with Lightning, Accelerate and Ray Train, each run as its user would; skipped where the framework is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gradwire.lab import NamespacesUnavailable, sandbox

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
COMMANDS = {"lightning": (), "accelerate": TORCHRUN, "ray": ()}
LIMIT_S = 600  # Ray alone takes five minutes where other work has the cores


def run(framework: str, folder: Path, *options: str) -> dict[str, Any]:
    """What the example says at its end. It runs in a network of its own, where there is nothing but loopback."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: make test-frameworks")
    command = [sys.executable, *COMMANDS[framework], str(EXAMPLES / f"with_{framework}.py"), *options]
    said = folder / "said"

    def main() -> int:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        with said.open("w") as output, tempfile.TemporaryDirectory(prefix="ray") as short:  # names of sockets are short
            environment = {**os.environ, "RAY_TMPDIR": short, "HOME": short, **ENVIRONMENT}
            ran = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
            )
        return ran.returncode

    for _ in range(STARTS):
        try:
            status = sandbox.run(main)
        except NamespacesUnavailable as error:
            pytest.skip(str(error))
        text = said.read_text()
        if NOT_STARTED not in text:
            break
    found = re.search(r'\{"backend".*?\}', text)
    assert status == 0, text
    assert found, text
    return json.loads(found[0])


@pytest.mark.parametrize("framework", COMMANDS)
def test_the_example_trains_over_gradwire_as_over_gloo(framework: str, tmp_path: Path) -> None:
    """Two ranks add to the same bits in either order."""
    theirs, ours = run(framework, tmp_path, "--backend", "gloo"), run(framework, tmp_path, "--exact")
    assert (theirs["backend"], ours["backend"]) == ("gloo", "gradwire")
    assert ours["tolerant_steps"] == 0
    assert ours["parameters"] == theirs["parameters"]


@pytest.mark.parametrize("framework", COMMANDS)
def test_the_example_opts_in_to_loss(framework: str, tmp_path: Path) -> None:
    opted_in = run(framework, tmp_path)
    assert opted_in["backend"] == "gradwire"
    assert opted_in["tolerant_steps"] == STEPS


ENVIRONMENT = {
    "GRADWIRE_PORT": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip
# Ray gives its own processes half a minute to start, by a constant: too little where other work has the cores.
NOT_STARTED, STARTS = "The current node timed out during startup", 3
# Two epochs of 512 samples, in batches of 32 on each of two ranks.
STEPS = 2 * 512 // 32 // 2
