"""A variable that is set when the engine runs already is named, since it has no effect."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os
import torch.distributed as dist
import gradwire.torch
from gradwire._runtime import configuration

def form():
    dist.init_process_group("gradwire", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()

form()
{changes}
for _ in range(2):
    form()
print(configuration().preset)
"""


def warnings_after(changes: str) -> list[str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GRADWIRE_")}
    environment |= {"GRADWIRE_PORT": "0", "GRADWIRE_SECRET": "of this test, long enough to be one"}
    command = [sys.executable, "-c", SCRIPT.format(changes=changes)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "auto"
    return [line for line in ended.stderr.splitlines() if "changed after the engine had started" in line]


def test_what_is_changed_behind_the_first_group_is_named_once() -> None:
    changes = 'os.environ.update(GRADWIRE_PRESET="mlt", GRADWIRE_PRESETT="x"); del os.environ["GRADWIRE_PORT"]'
    (warning,) = warnings_after(changes)
    assert warning.startswith("GRADWIRE_PORT, GRADWIRE_PRESET, GRADWIRE_PRESETT changed")


def test_what_is_not_for_the_engine_changes_in_silence() -> None:
    assert not warnings_after('os.environ["GRADWIRE_TEST_X"] = "1"; del os.environ["GRADWIRE_SECRET"]')


def test_another_secret_is_named_and_not_shown() -> None:
    (warning,) = warnings_after('os.environ["GRADWIRE_SECRET"] = "another one, that is also long"')
    assert warning.startswith("GRADWIRE_SECRET changed")
    assert "another one" not in warning
