"""One rank of the benchmark: makes process groups and times single collectives in them, as ordered.

Orders and their answers (see `gradwire.lab.crew`):

    {"do": "group", "name": g, "backend": b, "ranks": n, "timeout_s": t}  ->  {"made": g, "cipher": its name or null}
    {"do": "prepare", "group": g, "collective": c, "elems": n, "first": f, "calls": k}  ->  {"prepared": true}
    {"do": "sample", "variant": {..}, "at": t}  ->  {"sampled": true, "begun", "ended": [k times], "cpu_s"}
    {"do": "judge"}  ->  {"judged": true, "wrong", "unjudged", "lost", "filled", "resent": share or null, "warm_up": whether a call was}

Three orders for one sample: a rank that made or judged its tensors while others are in the call would take their cores.
A group holds the first `n` ranks; the others answer with `false`. `at` is a time of the machine's
monotonic clock, which all ranks share: they start together without a barrier on the network that is measured. `first` is the number
of the sample's first call, the same on all ranks: calls after each other have other data, so that what comes late shows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from gradwire.bench.collectives import Task
from gradwire.lab import crew

_MEETING_TIMEOUT = timedelta(seconds=120)  # until all ranks are there
_KEPT_BYTES = 1 << 28  # of patterns; a larger one is made again for each sample
_JUDGED = ("wrong", "unjudged", "lost", "filled")  # what is found in each call, and summed


@dataclass
class _Prepared:
    """A sample: the number of its first call, input and output of each, and their works when they were made."""

    task: Task
    group: Any
    first: int
    buffers: list[tuple[Any, Any]]
    works: list[Any] = field(default_factory=list)


class Worker:
    """Process groups and inputs of this rank."""

    def __init__(self, say: Any) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist, self._say = torch, dist, say
        dist.init_process_group("gloo", timeout=_MEETING_TIMEOUT)
        self._groups: dict[str, Any] = {}
        self._tasks: dict[tuple[str, int, int], Task] = {}
        self._prepared: _Prepared | None = None

    def obey(self, order: crew.Answer) -> None:
        """Carries one order out and answers it."""
        orders = {"group": self._group, "prepare": self._prepare, "sample": self._sample, "judge": self._judge}
        orders[order["do"]](order)

    def _group(self, order: crew.Answer) -> None:
        if order["backend"] == "gradwire":
            import gradwire.torch  # noqa: F401  registers the backend
        ranks = list(range(order["ranks"]))
        timeout = timedelta(seconds=order["timeout_s"])
        group = self._dist.new_group(ranks, backend=order["backend"], timeout=timeout)
        if self._dist.get_rank() in ranks:
            self._dist.all_reduce(self._torch.zeros(1), group=group)  # connections are made now, with today's settings
            self._groups[order["name"]] = group
        self._say({"made": order["name"], "cipher": self._cipher(order)})

    def _cipher(self, order: crew.Answer) -> str | None:
        """What seals a group's datagrams; None: nothing does, or this rank is not in it."""
        if order["backend"] != "gradwire" or order["name"] not in self._groups:
            return None
        import gradwire.torch

        cipher: str | None = gradwire.torch.stats(self._groups[order["name"]])["group"]["security"]["cipher"]
        return cipher

    def _prepare(self, order: crew.Answer) -> None:
        self._prepared = None
        group = self._groups.get(order["group"])
        if group is not None:
            task = self._task(order["collective"], order["elems"], self._dist.get_world_size(group))
            first = order["first"]
            buffers = [task.fresh(call) for call in range(first, first + order["calls"])]
            self._prepared = _Prepared(task, group, first, buffers)
        self._say({"prepared": group is not None})

    def _sample(self, order: crew.Answer) -> None:
        prepared, variant = self._prepared, order["variant"]
        if prepared is None:
            self._say({"sampled": False})
            return
        time.sleep(max(0.0, order["at"] - time.monotonic()))
        ended: list[float] = []
        used, begun = time.process_time(), time.monotonic()
        for each in prepared.buffers:
            prepared.works.append(self._call(prepared.task, each, variant, prepared.group))
            ended.append(time.monotonic())
        used = time.process_time() - used
        self._say({"sampled": True, "begun": begun, "ended": ended, "cpu_s": used})

    def _judge(self, _order: crew.Answer) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            self._say({"judged": False})
            return
        task, works = prepared.task, prepared.works
        calls = enumerate(zip(prepared.buffers, works, strict=True), prepared.first)
        found = [self._judged(task, call, each[1], work) for call, (each, work) in calls]
        total = {name: sum(each[name] for each in found) for name in _JUDGED}
        shares = {"lost": total["lost"] / len(works), "filled": total["filled"] / len(works)}
        counts = {"wrong": total["wrong"], "unjudged": total["unjudged"]}
        warm_up = any(work is not None and work.report().warm_up for work in works)
        self._say({"judged": True, **counts, **shares, "resent": _resent(works), "warm_up": warm_up})

    def _task(self, name: str, elems: int, ranks: int) -> Task:
        key = (name, elems, ranks)
        task = self._tasks.get(key)
        if task is None:
            if sum(size for _, size, _ in self._tasks) * 4 > _KEPT_BYTES:
                self._tasks.clear()
            task = self._tasks[key] = Task(name, elems, self._dist.get_rank(), ranks)
        return task

    def _call(self, task: Task, buffers: tuple[Any, Any], variant: dict[str, Any], group: Any) -> Any:
        """One call; returns the work of one that tolerates loss."""
        if variant["preset"] is None:
            task.call(buffers, group)
            return None
        import gradwire.torch

        rule = {"preset": variant["preset"], "divide_by": "contributions", "contributions": True, "group": group}
        if task.name == "reduce_scatter":
            return gradwire.torch.reduce_scatter(buffers[1], buffers[0], **rule)
        schedule = {"algorithm": variant["algorithm"], "hadamard": variant["hadamard"]}
        return gradwire.torch.all_reduce(buffers[1], gather_fill="zero", **schedule, **rule)

    def _judged(self, task: Task, call: int, output: Any, work: Any) -> dict[str, float]:
        """Of one call: wrong elements; whether it could not be judged; shares of the elements.

        The shares are of this rank's elements that did not count (`lost`), and of its result's that did not come and were filled in.
        """
        if work is None:
            return {**dict.fromkeys(_JUDGED, 0), "wrong": task.wrong_bits(output, call)}
        report = work.report()
        judged = not report.rotated_elems or self._is_whole(report, task.ranks)
        if not judged:
            wrong = 0
        elif report.rotated_elems:
            wrong = task.wrong_rotated(output, call)
        else:
            wrong = task.wrong_means(output, self._counts(task, len(output), report.contributions), call)
        return {
            "wrong": wrong,
            "unjudged": int(not judged),
            "lost": report.elems_uncounted / (report.rotated_elems or task.elems),
            "filled": sum(end - start for start, end in report.filled) / (report.rotated_elems or len(output)),
        }

    def _is_whole(self, report: Any, ranks: int) -> bool:
        """Whether nothing is missing on either way; else each rotated element has a little of every loss, and none can be judged."""
        if report.uncounted or report.filled:
            return False
        if report.contributions is None:
            return True
        counts = self._torch.frombuffer(bytearray(report.contributions.counts), dtype=self._torch.uint16)
        return bool(((counts == ranks) | (counts == 0)).all())

    def _counts(self, task: Task, elems: int, announced: Any) -> Any:
        """`[elems]`: how many ranks' values the report says are in each element. It counts nothing where all are: all ranks."""
        torch = self._torch
        if announced is None:
            return torch.full((elems,), task.ranks, dtype=torch.int16)
        blocks = torch.frombuffer(bytearray(announced.counts), dtype=torch.int16).view(announced.counts.shape)
        each = blocks.repeat_interleave(announced.block_elems, dim=1)[:, : announced.shard_elems]
        return each.reshape(-1)[:elems]

    def close(self) -> None:
        """Leaves the group."""
        import torch.distributed as dist

        dist.destroy_process_group()


def _resent(works: list[Any]) -> float | None:
    """Share of the bytes that were sent again; None of exact calls, which tell nobody."""
    if None in works:
        return None
    reports = [work.report() for work in works]
    return float(
        sum(report.bytes_retransmitted for report in reports) / max(1, sum(report.bytes_sent for report in reports))
    )


def main() -> None:
    """Serves until the input ends."""
    crew.serve(Worker)


if __name__ == "__main__":
    main()
