"""What a signal handler or a finalizer does to its thread, at each place where Python may run one."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

LIMIT_S = 60.0


def at_each_step(
    run: Callable[[], object], interrupt: Callable[[], object], of: tuple[ModuleType, ...]
) -> Iterator[int]:
    """Runs something anew until it has been interrupted once at each of its steps in some modules; yields when each of the runs has ended.

    A run that never ends is one too many.
    """
    for at in itertools.count(1):
        steps = _Steps(at, interrupt, of)
        runner = threading.Thread(target=steps.run, args=(run,), daemon=True)
        runner.start()
        runner.join(LIMIT_S)
        assert not runner.is_alive(), f"interrupted at step {at}: {steps.where}"
        if steps.error is not None:
            raise steps.error
        if not steps.where:
            assert at > 1, "nothing was run there"
            return
        yield at


class _Steps:
    """Those of one run."""

    def __init__(self, at: int, interrupt: Callable[[], object], of: tuple[ModuleType, ...]) -> None:
        self.where = ""
        self.error: BaseException | None = None
        self._left = at
        self._interrupt = interrupt
        self._files = {module.__file__ for module in of}

    def run(self, call: Callable[[], object]) -> None:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one such frame
        sys.settrace(self._enter)
        try:
            call()
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace, frame.f_trace_lines = self._step, False  # first: Python 3.13 looks for it
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, _arg: Any) -> Any:
        self._left -= event == "opcode"
        if self._left == 0 and not self.where:
            self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
            self._interrupt()
        return self._step
