"""The Slurm script and the `srun` line of docs/clusters.md, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.lab import NamespacesUnavailable, sandbox
from launch import HERE

ROOT = HERE.parents[1]
CLUSTER = ROOT / "examples" / "cluster"
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
# Starts nothing and says what its task would have.
SRUN_SAYS = """#!/bin/bash
echo "${GRADWIRE_SECRET-} ${GRADWIRE_SECRET_FILE-}"
"""
# As the real one where several nodes are allocated: as many tasks as --ntasks says, or else as the job's SLURM_NTASKS, which goes before
# --ntasks-per-node.
SRUN_OF_TASKS = """#!/bin/bash
while [[ "$1" == --* ]]; do
    case "$1" in --nodes) SLURM_NNODES=$2 ;; --ntasks) SLURM_NTASKS=$2 ;; esac
    shift 2
done
export SLURM_NTASKS
for ((SLURM_PROCID = 0; SLURM_PROCID < SLURM_NTASKS; SLURM_PROCID++)); do
    SLURM_PROCID=$SLURM_PROCID SLURM_LOCALID=$((SLURM_PROCID % (SLURM_NTASKS / SLURM_NNODES))) "$@" || exit 1
done
"""
SAYS_ITS_RANK = '#!/bin/bash\necho "$RANK of $WORLD_SIZE, $LOCAL_RANK here, by $MASTER_ADDR:$MASTER_PORT: $*"\n'
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


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, " HOME/.gradwire-secret"),
        ({"SECRET_FILE": "/shared/secret"}, " /shared/secret"),
        ({"GRADWIRE_SECRET_FILE": "/shared/theirs"}, " /shared/theirs"),
        ({"GRADWIRE_SECRET": "a secret of this job"}, "a secret of this job "),
    ],
    ids=["default", "of-the-script", "file", "value"],
)
def test_the_slurm_script_leaves_a_secret_that_is_set_alone(tmp_path: Path, given: dict[str, str], taken: str) -> None:
    for name, text in (("srun", SRUN_SAYS), ("scontrol", SCONTROL)):
        executable(tmp_path / name, text)
    slurm = {"SLURM_NNODES": str(NODES), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "PREFLIGHT": "no"}
    environment = {"HOME": "HOME", "PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm, **given}
    command = ["bash", str(CLUSTER / "slurm.sbatch"), "train.py"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == f"{taken}\n"


def test_the_srun_line_starts_every_rank_within_the_job_of_the_script(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN_OF_TASKS), ("scontrol", SCONTROL), ("python", SAYS_ITS_RANK)):
        executable(tmp_path / name, text)
    page = (ROOT / "docs" / "clusters.md").read_text()
    (block,) = re.findall(r"^    export MASTER_ADDR=.*\n(?:    .*\n)+", page, re.MULTILINE)
    of_job = {"SLURM_NNODES": str(NODES), "SLURM_NTASKS": str(NODES), "SLURM_JOB_NODELIST": "here"}
    environment = {**of_job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(
        ["bash", "-c", block], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    world_size = 8 * NODES
    expected = [f"{rank} of {world_size}, {rank % 8} here, by localhost:29500: train.py" for rank in range(world_size)]
    assert said.stdout.splitlines() == expected
