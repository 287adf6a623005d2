"""What the numbers of a benchmark belong to, and everything that repeating it needs."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import gradwire
from gradwire._urls import without_user
from gradwire.config import ENV_PREFIX, settings
from gradwire.doctor import processor

_HERE = Path(__file__).resolve().parent
_URLS = {ENV_PREFIX + field.name.upper() for field in settings() if "url" in field.metadata}
_SBIN = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
)  # where `ip` is, which users' paths often lack
_BUFFERS = ("core/rmem_max", "core/wmem_max", "ipv4/tcp_rmem", "ipv4/tcp_wmem")


def machine() -> dict[str, Any]:
    """Commit, versions, kernel, processor, memory, load, and what this process may; to be asked outside a sandbox of the lab.

    `commit` is that of the Python sources; what the built extension is made of it does not say itself, so that is told by its hash.
    """
    limit = processor.examine().limit
    return {
        "commit": _commit(),
        "gradwire": gradwire.__version__,
        "extension_sha256": _extension_hash(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "numpy", "matplotlib")},
        "kernel": platform.release(),
        "iproute2": _iproute2(),
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "cpu_limit_cores": None if limit is None else limit.cores,
        "memory": _field("/proc/meminfo", "MemTotal"),
        "root": os.geteuid() == 0,
        "buffers": buffers(),
        "load": round(os.getloadavg()[0], 2),
        "at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def buffers() -> dict[str, str]:
    """Bytes that sockets may hold, as far as this network namespace says it: most name the maxima of `core` in the first one only."""
    found = {}
    for name in _BUFFERS:
        with suppress(OSError):
            found[name] = " ".join(Path("/proc/sys/net", name).read_text().split())
    return found


def command() -> dict[str, Any]:
    """How this was started: the command line, and the variables that change what gradwire, gloo or torch do."""
    own = "gradwire" in Path(sys.argv[0]).name
    line = shlex.join(["gradwire", *sys.argv[1:]] if own else sys.orig_argv)
    chosen = ("GRADWIRE_", "GLOO_", "TORCH_", "OMP_")
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(chosen)}
    return {
        "command": line,
        "environment": {name: _shown(name, value) for name, value in variables.items()},
    }


def file_hash(file: Path) -> str:
    """SHA-256 in hexadecimal; raises OSError."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _shown(name: str, value: str) -> str:
    """Of a variable: results are published, and neither secrets nor what stands before the host of a URL is."""
    if "SECRET" in name:
        return "..."
    return without_user(value) if name in _URLS or "://" in value else value


def _commit() -> str:
    """Of the source tree, with `+` if it has changes; empty where it is none, as in an environment within somebody else's."""
    git = ["git", "-C", str(_HERE)]
    try:
        if subprocess.run(
            [*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=False
        ).returncode:
            return ""
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _extension_hash() -> str:
    """Of the compiled module's file, which is not loaded for it; empty where there is none."""
    found = importlib.util.find_spec("gradwire._native")
    return "" if found is None or found.origin is None else file_hash(Path(found.origin))


def _iproute2() -> str:
    """What `ip -V` says, or nothing."""
    program = shutil.which("ip", path=_SBIN)
    if program is None:
        return ""
    return subprocess.run([program, "-V"], capture_output=True, text=True, check=False).stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _field(file: str, name: str) -> str:
    """The first value of this name, or nothing."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
