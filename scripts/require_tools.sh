#!/bin/sh
# Says in one line what this machine lacks to build gradwire, and how to get it; silent when nothing is missing.
# usage: require_tools.sh PYTHON [lint]      (`lint` asks for rustfmt and clippy as well)
# Called by the Makefile before anything is installed, so that no half-made environment is left behind.
set -eu

python=${1:?usage: require_tools.sh PYTHON [lint]}
level=${2:-build}
missing=

lack() { missing="${missing:+$missing; }$1"; }

# version_at_least FOUND MAJOR MINOR
version_at_least() {
    major=${1%%.*}
    rest=${1#*.}
    minor=${rest%%.*}
    [ "$major" -gt "$2" ] || { [ "$major" -eq "$2" ] && [ "$minor" -ge "$3" ]; }
}

cargo_version=$(cargo --version 2>/dev/null | cut -d ' ' -f 2 || true)
if [ -z "$cargo_version" ] || ! version_at_least "$cargo_version" 1 85; then
    lack "cargo >= 1.85${cargo_version:+ (found $cargo_version)}: https://rustup.rs"
fi

python_version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
if [ -z "$python_version" ] || ! version_at_least "$python_version" 3 10; then
    lack "python >= 3.10${python_version:+ ($python is $python_version)}: install it or run make PYTHON=/path/to/python3"
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    lack "$python's venv module: your system's python3-venv package (apt install python3-venv)"
fi

if ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
    lack "a C compiler: your system's gcc or clang package (apt install gcc libc6-dev)"
fi

if [ "$level" = lint ]; then
    cargo fmt --version >/dev/null 2>&1 || lack "rustfmt: rustup component add rustfmt"
    cargo clippy --version >/dev/null 2>&1 || lack "clippy: rustup component add clippy"
fi

if [ -n "$missing" ]; then
    echo "gradwire: missing $missing" >&2
    exit 1
fi
