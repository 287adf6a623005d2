"""Memory of an all-reduce above the tensors themselves: peak resident bytes of each rank, real processes over loopback.

    python bench/collective/memory.py                     # 256 MB of float32 among 4 ranks: at most 64 MB above
    python bench/collective/memory.py --quick             # two ranks, 2 MB: shows that it runs
    python bench/collective/memory.py --dtype bfloat16    # halves are summed in float32, within the same limit

Each schedule has processes of its own, so that none finds what another has left. Each rank touches its tensor, reduces a small
one to get its engine going, notes what is resident, resets the peak
(`/proc/self/clear_refs`) and reduces. What counts is the peak less what was resident before. `tolerant` and `rotated` may
lose gradients (preset `auto`). MB are of 1024 * 1024 bytes.

The mean is `e % 31 + 1` at place e, which every dtype holds, so that a value at a wrong place shows. Where nothing may be lost only
rank `e % ranks` holds something there, as many times that as there are ranks: a rank that is not in the sum, or in it twice, is off at
its own places, whatever the others are. Where something may be lost all ranks have the same values, so their mean is these, whatever was
lost: who is in it is not told. A rotated mean has been rounded to the dtype three times: when it was sent, when it was divided, when it
was turned back. Each time by at most a unit of each value; a rotation keeps the norm and spreads what is off evenly. So of each run of a
packet's elements the root mean square may be off by three units of that of the values.
Exit code 0: target reached, 1: missed, 2: could not run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from gradwire.bench.display import as_written

MB = 1 << 20
LIMIT_MB = 64
REACHED, MISSED, NOT_RUN = 0, 1, 2
PACKET_ELEMS = 352
ROUNDINGS = 3
PERIOD = 31  # of the values: a prime, so no power of two apart are two alike; up to 8 times 31 is exact in bfloat16
VALUES_RMS = ((PERIOD + 1) * (2 * PERIOD + 1) / 6) ** 0.5
# Largest relative error of a rounding. A transform in float32 rounds once in each of 12 butterflies and 6 steps that mix a rest in: so do
# two of them, and the sum of the ranks, instead of the three.
UNITS = {"float32": (2 * 18 + 8) / ROUNDINGS * 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ODD_ELEMS = 12_345  # no schedule and no rotation divides the tensor without a rest
# Arguments of the reduction.
CASES: dict[str, dict[str, str]] = {
    "transpose": {"preset": "reliable", "algorithm": "transpose"},
    "parameter_server": {"preset": "reliable", "algorithm": "parameter_server"},
    "ring": {"preset": "reliable", "algorithm": "ring"},
    "auto": {"preset": "reliable", "algorithm": "auto"},
    "tolerant": {"preset": "auto", "algorithm": "transpose", "hadamard": "off"},
    "rotated": {"preset": "auto", "algorithm": "transpose", "hadamard": "on"},
    "rotated_servers": {"preset": "auto", "algorithm": "parameter_server", "hadamard": "on"},
}


def resident_kb(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")


def fill(tensor: Any, rank: int, ranks: int, *, is_exact: bool) -> None:
    """What a rank holds, at the beginning of this file; piece by piece, as there is no second tensor in memory."""
    import torch

    places = torch.arange(PERIOD * ranks * 128)
    held = places % PERIOD + 1
    if is_exact:
        held = torch.where(places % ranks == rank, held * ranks, 0)
    held = held.to(tensor.dtype)
    for piece in tensor.split(len(held)):
        piece.copy_(held[: len(piece)])


def errors(tensor: Any) -> dict[str, float]:
    """How far elements are from the mean: the largest root mean square of a packet's elements, and the largest of all.

    Both as shares of the root mean square of the values.
    """
    import torch

    rms, largest = 0.0, 0.0
    means = (torch.arange(PACKET_ELEMS * PERIOD * 32) % PERIOD + 1).float()
    for piece in tensor.split(len(means)):  # no second tensor in memory
        off = (piece.float() - means[: len(piece)]).abs().nan_to_num(nan=float("inf")) / VALUES_RMS
        largest = max(largest, float(off.max()))
        off = torch.nn.functional.pad(off, (0, -off.numel() % PACKET_ELEMS)).view(-1, PACKET_ELEMS)
        rms = max(rms, float(off.square().mean(1).max().sqrt()))
    return {"rms": rms, "largest": largest}


def rank_main(megabytes: int, dtype: str, case: str) -> None:
    """One rank: prints a line of JSON."""
    import gradwire.torch
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gradwire")
    kind = getattr(torch, dtype)
    rank, ranks, is_exact = dist.get_rank(), dist.get_world_size(), CASES[case]["preset"] == "reliable"
    tensor = torch.empty(megabytes * MB // kind.itemsize + ODD_ELEMS, dtype=kind)
    gradwire.torch.all_reduce(torch.ones(1000, dtype=kind), **CASES[case])
    fill(tensor, rank, ranks, is_exact=is_exact)
    before = resident_kb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begun = time.monotonic()
    work = gradwire.torch.all_reduce(tensor, **CASES[case])
    took = time.monotonic() - begun
    peak = resident_kb("VmHWM")
    off = errors(tensor)
    line = {
        "rank": rank,
        "algorithm": case,
        "schedule": work.report().collective,
        "above_mb": (peak - before) / 1024,
        "seconds": took,
        "rms_off_most": off["rms"],
        "off_most": off["largest"],
        "wrong": int(not off["rms"] <= (ROUNDINGS * UNITS[dtype] if case.startswith("rotated") else 0.0)),
    }
    print("ROW " + json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(ranks: int, megabytes: int, dtype: str, case: str, timeout_s: float) -> list[dict[str, Any]]:
    """Runs the ranks once and collects their lines.

    Raises:
        RuntimeError: a rank failed or took too long.
    """
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "GRADWIRE_PORT": "0",
    }
    command = [sys.executable, __file__, "--size", str(megabytes), "--dtype", dtype, "--as-rank", case]
    children = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        texts = [child.communicate(timeout=timeout_s)[0] for child in children]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"a rank has not ended after {timeout_s:g} s") from error
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise RuntimeError(f"ranks ended with {[child.returncode for child in children]}")
    lines = [line for text in texts for line in text.splitlines() if line.startswith("ROW ")]
    return [json.loads(line.removeprefix("ROW ")) for line in lines]


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst rank of each case."""
    found = []
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        of_it = [row for row in rows if row["algorithm"] == algorithm]
        worst = max(of_it, key=lambda row: row["above_mb"])
        wrong = sum(row["wrong"] for row in of_it)
        most = {name: max(row[name] for row in of_it) for name in ("seconds", "rms_off_most", "off_most")}
        found.append({**worst, **most, "wrong": wrong})
    return found


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--ranks", default=4, type=click.IntRange(2, 8))
@click.option("--size", "megabytes", default=256, type=click.IntRange(1), help="MB of the tensor.")
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--timeout", default=300.0, help="Seconds for each schedule.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--quick", is_flag=True, help="Two ranks, 2 MB, one schedule: only to see that it works. No verdict.")
@click.option("--as-rank", "case", hidden=True)
def main(
    *,
    ranks: int,
    megabytes: int,
    dtype: str,
    timeout: float,
    json_file: Path | None,
    quick: bool,
    case: str | None,
) -> None:
    """Reads the options and measures."""
    if case is not None:
        return rank_main(megabytes, dtype, case)
    if quick:
        ranks, megabytes = 2, 2
    names = list(CASES)[:1] if quick else list(CASES)
    print(f"{ranks} ranks, {megabytes} MB of {dtype}, loopback; limit {LIMIT_MB} MB above the tensor", flush=True)
    try:
        found = [measure(ranks, megabytes, dtype, name, timeout) for name in names]
        rows = summarise([row for rows in found for row in rows])
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(NOT_RUN)
    for row in rows:
        told = f"{row['above_mb']:.1f} MB on the worst rank, {row['seconds']:.2f} s, {row['wrong']} wrong"
        told += f", off by {row['rms_off_most']:.2g}, one by {row['off_most']:.2g}" if row["off_most"] else ""
        print(f"{row['algorithm']:<16} {row['schedule']:<27} {told}")
    missed = any(row["wrong"] or row["above_mb"] > LIMIT_MB for row in rows)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(
            json.dumps({"ranks": ranks, "mb": megabytes, "dtype": dtype, "rows": rows}, indent=1) + "\n"
        )
    print("quick run: no verdict" if quick else "MISSED" if missed else "reached")
    wrong = any(row["wrong"] for row in rows)
    sys.exit(MISSED if wrong or (missed and not quick) else REACHED)


if __name__ == "__main__":
    main()
