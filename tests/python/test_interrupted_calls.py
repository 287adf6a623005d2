"""A signal handler or a finalizer makes calls of a device's tensors and waits for them, wherever it interrupts one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_who_interrupts_a_call_of_a_devices_tensor_at_any_step_may_make_one_and_have_its_future() -> None:
    program = Path(__file__).with_name("interrupted_calls.py")
    environment = {**os.environ, "GRADWIRE_PORT": "0"}
    done = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, text=True, env=environment, check=True)
    assert int(done.stdout) > 100, "steps at which it was interrupted"
