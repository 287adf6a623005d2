"""Documents that repeat what the code says are fresh."""

import inspect
import subprocess
import sys
from pathlib import Path

from gradwire import errors

ROOT = Path(__file__).parent.parent.parent


def test_the_configuration_document_is_what_the_fields_say():
    script = ROOT / "scripts" / "config_docs.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_licences_that_go_along_with_a_wheel_are_those_of_the_crates_in_it():
    script = ROOT / "scripts" / "third_party_licenses.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_error_document_has_every_class_and_no_other():
    classes = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.GradwireError) and kind is not errors.GradwireError
    }
    rows = [
        line.split("`")[1] for line in (ROOT / "docs" / "errors.md").read_text().splitlines() if line.startswith("| `")
    ]
    assert sorted(rows) == sorted(classes)
