#!/bin/sh
# Runs under Miri the unit tests of the crates that make no system calls; Miri sees what AddressSanitizer cannot: uninitialised values, aliasing,
# pointers that lost what they may point to. Tests that would take minutes there say so: cfg_attr(miri, ignore = ".."). usage: miri.sh [--check]
# --check: only whether Miri is installed.
set -eu

if ! cargo +nightly miri --version >/dev/null 2>&1; then
    echo "gradwire: missing Miri: rustup toolchain install nightly --component miri --component rust-src" >&2
    exit 1
fi
[ "${1:-}" != --check ] || exit 0

cd "$(dirname "$0")/.."
# Without isolation, since the wire format's tests read their corpora; kernels with vector instructions are not chosen under Miri.
export MIRIFLAGS="${MIRIFLAGS:--Zmiri-strict-provenance -Zmiri-disable-isolation}"
# Cases of a property; 256 would take hours.
export PROPTEST_CASES="${PROPTEST_CASES:-4}"
miri() { cargo +nightly miri test --locked --target-dir target/miri "$@"; }
miri --package gradwire-wire --tests
# Of the core, which forbids unsafe code, the data structures; simulated links would take hours.
miri --package gradwire-core --lib -- arrivals:: transfer:: transit:: spray:: mark::
miri --package gradwire-collectives --lib
