"""What each training step delivered, as scalars for TensorBoard."""

from __future__ import annotations

import logging
from typing import Protocol

from gradwire.torch._steps import StepMeter, StepRecord

logger = logging.getLogger("gradwire")


class ScalarWriter(Protocol):
    """What is needed of `torch.utils.tensorboard.SummaryWriter`; writers of other tools have it too."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Takes one value of one step."""


class StepScalars:
    """Writes each step's record when the next step begins: then all its buckets have ended.

    Args:
        writer: gets the scalars; of a writer that is None nothing is done.

    Attributes:
        step: number under which the next step is written, from 0. A job that goes on from a checkpoint sets it before its first backward
            to the steps that it has made, else the curves of its log begin anew. It is in no `state_dict`: what
            `torch.distributed.checkpoint` loads in place has to hold every key that is asked for, and earlier versions saved none for it.
    """

    def __init__(self, writer: ScalarWriter | None) -> None:
        self._writer = writer
        self.step = 0
        self._has_warned = False

    def before_step(self, meter: StepMeter) -> None:
        """Writes the step that is over. What the writer raises becomes one warning: a full disk does not end training."""
        if self._writer is None or not meter.steps:
            return
        try:
            self._write(self._writer, meter.steps[-1])
        except Exception as error:  # noqa: BLE001  whatever a writer of the user's raises
            self._warn(error)
        self.step += 1

    def _write(self, writer: ScalarWriter, record: StepRecord) -> None:
        values = {
            "lost_share": record.lost_share,
            "filled_share": record.filled_share,
            "repaired_share": record.bytes_retransmitted / record.bytes_sent if record.bytes_sent else 0.0,
            "uncounted_elements": float(record.elems_uncounted),
            "transfers_ended_by_time": float(record.ended_by_time),
            "sent_bytes": float(record.bytes_sent),
            "communication_seconds": record.comm_s,
        }
        for name, value in values.items():
            writer.add_scalar(f"gradwire/{name}", value, self.step)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("scalars of step %d and maybe of later ones are not written: %r", self.step, error)
