"""What the launcher says of this process."""

import os

# torchrun's; Slurm's; Open MPI's; MPICH's.
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def local_rank() -> int | None:
    """Number of this process on its host; `None` where no launcher says so."""
    for name in LOCAL_RANK_VARIABLES:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return None
