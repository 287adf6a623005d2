"""Whether all results of a step are finite: if not, whoever scales gradients throws the step away as a whole.

A `GradScaler` does so, and every loop that leaves a step out with a value that is not finite. The hook is not told. But it sees the
results, which are the same on all ranks unless results may be lost. One pass over each result, when it is there, where it is: on a GPU the
answer stays on the device, since to ask it would wait for all that it was given before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradwire.torch._streams import streams_of


class Verdict:
    """On one step.

    Attributes:
        known: all results were finite, or not; None: only a device knows, see `on`.
    """

    def __init__(self, flags: Sequence[torch.Tensor]) -> None:
        self._flags = flags
        self._on: dict[torch.device, torch.Tensor] = {}
        on_host = all(flag.device.type == "cpu" for flag in flags)
        self.known: bool | None = all(map(bool, flags)) if on_host else None

    def on(self, device: torch.device) -> torch.Tensor:
        """The same as a tensor of a bool there. Nobody waits for it."""
        if device not in self._on:
            self._on[device] = torch.stack([flag.to(device, non_blocking=True) for flag in self._flags]).all()
        return self._on[device]


class FiniteResults:
    """Collects the answers of a step's buckets, in whatever order they end. One that ended badly has no finite result."""

    def __init__(self) -> None:
        self._flags: list[torch.Tensor] = []

    def expect(self, result: torch.Tensor) -> Callable[[], None]:
        """Before a call that writes `result`.

        Returns:
            To be called when the result is there, on the stream on which it is, and before anybody else has changed it.
        """
        flag = torch.zeros((), dtype=torch.bool, device=result.device)
        self._flags.append(flag)

        def look() -> None:
            values = result._values() if result.is_sparse else result
            if not values.numel():
                flag.fill_(True)
                return
            least, most = torch.aminmax(values)
            torch.logical_and(least.isfinite(), most.isfinite(), out=flag)
            if (streams := streams_of(flag)) is not None:
                streams.hold(flag, streams.current(flag.device))

        return look

    def verdict(self) -> Verdict | None:
        """On the step that has ended, once; or broke off: what is in flight then has no finite result either. None: no answer is new."""
        flags, self._flags = self._flags, []
        return Verdict(flags) if flags else None
