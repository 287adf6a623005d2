"""The Slurm script of docs/clusters.md, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.lab import NamespacesUnavailable, sandbox
from launch import HERE

CLUSTER = HERE.parents[1] / "examples" / "cluster"
NODES = 2
# Since Slurm 22.05 it gives a task one processor unless it is told itself.
# Starts the command once for each node, in the background, and ends as the worst of them does.
SRUN = """#!/bin/bash
[ "$1 $2" = "--cpus-per-task $SLURM_CPUS_PER_TASK" ] || { echo "srun: one processor for each task"; exit 1; }
shift 2
for node in $(seq "$SLURM_NNODES"); do "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
SCONTROL = "#!/bin/bash\n[ \"$*\" = 'show hostnames here' ] && echo localhost && echo localhost\n"
TORCHRUN = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_the_slurm_script_starts_a_rank_on_each_node(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", TORCHRUN)):
        executable(tmp_path / name, text)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    slurm = {"SLURM_NNODES": str(NODES), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
    slurm["SLURM_CPUS_PER_TASK"] = "6"
    # Both "nodes" are this machine, so that ports are the kernel's choice.
    ours = {
        "SECRET_FILE": str(secret),
        "RANKS_PER_NODE": "1",
        "GRADWIRE_PORT": "0",
        "PREFLIGHT": "no",
        "OMP_NUM_THREADS": "1",
    }
    environment = {**os.environ, **slurm, **ours, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = [str(HERE / "bodies" / "torchrun_script.py"), str(tmp_path / "result")]

    def main() -> int:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        command = ["bash", str(CLUSTER / "slurm.sbatch"), *script]
        with (tmp_path / "output").open("w") as output:
            return subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=180, check=False
            ).returncode

    try:
        status = sandbox.run(main)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    assert status == 0, (tmp_path / "output").read_text()
    assert "#SBATCH --cpus-per-task=" in (CLUSTER / "slurm.sbatch").read_text(), "Slurm sets the variable for this only"
    assert (tmp_path / "result").read_text() == f"gradwire {NODES}"
