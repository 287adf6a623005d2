"""PyTorch's own tests of torch.distributed, for gloo and for gradwire, and every difference between the two.

    python tests/torch_suite/suite.py                          # both backends at world size 2 and 4
    python tests/torch_suite/suite.py --world 2 -k all_reduce  # some of it
    python tests/torch_suite/suite.py --gloo gloo.json         # gloo's part from the --json of an earlier run

A test that passes for gloo has to pass for gradwire. One that does not needs a reason in `differences.py`, which is printed;
a reason for a test that passes is as wrong as a missing one. Tests that fail for gloo too are listed and not judged.
Exit code 0: no other difference, 1: some, 2: could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import differences

HERE = Path(__file__).parent
BACKENDS = ("gloo", "gradwire")
SAME, DIFFERENT, NOT_RUN = 0, 1, 2


@dataclass(frozen=True)
class Entry:
    """How one test ended for one backend: `passed`, `failed` or `skipped`."""

    test: str
    backend: str
    world_size: int
    outcome: str
    seconds: float
    reason: str = ""
    output: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """What is the same for both backends."""
        return self.test, self.world_size


class Worker:
    """A process of `worker.py`.

    Raises:
        RuntimeError: it did not start; the message is what it printed.
    """

    def __init__(self, backend: str, world_size: int) -> None:
        self.backend, self.world_size = backend, world_size
        self._process = self._start()
        self.names: list[str] = self._answer()["names"]

    def run(self, test: str) -> Entry:
        """Runs one test. A worker that dies of it is started again."""
        try:
            self._input().write(test + "\n")
            self._input().flush()
            answer = self._answer()
        except (RuntimeError, BrokenPipeError) as error:
            self._process = self._start()
            self._answer()
            answer = {"test": test, "outcome": "failed", "seconds": 0.0, "reason": f"the worker died: {error}"}
        return Entry(backend=self.backend, world_size=self.world_size, **answer)

    def stop(self) -> None:
        """Ends the process."""
        self._input().close()
        self._process.wait()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "worker.py"), self.backend, str(self.world_size)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=HERE
        )

    def _input(self) -> Any:
        assert self._process.stdin is not None
        return self._process.stdin

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker of {self.backend} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run(
    backends: Sequence[str], world_sizes: Sequence[int], names: Iterable[str] | None, word: str, jobs: int
) -> list[Entry]:
    """Runs tests, `jobs` at a time.

    Args:
        backends, world_sizes: each test runs for every pair.
        names: of tests; None means all.
        word: only tests with it in their name.
        jobs: tests at the same time, each of `world_size` processes.
    """
    wanted = None if names is None else set(names)
    entries: list[Entry] = []
    for world_size in world_sizes:
        for backend in backends:
            entries += _run_one(backend, world_size, wanted, word, jobs)
    return entries


def _run_one(backend: str, world_size: int, wanted: set[str] | None, word: str, jobs: int) -> list[Entry]:
    workers = [Worker(backend, world_size) for _ in range(jobs)]
    left = [n for n in workers[0].names if word in n and (wanted is None or n in wanted)]
    entries: list[Entry] = []
    total, started = len(left), time.monotonic()

    def work(worker: Worker) -> None:
        while left:
            try:
                name = left.pop(0)
            except IndexError:
                break
            entry = worker.run(name)
            entries.append(entry)
            if entry.outcome == "failed":
                print(f"  {backend} {world_size}: {name} failed", file=sys.stderr, flush=True)
        worker.stop()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{backend} {world_size}: {total} tests in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return sorted(entries, key=lambda entry: entry.test)


@dataclass(frozen=True)
class Difference:
    """A test that ended otherwise for gradwire than for gloo."""

    test: str
    world_size: int
    gloo: str
    gradwire: str
    reason: str | None


def compare(entries: Iterable[Entry]) -> list[Difference]:
    """Tests that pass for gloo and not for gradwire, and reasons that have become wrong."""
    by_key: dict[tuple[str, int], dict[str, Entry]] = {}
    for entry in entries:
        by_key.setdefault(entry.key, {})[entry.backend] = entry
    found = []
    for (test, world_size), pair in sorted(by_key.items()):
        if set(pair) != set(BACKENDS):
            continue
        gloo, ours = pair["gloo"].outcome, pair["gradwire"].outcome
        reason = differences.REASONS.get(test)
        if gloo == "passed" and ours != "passed":
            found.append(Difference(test, world_size, gloo, ours, reason))
        elif reason is not None and gloo == ours == "passed" and test not in differences.SOMETIMES:
            found.append(Difference(test, world_size, gloo, ours, None))
    return found


def report(entries: Sequence[Entry], found: Sequence[Difference]) -> str:
    """The counts of each backend and world size, and the differences."""
    counts = Counter((entry.backend, entry.world_size, entry.outcome) for entry in entries)
    lines = ["backend   world size  passed  failed  skipped"]
    for backend, world_size in sorted({(e.backend, e.world_size) for e in entries}, key=lambda p: (p[1], p[0])):
        numbers = [counts[backend, world_size, outcome] for outcome in ("passed", "failed", "skipped")]
        lines.append(f"{backend:<9} {world_size:>10}  {numbers[0]:>6}  {numbers[1]:>6}  {numbers[2]:>7}")
    both = {e.key for e in entries if e.backend == "gloo" and e.outcome == "failed"}
    for test, world_size in sorted(both):
        lines.append(f"not judged: {test} at world size {world_size} fails for gloo too")
    for item in found:
        reason = item.reason or (
            "NO REASON: see the output" if item.gradwire != "passed" else "it passes: strike its reason"
        )
        lines.append(f"difference: {item.test} at world size {item.world_size}: {item.gradwire}. {reason}")
    if not found:
        lines.append("no difference")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="world sizes")
    parser.add_argument("--backend", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("-k", dest="word", default="", help="only tests with this in their name")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="tests at the same time")
    parser.add_argument("--gloo", type=Path, help="the --json of an earlier run, for gloo's part")
    parser.add_argument("--json", type=Path, help="write every outcome, and the differences, there")
    return parser.parse_args()


def main() -> int:
    """Command line."""
    options = _options()
    earlier: list[Entry] = []
    if options.gloo:
        options.backend = ["gradwire"]
        kept = json.loads(options.gloo.read_text())["tests"]
        earlier = [Entry(**e) for e in kept if e["backend"] == "gloo" and e["world_size"] in options.world]
    try:
        entries = [*earlier, *run(options.backend, options.world, None, options.word, options.jobs)]
    except RuntimeError as error:
        print(f"could not run: {error}", file=sys.stderr)
        return NOT_RUN
    found = compare(entries)
    print(report(entries, found))
    if options.json:
        document = {"tests": [asdict(e) for e in entries], "differences": [asdict(d) for d in found]}
        options.json.write_text(json.dumps(document, indent=1))
    for item in found:
        for entry in entries:
            if entry.key == (item.test, item.world_size) and entry.backend == "gradwire" and item.reason is None:
                print(f"\n--- {item.test} at world size {item.world_size}\n{entry.reason}\n{entry.output}")
    return DIFFERENT if any(item.reason is None for item in found) else SAME


if __name__ == "__main__":
    sys.exit(main())
